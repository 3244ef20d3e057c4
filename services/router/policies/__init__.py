"""How a worker is chosen: each candidate gets a score, the lowest wins. Pure.

Every policy states its formula, what it reads, where it fails and where it comes from. Pinning, sessions and filters
come before any policy (`workers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.router.policies.base import Parameters, Policy
from services.router.policies.linear import Linear
from services.router.policies.lmetric import Lmetric
from services.router.policies.simple import LeastLoaded, RoundRobin
from services.router.policies.ttft import Ttft

__all__ = ["POLICIES", "LeastLoaded", "Linear", "Lmetric", "Parameters", "Policy", "RoundRobin", "Ttft"]

POLICIES: Mapping[str, Callable[[Parameters], Policy]] = {
    "lmetric": Lmetric,
    "ttft": Ttft,
    "linear": Linear,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
}
"""By the name in the settings."""
