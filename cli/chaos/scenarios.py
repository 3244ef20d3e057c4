"""What a run can be about. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cli.chaos.asks import LONG_ANSWERS, MIXED, REAL_MODEL, Mix
from cli.chaos.plan import Fault

__all__ = ["SCENARIOS", "Scenario"]


def _can_hang() -> Mapping[str, str]:
    return {"prefill": "hang", "decode": "hang"}


@dataclass(frozen=True, slots=True)
class Scenario:
    """Which faults meet which load."""

    about: str
    faults: str
    mix: Mix = MIXED
    rate_s: float = 8.0
    spacing_s: float = 6.0
    """Between two faults, about. Far enough apart, one is over before the next."""
    network: bool = False
    """Whether workers and routers are reached through links."""
    engine_faults: Mapping[str, str] = field(default_factory=_can_hang)
    """Role -> what its simulated engines can do wrong."""
    recovery_s: float = 180.0

    def can_make(self, fault: Fault) -> bool:
        """Whether its deployment is laid out for this fault."""
        if fault.action == "hang":  # to any other engine the signal would be deadly
            return self.engine_faults.get(fault.role) == "hang"
        return self.network or not fault.network


_WITH_BAD_KV = "kill-prefill,kill-decode,hang-up-clients"

SCENARIOS: Mapping[str, Scenario] = {
    "mixed": Scenario("every fault, some while others last", "*", spacing_s=4.0, network=True),
    "decode-kill": Scenario("decode workers die under long streams", "kill-decode", LONG_ANSWERS, rate_s=6.0),
    "prefill-kill": Scenario("prefill workers die", "kill-prefill"),
    "router-kill": Scenario("routers die", "kill-router"),
    "etcd-away": Scenario("etcd is away, as long as --lasts says", "away-etcd"),
    "nats-away": Scenario("NATS is away, as long as --lasts says", "away-nats"),
    "restarts": Scenario("services are stopped, drained and undrained", "stop-*,drain-*"),
    "corrupt-kv": Scenario(
        "all KV from prefill workers is spoilt", _WITH_BAD_KV, engine_faults={"prefill": "corrupt-block"}
    ),
    "late-kv": Scenario("all KV is read too late", _WITH_BAD_KV, engine_faults={"decode": "late-read"}),
    "real-model": Scenario(
        "workers of --engine vllm die", _WITH_BAD_KV, REAL_MODEL, rate_s=0.7, spacing_s=30.0, engine_faults={},
        recovery_s=600.0,
    ),
}  # fmt: skip
