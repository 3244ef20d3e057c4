"""The host's own request on a real engine, in either role."""

from __future__ import annotations

import pytest

from engines.host.canary import Canary
from tests.integration.engines.vllm_engine.running import Running, eventually

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="package")]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_idle_engine_answers_its_host_and_holds_nothing_for_it(p: Running, d: Running, role: str) -> None:
    running = p if role == "prefill" else d
    before = running.engine.load()
    canary = Canary(running.engine, idle_s=0)
    canary.observe(0, now=True)
    assert canary.under_way
    await eventually(lambda: not canary.under_way)
    after = running.engine.load()
    assert after.steps > before.steps
    assert after.kv_leases == before.kv_leases
    await canary.close()
