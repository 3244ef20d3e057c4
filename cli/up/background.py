"""`tokenmill up --detach`: the deployment goes on in a process of its own, this one returns when it is ready."""

from __future__ import annotations

import os
import signal
import sys
import time
from io import BufferedReader

from controlplane.deployment import RunFolder, running

__all__ = ["in_background"]

_POLL_S = 0.1


def in_background(folder: RunFolder, deployment: str) -> int | None:
    """Forks; must be called before there are threads. None in the child, which owns the folder and is to serve.

    The caller's process shows what the child says until it serves or ends, and gets the exit code. A Ctrl-C meanwhile
    stops the child.
    """
    log_file = folder.path / "logs" / "up.log"
    log_file.parent.mkdir()
    log_file.touch()
    child = os.fork()
    if child == 0:
        os.setsid()
        nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(log_file, os.O_WRONLY | os.O_APPEND)
        for descriptor, standard in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, standard)
        os.close(nothing)
        os.close(log)
        return None

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: os.kill(child, signal.SIGTERM))
    with log_file.open("rb") as log_reader:
        folder.leave()
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            state = running(deployment)
            _relay(log_reader)
            if ended:
                return os.waitstatus_to_exitcode(status) % 256
            if state is not None and state.url:
                print(state.url)
                return 0
            time.sleep(_POLL_S)


def _relay(log: BufferedReader) -> None:
    sys.stderr.write(log.read().decode(errors="replace"))
    sys.stderr.flush()
