"""A process with one simulated prefill engine. Prints each handle as a line of JSON; reads commands from stdin."""

from __future__ import annotations

import asyncio
import base64
import json
import sys

import msgspec

from engines.base import EngineRequest, Role, SamplingParams
from engines.sim.config import SimConfig
from engines.sim.engine import SimEngine


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


async def main(config: SimConfig, hash_seed: int) -> None:
    engine = SimEngine(config, Role.PREFILL, "prefill-1", hash_seed)
    info = await engine.start(lambda _: None, lambda _: None)
    say(format=msgspec.to_builtins(info.format))
    count = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        if command["do"] == "prefill":
            count += 1
            request = EngineRequest(f"p{count}", command["prompt"], SamplingParams(max_tokens=1))
            result = await engine.prefill(request)
            say(
                handle_id=result.handle_id,
                tokens=result.tokens,
                engine_params=base64.b64encode(result.engine_params).decode(),
                digests=[digest.hex() for digest in result.digests],
                lease_s=result.lease_s,
            )
        elif command["do"] == "load":
            engine._scheduler.check_integrity()
            say(**msgspec.to_builtins(engine.load()))
    await engine.stop()


if __name__ == "__main__":
    asyncio.run(main(SimConfig(**json.loads(sys.argv[1])), int(sys.argv[2])))
