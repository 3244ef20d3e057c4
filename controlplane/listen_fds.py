"""Listening sockets that a process was started with, by systemd's convention (sd_listen_fds).

Whoever opens a socket for a process, and keeps it, lets that process be followed by another one without refusing a
single connection: those that come meanwhile wait in the kernel.
"""

from __future__ import annotations

import os
import socket

__all__ = ["BACKLOG", "FIRST_FD", "inherited_sockets"]

BACKLOG = 2048
"""Connections that wait to be accepted."""
FIRST_FD = 3
"""They are 3, 4 and so on; LISTEN_FDS says how many, LISTEN_PID for whom."""


def inherited_sockets() -> list[socket.socket]:
    """The sockets meant for this process. Takes them: they are found once, and its own children do not get them."""
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "0")
    if pid != str(os.getpid()) or not count.isdigit():
        return []
    sockets = [socket.socket(fileno=descriptor) for descriptor in range(FIRST_FD, FIRST_FD + int(count))]
    for one in sockets:
        one.set_inheritable(False)
        one.setblocking(False)
    return sockets
