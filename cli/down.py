"""`tokenmill down`: stops a deployment that runs on this machine."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Sequence

from cli.arguments import add_deployment
from controlplane.deployment import running
from controlplane.errors import Unavailable

__all__ = ["main"]


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
    print(f"stopping deployment {name!r} (pid {state.pid})", file=sys.stderr)
    supervisor = os.pidfd_open(state.pid)
    signal.pidfd_send_signal(supervisor, signal.SIGTERM)
    ended, _, _ = select.select([supervisor], [], [], arguments.timeout)
    if not ended:
        raise Unavailable(
            f"deployment {name!r} (pid {state.pid}) still runs after {arguments.timeout:g} s; "
            "`tokenmill down` again forces it"
        )
    print(f"deployment {name!r} stopped after {time.monotonic() - started:.1f} s")
    return 0
