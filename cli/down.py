"""`tokenmill down`: stops a deployment that runs on this machine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence

from cli.arguments import add_deployment
from controlplane.deployment import running
from controlplane.errors import Unavailable

__all__ = ["main"]

_POLL_S = 0.05


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit code: 0 when the deployment has stopped."""
    parser = argparse.ArgumentParser(
        prog="tokenmill down",
        description="Stops a deployment on this machine: running requests are finished, then every process ends.",
    )
    add_deployment(parser)
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="longest wait for it to stop [default 60]"
    )
    arguments = parser.parse_args(argv)
    name: str = arguments.deployment

    state = running(name)
    if state is None:
        raise Unavailable(f"deployment {name!r} does not run on this machine")
    started = time.monotonic()
    os.kill(state.pid, signal.SIGTERM)
    print(f"stopping deployment {name!r} (pid {state.pid})", file=sys.stderr)
    while running(name) is not None:
        if time.monotonic() - started > arguments.timeout:
            raise Unavailable(
                f"deployment {name!r} (pid {state.pid}) still runs after {arguments.timeout:g} s; "
                "`tokenmill down` again forces it"
            )
        time.sleep(_POLL_S)
    print(f"deployment {name!r} stopped after {time.monotonic() - started:.1f} s")
    return 0
