"""What can go wrong while bytes move.

TransferError
├── NixlMissing        the library is not installed, or cannot start here
├── NoSuchInterface    the address to be reached at is not this machine's
└── PeerUnreachable    the other agent is dead, silent or not there
"""

from __future__ import annotations

__all__ = ["NixlMissing", "NoSuchInterface", "PeerUnreachable", "TransferError"]


class TransferError(Exception):
    """The root."""


class NixlMissing(TransferError):
    """NIXL is not installed, or cannot start here."""


class NoSuchInterface(TransferError):
    """No network interface of this machine has the address it shall be reached at."""


class PeerUnreachable(TransferError):
    """The peer is dead, silent or not there."""
