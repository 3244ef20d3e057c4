"""Real vLLM engines. They take 25 s and 2.2 GB each, so tests share them, two at a time at most."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from engines import demo_model
from engines.base import Role
from tests.integration.engines.vllm_engine.prompts import Alone, prompts
from tests.integration.engines.vllm_engine.running import Engines, Running


@pytest.fixture(scope="session")
def model() -> Path:
    return demo_model.fetch()


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def engines(model: Path) -> AsyncIterator[Engines]:
    engines = Engines(model)
    before = dict(os.environ)
    yield engines
    await engines.make_room(2)
    # Engines set variables for their process, which here goes on with other tests and the processes they start.
    os.environ.clear()
    os.environ.update(before)


@pytest_asyncio.fixture(loop_scope="package")
async def p(engines: Engines) -> AsyncIterator[Running]:
    """An engine in the prefill role, with an empty prefix cache."""
    async with engines.use(Role.PREFILL) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="package")
async def d(engines: Engines) -> AsyncIterator[Running]:
    """An engine in the decode role, with an empty prefix cache."""
    async with engines.use(Role.DECODE) as running:
        yield running


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def alone(engines: Engines, model: Path) -> dict[str, Alone]:
    """What one engine by itself answers to each prompt, all at once."""
    running = await engines.get(Role.DECODE)
    tokens = prompts(Tokenizer.from_file(str(model / "tokenizer.json")))
    answers = await asyncio.gather(*(running.answer(prompt, logprobs=2) for prompt in tokens.values()))
    return {
        name: Alone(prompt, answer.tokens, answer.margin())
        for (name, prompt), answer in zip(tokens.items(), answers, strict=True)
    }
