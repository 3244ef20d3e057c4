import pytest

from cli.openai_client import Message, OpenAiClient, StreamUsage
from controlplane.errors import InvalidRequest, Unavailable
from tests.unit.cli.openai_stub import OpenAiStub

_MESSAGES: list[Message] = [{"role": "user", "content": "Hello"}]


async def test_an_answer_comes_in_parts_and_ends_with_its_usage(openai_stub: OpenAiStub) -> None:
    async with OpenAiClient(f"{openai_stub.url}/v1", api_key="secret") as client:
        assert await client.models() == ["tiny", "other"]
        parts = [text async for text in client.chat("tiny", _MESSAGES, max_tokens=5)]
    assert "".join(parts) == "1 messages"
    assert client.usage == StreamUsage(prompt_tokens=7, completion_tokens=2, remote_tokens=6)
    assert openai_stub.requests[0]["max_tokens"] == 5
    assert openai_stub.requests[0]["authorization"] == "Bearer secret"


async def test_a_refusal_is_what_the_server_says(openai_stub: OpenAiStub) -> None:
    openai_stub.refusal = (400, "max_tokens must be positive")
    async with OpenAiClient(openai_stub.url) as client:
        with pytest.raises(InvalidRequest, match="max_tokens must be positive"):
            _ = [text async for text in client.chat("tiny", _MESSAGES, max_tokens=None)]
    assert "max_tokens" not in openai_stub.requests[0]


async def test_an_answer_that_breaks_off_is_an_error_and_has_no_usage(openai_stub: OpenAiStub) -> None:
    openai_stub.broken_after_first = True
    async with OpenAiClient(openai_stub.url) as client:
        with pytest.raises(Unavailable, match="the worker was lost"):
            _ = [text async for text in client.chat("tiny", _MESSAGES, max_tokens=None)]
    assert client.usage is None


async def test_nobody_there_is_told_with_the_address() -> None:
    async with OpenAiClient("http://127.0.0.1:9") as client:
        with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:9"):
            await client.models()
