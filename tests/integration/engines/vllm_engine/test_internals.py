"""The installed vLLM is still the one that the adapter leans on."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.vllm]


def test_vllm_has_moved_nothing_that_we_lean_on() -> None:
    from engines.vllm.internals import moved

    assert moved() == []


def test_what_has_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
    from vllm.v1.engine.output_processor import OutputProcessor

    from engines.vllm.internals import moved

    monkeypatch.delattr(NixlPullConnectorWorker, "_read_blocks_for_req")
    monkeypatch.setattr(OutputProcessor, "add_request", lambda self, request: None)
    gone, changed = moved()
    assert gone == "NixlPullConnectorWorker._read_blocks_for_req is gone"
    assert changed.startswith("OutputProcessor.add_request takes (self, request), not (self, request, prompt, ")


def test_nixl_agents_are_made_with_a_patient_progress_thread() -> None:
    import sys

    from vllm.distributed.nixl_utils import NixlWrapper

    from engines.vllm.internals import PROGRESS_DELAY_US, patient_progress_thread

    bindings = sys.modules[NixlWrapper.__module__].nixlBind
    original, delays = bindings.nixlAgent, []

    def spy(name: str, config: object) -> object:
        delays.append(config.pthrDelay)  # type: ignore[attr-defined]
        return original(name, config)

    bindings.nixlAgent = spy
    try:
        with patient_progress_thread():
            NixlWrapper("patient", None)
        NixlWrapper("restless", None)
    finally:
        bindings.nixlAgent = original
    assert delays == [PROGRESS_DELAY_US, 0]
