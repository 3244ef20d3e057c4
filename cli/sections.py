"""All settings sections, as one program that starts the others needs them."""

from __future__ import annotations

from collections.abc import Mapping

from cli.up.settings import UpSettings
from controlplane.settings import CommonSettings
from engines.settings import EngineSettings
from services.decode.settings import DecodeSettings
from services.fleet.settings import FleetSettings
from services.frontend.settings import FrontendSettings
from services.prefill.settings import PrefillSettings
from services.router.settings import RouterSettings

__all__ = ["ALL_SECTIONS"]

# Of two fields of one name, the first keeps the plain flag.
ALL_SECTIONS: Mapping[str, type] = {
    "up": UpSettings,
    "common": CommonSettings,
    "engine": EngineSettings,
    "frontend": FrontendSettings,
    "router": RouterSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "fleet": FleetSettings,
}
