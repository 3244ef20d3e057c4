"""Frontends to talk to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import openai
import pytest

from tests.integration.frontend.peers import Frontend, running_frontend


@pytest.fixture(scope="session")
def frontend(etcd: str, nats: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    """One for all tests that leave it running: each has a model of its own there, and no router."""
    with running_frontend(etcd, nats, tmp_path_factory.mktemp("frontend") / "log") as running:
        yield running


@pytest.fixture
async def http(frontend: Frontend) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=frontend.url, timeout=60) as client:
        yield client


@pytest.fixture
async def client(frontend: Frontend) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own, as it comes."""
    async with openai.AsyncOpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0) as client:
        yield client
