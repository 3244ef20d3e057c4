"""`tokenmill drain`: takes one instance out of use without losing a request, and shows how that goes."""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Sequence

import grpc

from cli.control import add_instance, controlled, refused
from controlplane.discovery import Discovery
from controlplane.errors import EngineFailed, Unavailable
from controlplane.instances import Instance, State
from tokenmill.control.v1 import control_pb2, control_pb2_grpc

__all__ = ["main"]

_CALL_TIMEOUT_S = 10.0
_FRONTEND_TIMEOUT_S = 600.0
_LOOK_S = 0.5
_END_S = 60.0
"""Longest time a process may need to end once its drain is over."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit code: 0 when the instance is gone, or drains where nobody waits for that."""
    parser = argparse.ArgumentParser(
        prog="tokenmill drain",
        description="Takes an instance out of use: nobody sends it new work from now on, it finishes what runs, and "
        "ends. What runs longer than the drain may take goes on on another instance. `tokenmill undrain` takes it back "
        "while it lasts.",
    )
    add_instance(parser)
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help="longest wait for what runs [default: the instance's own drain_timeout_s; for a frontend, whose answers "
        f"cannot go on elsewhere, {_FRONTEND_TIMEOUT_S:g}]",
    )
    parser.add_argument("--no-wait", action="store_true", help="return when the drain has begun")
    return asyncio.run(_drain(parser.parse_args(argv)))


async def _drain(arguments: argparse.Namespace) -> int:
    async with controlled(arguments) as (instance, control, discovery):
        timeout_s = arguments.timeout
        if timeout_s is None and instance.service == "frontend":
            timeout_s = _FRONTEND_TIMEOUT_S
        timeout_ms = None if timeout_s is None else round(timeout_s * 1000)
        request = control_pb2.DrainRequest(instance_id=instance.instance_id, timeout_ms=timeout_ms)
        started = time.monotonic()
        try:
            answer = await control.Drain(request, timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise refused(instance, error) from error
        print(f"{instance.instance_id} drains, for {answer.timeout_ms / 1000:g} s at most", flush=True)
        if not arguments.no_wait:
            await _until_gone(instance, control, discovery, answer.timeout_ms / 1000 + _END_S)
            print(f"{instance.instance_id} is gone after {time.monotonic() - started:.1f} s")
    return 0


async def _until_gone(
    instance: Instance, control: control_pb2_grpc.ControlStub, discovery: Discovery, longest_s: float
) -> None:
    said = ""
    deadline = time.monotonic() + longest_s
    while True:
        known = discovery.instances.get(instance.instance_id)
        if known is None or known.epoch != instance.epoch:
            return
        if known.state is State.FAILED:
            raise EngineFailed(f"{instance.instance_id} failed while it drained: {known.progress}")
        if known.state is State.READY and said:
            raise Unavailable(f"{instance.instance_id} is in use again: somebody took the drain back")
        if time.monotonic() > deadline:
            raise Unavailable(f"{instance.instance_id} is still there after {longest_s:g} s")
        text = await _progress(instance, control)
        if text not in ("", said):
            print(text, flush=True)
            said = text
        await asyncio.sleep(_LOOK_S)


async def _progress(instance: Instance, control: control_pb2_grpc.ControlStub) -> str:
    """Empty when it has nothing to say any more."""
    try:
        status = await control.Status(
            control_pb2.StatusRequest(instance_id=instance.instance_id), timeout=_CALL_TIMEOUT_S
        )
    except grpc.aio.AioRpcError:
        return ""
    return f"{instance.instance_id} is {status.state}, {status.unfinished} unfinished"


def _seconds(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or not 0 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} is no time: give seconds, 0 to 1000000")
    return value
