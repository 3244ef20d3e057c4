"""Moving bytes between processes with NIXL, and verifying them where they arrive."""

from transfer.agent import Agent, Read, Span
from transfer.digest import digest
from transfer.errors import NixlMissing, NoSuchInterface, PeerUnreachable, TransferError
from transfer.ucx import ucx_environment

__all__ = [
    "Agent",
    "NixlMissing",
    "NoSuchInterface",
    "PeerUnreachable",
    "Read",
    "Span",
    "TransferError",
    "digest",
    "ucx_environment",
]
