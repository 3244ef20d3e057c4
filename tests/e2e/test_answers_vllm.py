"""Greedy float32 answers of a real model through the whole suite are vLLM's own, token for token, whatever goes wrong.

The suite is as `tokenmill up` starts it, and is asked over gRPC as a client would. vLLM alone is another process that
knows nothing of us. Every other number here says that what should have happened did: that KV travelled, or that the
fault was met.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from engines import demo_model
from tests.e2e import vllm_alone
from tests.e2e.command_line import Tokenmill
from tests.integration.engines.vllm_engine.prompts import EIGHT, NAMES, Alone, prompts, story
from tokenmill.common.v1 import common_pb2
from tokenmill.inference.v1 import inference_pb2, inference_pb2_grpc

pytestmark = pytest.mark.vllm

_DEADLINE_S = 600.0
"""Ten times what anything here is expected to take on two idle cores."""
_LEASE_S = 5

# Several steps for one prompt, so that there is a time in which a prefill worker can be killed.
_UP = ("up", "-d", "--model", "demo", "--dtype", "float32", "--max-batched-tokens", "512", "--port", "0")
_REMOTE = pytest.param(("--prefill", "1", "--decode", "1"), id="remote prefill")
_WHOLE = pytest.param(("--prefill", "0", "--decode", "1"), id="no prefill worker")
_CORRUPT = pytest.param(("--fault", "corrupt-block"), id="corrupted blocks")
_LATE = pytest.param(("--fault", "late-read", "--kv-lease-s", str(_LEASE_S)), id="late reads")

_ONE_BY_ONE = tuple(name for name in NAMES if name not in EIGHT)
_NEVER_SEEN = {f"story from {start}": slice(start, start + 300) for start in range(202, 202 + 16 * 91, 91)}
_FIRST_KILL, _SECOND_KILL = tuple(_NEVER_SEEN)[:8], tuple(_NEVER_SEEN)[8:]


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    remote_tokens: int
    """Of the prompt, computed by a prefill worker."""


class Suite:
    """A running deployment, seen from outside. Tests share it: what counts is what a test adds."""

    def __init__(self, tokenmill: Tokenmill, alone: dict[str, Alone]) -> None:
        self.tokenmill = tokenmill
        self._alone = alone
        instances = {one["service"]: one for one in json.loads(tokenmill.run("status", "--json").stdout)["instances"]}
        self._frontend: dict[str, Any] = instances["frontend"]
        self._decode: dict[str, Any] = instances["decode"]

    async def ask(self, name: str, first_token: asyncio.Event | None = None) -> Answer:
        """One prompt, by its name."""
        request = inference_pb2.GenerateRequest(
            prompt_token_ids=inference_pb2.TokenIds(ids=self._alone[name].prompt),
            sampling=common_pb2.Sampling(max_tokens=vllm_alone.ANSWER_TOKENS, temperature=0, ignore_eos=True),
        )
        tokens: list[int] = []
        async with grpc.aio.insecure_channel(self._frontend["address"]) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            async for response in stub.Generate(request, timeout=_DEADLINE_S):
                tokens.extend(response.token_ids)
                if first_token is not None:
                    first_token.set()
        assert response.finish_reason == common_pb2.FINISH_REASON_LENGTH
        return Answer(tokens, response.usage.remote_tokens)

    async def ask_at_once(self, names: Iterable[str]) -> dict[str, Answer]:
        names = list(names)
        return dict(zip(names, await asyncio.gather(*map(self.ask, names)), strict=True))

    def handoffs(self) -> Counter[str]:
        """Requests by what became of the KV that decode was handed."""
        return self._counted(self._decode, "tokenmill_kv_handoffs_total", "outcome")

    def fallbacks(self) -> Counter[str]:
        """Requests whose prefill worker failed, by how."""
        return self._counted(self._frontend, "tokenmill_prefill_fallbacks_total", "reason")

    @staticmethod
    def _counted(instance: dict[str, Any], name: str, label: str) -> Counter[str]:
        page = httpx.get(f"http://{instance['metrics_address']}/metrics", timeout=30, trust_env=False).text
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
        return Counter({one.labels[label]: int(one.value) for one in samples if one.name == name})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Alone]:
    """vLLM's own answer to every prompt of this file."""
    model = demo_model.fetch()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    told = story(tokenizer)
    asked = prompts(tokenizer) | {name: told[part] for name, part in _NEVER_SEEN.items()}
    folder = tmp_path_factory.mktemp("alone")
    (folder / "prompts.json").write_text(json.dumps(asked))
    subprocess.run(
        [sys.executable, vllm_alone.__file__, model, folder / "prompts.json", folder / "answers.json"],
        env=os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        timeout=_DEADLINE_S,
        check=True,
    )
    answers = json.loads((folder / "answers.json").read_text())
    return {name: Alone(asked[name], answer["tokens"], answer["margin"]) for name, answer in answers.items()}


@pytest.fixture(scope="module")
def suite(request: pytest.FixtureRequest, alone: dict[str, Alone]) -> Iterator[Suite]:
    """Started with the flags a test gives; tests with the same flags share it."""
    with _tokenmill() as tokenmill:
        started = tokenmill.run(*_UP, *request.param, timeout_s=_DEADLINE_S)
        assert started.returncode == 0, started.stderr
        yield Suite(tokenmill, alone)
        stopped = tokenmill.run("down")
        assert stopped.returncode == 0, stopped.stderr


