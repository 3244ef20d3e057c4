"""`tokenmill undrain`: takes a drain back that is not done yet."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

import grpc

from cli.control import add_instance, controlled, refused
from tokenmill.control.v1 import control_pb2

__all__ = ["main"]

_CALL_TIMEOUT_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit code: 0 when the instance takes work again."""
    parser = argparse.ArgumentParser(
        prog="tokenmill undrain",
        description="Takes a drain back: the instance takes work again. Too late once what ran is finished.",
    )
    add_instance(parser)
    return asyncio.run(_undrain(parser.parse_args(argv)))


async def _undrain(arguments: argparse.Namespace) -> int:
    async with controlled(arguments) as (instance, control, _):
        request = control_pb2.UndrainRequest(instance_id=instance.instance_id)
        try:
            await control.Undrain(request, timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise refused(instance, error) from error
        print(f"{instance.instance_id} takes work again")
    return 0
