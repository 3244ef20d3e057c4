"""A process whose memory others read. Prints what they need as one JSON line, then each notice it gets."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import numpy as np

from transfer import Agent


async def main(size: int) -> None:
    memory = np.resize(np.arange(251, dtype=np.uint8), size)
    agent = await Agent.open(f"peer-{os.getpid()}")
    await agent.register([(memory.ctypes.data, memory.nbytes)])
    agent.on_notice(lambda notice: print(json.dumps({"notice": notice.decode()}), flush=True))
    agent.listen(True)
    hello = {"metadata": (await agent.metadata()).hex(), "address": memory.ctypes.data}
    print(json.dumps(hello), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await agent.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