@contextmanager
def _tokenmill() -> Iterator[Tokenmill]:
    """A command line that leaves nothing, in a folder of a short name: sockets have their paths below it."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder:
        tokenmill = Tokenmill(Path(folder))
        try:
            yield tokenmill
            tokenmill.assert_nothing_left()
        finally:
            tokenmill.close()


def _tokens(answers: dict[str, Answer]) -> dict[str, list[int]]:
    return {name: answer.tokens for name, answer in answers.items()}


def _of_vllm(alone: dict[str, Alone], names: Iterable[str]) -> dict[str, list[int]]:
    return {name: alone[name].answer for name in names}


def test_no_answer_compared_here_hangs_on_rounding(alone: dict[str, Alone]) -> None:
    assert len(NAMES) >= 12
    assert {name: case.margin for name, case in alone.items() if case.margin <= 1e-3} == {}


@pytest.mark.parametrize("suite", [_REMOTE], indirect=True)
async def test_with_remote_prefill_every_answer_is_vllms_own(suite: Suite, alone: dict[str, Alone]) -> None:
    before = suite.handoffs()
    answers = await suite.ask_at_once(EIGHT)
    for name in _ONE_BY_ONE:
        answers[name] = await suite.ask(name)
    assert _tokens(answers) == _of_vllm(alone, NAMES)
    assert [name for name, answer in answers.items() if not answer.remote_tokens] == []
    assert suite.handoffs() - before == Counter(read=len(NAMES))


@pytest.mark.parametrize("suite", [_REMOTE], indirect=True)
async def test_a_killed_prefill_worker_changes_no_answer(suite: Suite, alone: dict[str, Alone]) -> None:
    """Killed as the prompts come, and again when one of them has been handed over and the others have not."""
    fallbacks, handoffs = suite.fallbacks(), suite.handoffs()
    for names, wait_for_token in ((_FIRST_KILL, False), (_SECOND_KILL, True)):
        await _until_prefill_is_remote(suite)
        first_token = asyncio.Event()
        asking = [asyncio.create_task(suite.ask(name, first_token)) for name in names]
        if wait_for_token:
            await asyncio.wait_for(first_token.wait(), _DEADLINE_S)
        os.kill(suite.tokenmill.pid_of("services.prefill"), signal.SIGKILL)
        answers = dict(zip(names, await asyncio.gather(*asking), strict=True))
        assert _tokens(answers) == _of_vllm(alone, names)
    met = suite.fallbacks() - fallbacks, suite.handoffs() - handoffs
    print(f"\nprefills failed: {dict(met[0])}, handoffs: {dict(met[1])}")
    assert met[0].total() + met[1]["unreachable"] > 0
    await _until_prefill_is_remote(suite)


@pytest.mark.parametrize("suite", [_WHOLE], indirect=True)
async def test_without_prefill_workers_every_answer_is_vllms_own(suite: Suite, alone: dict[str, Alone]) -> None:
    before = suite.handoffs()
    answers = await suite.ask_at_once(EIGHT)
    for name in _ONE_BY_ONE:
        answers[name] = await suite.ask(name)
    assert _tokens(answers) == _of_vllm(alone, NAMES)
    assert [name for name, answer in answers.items() if answer.remote_tokens] == []
    assert suite.handoffs() - before == Counter(none=len(NAMES))


@pytest.mark.parametrize("suite", [_CORRUPT], indirect=True)
async def test_corrupted_blocks_change_no_answer(suite: Suite, alone: dict[str, Alone]) -> None:
    # The last block is spoiled, which must not be one that later prompts find in the prefill worker's own cache.
    names = [name for name in NAMES if name != "two whole blocks"]
    before = suite.handoffs()
    answers = await suite.ask_at_once(names)
    assert _tokens(answers) == _of_vllm(alone, names)
    assert [name for name, answer in answers.items() if answer.remote_tokens] == []
    assert suite.handoffs() - before == Counter(corrupt=len(names))


@pytest.mark.parametrize("suite", [_LATE], indirect=True)
async def test_late_reads_change_no_answer(suite: Suite, alone: dict[str, Alone]) -> None:
    before = suite.handoffs()
    answers = await suite.ask_at_once(NAMES)
    assert _tokens(answers) == _of_vllm(alone, NAMES)
    assert [name for name, answer in answers.items() if answer.remote_tokens] == []
    met = suite.handoffs() - before
    assert met["late"] > 0
    # On a busy machine the lease may be over before there is anything to read.
    assert met["late"] + met["too_old"] == len(NAMES), met


def test_the_one_answer_of_the_readme_is_english() -> None:
    with _tokenmill() as tokenmill:
        question = "What is the capital of France?"
        done = tokenmill.run("up", "--model", "demo", "--port", "0", "--once", question, timeout_s=_DEADLINE_S)
        assert done.returncode == 0, done.stderr
        assert "Paris" in done.stdout


async def _until_prefill_is_remote(suite: Suite) -> None:
    async with asyncio.timeout(_DEADLINE_S):
        while not (await suite.ask("short")).remote_tokens:
            pass
