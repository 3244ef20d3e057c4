"""What a worker needs of the process it lives in. `controlplane.host.Host` is one, for a worker of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from controlplane.bus import Bus
from controlplane.channels import Channels
from controlplane.discovery import Discovery
from controlplane.instances import Instance
from controlplane.settings import CommonSettings

__all__ = ["Berth"]


class Berth(Protocol):
    """One worker's place in a process and in the deployment."""

    settings: CommonSettings
    channels: Channels
    registry: CollectorRegistry
    discovery: Discovery
    bus: Bus
    instance: Instance

    async def progress(self, text: str) -> None:
        """Publishes what a start is doing."""

    async def set_ready(self, able: bool) -> None:
        """Whether the worker can do its work now."""

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs `work` beside the worker and ends it with the worker. An exception in it fails the worker."""
