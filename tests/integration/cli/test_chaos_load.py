"""The load and its checker, against frontends that do everything wrong that can be done."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cli.chaos import load as load_module
from cli.chaos.asks import Ask, Face
from cli.chaos.checker import Expected, Verdict
from cli.chaos.clients import Client
from cli.chaos.load import Load, Record
from cli.chaos.suite import MARK, Part, marked_processes
from controlplane.embedded import free_port

_RIGHT = Expected(" one two three", 5, 3)
_DEADLINE_S = 60.0

Behaviour = Callable[[asyncio.StreamWriter], Awaitable[None]]


class _Right:
    def expected(self, ask: Ask) -> Expected:
        return _RIGHT


def _chunk(**choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "", "finish_reason": None} | choice], "usage": None}


_USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}
_GOOD = [_chunk(text=" one"), _chunk(text=" two"), _chunk(text=" three", finish_reason="length"), _USAGE]


def _streams(*events: dict[str, Any], end: bool = True) -> Behaviour:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for event in events:
            data = b"data: " + json.dumps(event).encode() + b"\n\n"
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        if end:
            writer.write(b"0\r\n\r\n")

    return answer


def _says(status: str, body: dict[str, Any], headers: str = "") -> Behaviour:
    async def answer(writer: asyncio.StreamWriter) -> None:
        data = json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(data)}\r\n{headers}\r\n".encode() + data)

    return answer


async def _says_nothing(writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def _frontend(behaviour: Behaviour) -> AsyncIterator[Client]:
    """A frontend that does the same with every request, and then closes the connection."""
    answering: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        answering.add(task)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(re.search(rb"(?i)content-length: (\d+)", head)[1]))  # type: ignore[index]
        await behaviour(writer)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    part = Part("frontend", "frontend", free_port(), free_port(), server.sockets[0].getsockname()[1])
    async with Client(part, "sim") as client:
        yield client
    for task in answering:
        task.cancel()
    server.close()


async def _ask(
    *behaviours: Behaviour, stream: bool = True, deadline_s: float = _DEADLINE_S, faults: str = ""
) -> Record:
    """What the load makes of one request, asked of frontends that behave so."""
    ask = Ask(1, Face.COMPLETIONS, stream, "Why?", 3, deadline_s)
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(_frontend(behaviour)) for behaviour in behaviours]
        load = Load(clients, iter([ask]), _Right(), rate_s=1e-9, disturbed=lambda *_: {faults} - {""})
        async with load.running():
            load.burst(1)
    (record,) = load.records
    return record


async def test_the_right_answer_is_right_streamed_or_whole() -> None:
    assert (await _ask(_streams(*_GOOD))).judgement.verdict is Verdict.RIGHT
    whole = _chunk(text=_RIGHT.text, finish_reason="length") | {"usage": _USAGE["usage"]}
    assert (await _ask(_says("200 OK", whole), stream=False)).judgement.verdict is Verdict.RIGHT


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([_GOOD[0], _GOOD[1], _GOOD[1], *_GOOD[2:]], id="a piece twice"),
        pytest.param([_GOOD[0], *_GOOD[2:]], id="a piece missing"),
        pytest.param([_chunk(text=" uno"), *_GOOD[1:]], id="another text"),
        pytest.param(_GOOD[:3], id="no usage"),
        pytest.param([*_GOOD[:3], _USAGE | {"usage": {"prompt_tokens": 6, "completion_tokens": 3}}], id="wrong usage"),
        pytest.param([*_GOOD[:2], _chunk(text=" three", finish_reason="stop"), _USAGE], id="wrong finish reason"),
    ],
)
async def test_a_wrong_stream_is_wrong(events: list[dict[str, Any]]) -> None:
    assert (await _ask(_streams(*events), faults="decode")).judgement.verdict is Verdict.WRONG


@pytest.mark.parametrize(
    "behaviour",
    [
        pytest.param(_says("500 Internal Server Error", {"error": {"message": "no"}}), id="an error"),
        pytest.param(_says("503 Service Unavailable", {"error": {"message": "no"}}), id="refused without a time"),
        pytest.param(_streams(_GOOD[0], {"error": {"message": "the worker is lost"}}), id="an error in the stream"),
        pytest.param(_streams(_GOOD[0], end=False), id="a broken stream"),
        pytest.param(_streams(*_GOOD[:2]), id="a stream that ends too early"),
    ],
)
async def test_an_answer_that_does_not_come_is_lost(behaviour: Behaviour) -> None:
    assert (await _ask(behaviour, deadline_s=1.0, faults="decode")).judgement.verdict is Verdict.LOST


async def test_silence_past_the_deadline_has_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "GRACE_S", 0.1)
    assert (await _ask(_says_nothing, deadline_s=0.2, faults="decode")).judgement.verdict is Verdict.HUNG


async def test_clients_of_a_frontend_that_is_gone_ask_another() -> None:
    record = await _ask(_streams(_GOOD[0], end=False), _streams(*_GOOD), faults="frontend")
    assert record.judgement.verdict is Verdict.RIGHT


async def test_a_refusal_with_a_time_is_asked_again_and_not_lost_while_a_fault_is_at_work() -> None:
    refusal = _says("429 Too Many Requests", {"error": {"message": "full"}}, "retry-after: 1\r\n")
    record = await _ask(refusal, deadline_s=2.5, faults="decode")
    assert record.judgement.verdict is Verdict.REFUSED
    assert len(record.attempts) > 1
    assert (await _ask(refusal, deadline_s=0.1)).judgement.verdict is Verdict.LOST


async def test_clients_that_hang_up_are_cancelled() -> None:
    async with _frontend(_says_nothing) as client:
        asks = (Ask(number, Face.COMPLETIONS, True, "Why?", 3, _DEADLINE_S) for number in range(3))
        load = Load([client], asks, _Right(), rate_s=1e-9, disturbed=lambda *_: set())
        async with load.running():
            load.burst(3)
            await asyncio.sleep(0)
            load.hang_up()
    assert [record.judgement.verdict for record in load.records] == [Verdict.CANCELLED] * 3


def test_a_process_left_behind_is_found() -> None:
    left = subprocess.Popen([sys.executable, "-c", "input()"], env={MARK: "left"}, stdin=subprocess.PIPE)
    try:
        assert list(marked_processes("left")) == [left.pid]
    finally:
        left.kill()
        left.wait()
    assert marked_processes("left") == {}
