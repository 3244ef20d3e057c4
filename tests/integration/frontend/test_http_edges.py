"""What goes wrong over HTTP, or on purpose: slow and vanished clients, bounds, keys, ids."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from controlplane.errors import InvalidRequest
from tests.integration.frontend.peers import (
    Frontend,
    Live,
    ScriptedDecode,
    ids,
    routing,
    running_frontend,
    serving,
    until,
)
from tokenmill.common.v1 import common_pb2

HELLO: Any = [{"role": "user", "content": "hello"}]


async def be_silent(live: Live) -> None:
    """Nothing comes."""


async def answer(live: Live) -> None:
    live.send("hi")
    live.finish(tokens=len(ids("hi")))


def chat(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": HELLO} | fields


@asynccontextmanager
async def raw(frontend: Frontend) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A TCP connection, for what no HTTP client would do."""
    reader, writer = await asyncio.open_connection("127.0.0.1", frontend.http_port)
    try:
        yield reader, writer
    finally:
        writer.close()


def post(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(content), content)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_before_the_first_token_cancels_its_request_at_once(
    frontend: Frontend, stream: bool
) -> None:
    async with serving(frontend, ScriptedDecode(be_silent)) as worker:
        async with raw(frontend) as (_, writer):
            writer.write(post("/v1/chat/completions", chat(worker.model, stream=stream)))
            await until(lambda: worker.requests)
        gone_at = asyncio.get_running_loop().time()
        await until(lambda: worker.cancelled)
    (cancelled_at,) = worker.cancelled.values()
    assert cancelled_at - gone_at < 2, "200 ms are promised, on a machine that has time"


async def test_a_client_that_hangs_up_in_the_middle_cancels_its_request_at_once(frontend: Frontend) -> None:
    async def begin(live: Live) -> None:
        live.send("begin")

    async with serving(frontend, ScriptedDecode(begin)) as worker:
        async with raw(frontend) as (reader, writer):
            writer.write(post("/v1/completions", {"model": worker.model, "prompt": "x", "stream": True}))
            await reader.readuntil(b'"text":"begin"')
        gone_at = asyncio.get_running_loop().time()
        await until(lambda: worker.cancelled)
    (cancelled_at,) = worker.cancelled.values()
    assert cancelled_at - gone_at < 2, "200 ms are promised, on a machine that has time"


async def test_every_token_reaches_the_client_before_the_next_one_is_made(frontend: Frontend) -> None:
    seen = asyncio.Semaphore(0)

    async def one_by_one(live: Live) -> None:
        for letter in "abc":
            live.send(letter)
            await seen.acquire()
        live.finish(tokens=3)

    async with serving(frontend, ScriptedDecode(one_by_one)) as worker, raw(frontend) as (reader, writer):
        writer.write(post("/v1/completions", {"model": worker.model, "prompt": "x", "stream": True}))
        async with asyncio.timeout(60):
            for letter in (b"a", b"b", b"c"):
                await reader.readuntil(b'"text":"%b"' % letter)
                seen.release()
            await reader.readuntil(b"data: [DONE]\n\n")


async def test_a_connection_serves_one_request_after_another(frontend: Frontend) -> None:
    async with serving(frontend, ScriptedDecode(answer)) as worker, raw(frontend) as (reader, writer):
        for _ in range(3):
            writer.write(post("/v1/chat/completions", chat(worker.model, stream=True)))
            async with asyncio.timeout(60):
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert b"content-type: text/event-stream" in head


async def test_a_client_that_does_not_read_loses_its_request_and_no_other(frontend: Frontend) -> None:
    go_on = asyncio.Event()

    async def pour(live: Live) -> None:
        text = ids("x" * 1000)
        while live.request.request_id not in worker.cancelled and not go_on.is_set():
            live.send(text)
            await asyncio.sleep(0.001)
        live.finish(tokens=1)

    async with serving(frontend, ScriptedDecode(pour)) as worker, raw(frontend) as (reader, writer):
        reader._transport.pause_reading()  # type: ignore[attr-defined]  # and so its buffers fill
        writer.write(post("/v1/completions", {"model": worker.model, "prompt": "x", "stream": True}))
        await until(lambda: worker.cancelled, timeout_s=30)
        async with httpx.AsyncClient() as other:
            go_on.set()
            body = {"model": worker.model, "prompt": "x"}
            assert (await other.post(f"{frontend.url}/v1/completions", json=body)).status_code == 200
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        rest = b""
        async with asyncio.timeout(60):
            while not rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                rest += await reader.read(1 << 20)
        assert b"bytes of its stream unread, so it was ended" in rest


async def test_a_worker_that_fails_before_the_first_token_gives_an_http_error_and_later_an_event(
    frontend: Frontend, http: httpx.AsyncClient
) -> None:
    async def fail_soon(live: Live) -> None:
        live.finish(common_pb2.FINISH_REASON_ERROR, error=InvalidRequest("too odd"))

    async def fail_late(live: Live) -> None:
        live.send("so far")
        live.finish(common_pb2.FINISH_REASON_ERROR, error=InvalidRequest("too odd"))

    async with serving(frontend, ScriptedDecode(fail_soon)) as worker:
        early = await http.post("/v1/chat/completions", json=chat(worker.model, stream=True))
    assert (early.status_code, early.json()["error"]["message"]) == (400, "too odd")
    async with serving(frontend, ScriptedDecode(fail_late)) as worker:
        late = await http.post("/v1/chat/completions", json=chat(worker.model, stream=True))
    events = [line.removeprefix("data: ") for line in late.text.split("\n") if line]
    assert late.status_code == 200
    assert json.loads(events[1])["choices"][0]["delta"]["content"] == "so far"
    assert json.loads(events[2])["error"]["message"] == "too odd"
    assert events[3] == "[DONE]"


async def test_time_runs_out_as_the_request_said(frontend: Frontend, http: httpx.AsyncClient) -> None:
    async with serving(frontend, ScriptedDecode(be_silent)) as worker:
        answer = await http.post("/v1/chat/completions", json=chat(worker.model, timeout_s=0.2))
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        assert 0 < worker.requests[0].request.timeout_ms <= 200
        await until(lambda: worker.cancelled)


@pytest.mark.parametrize(("given", "status"), [("0.2", 504), ("never", 400), ("0", 400), ("nan", 400), ("1e9", 400)])
async def test_a_header_can_bound_the_time_too(
    frontend: Frontend, http: httpx.AsyncClient, given: str, status: int
) -> None:
    async with serving(frontend, ScriptedDecode(be_silent)) as worker:
        headers = {"x-request-timeout": given}
        answer = await http.post("/v1/chat/completions", json=chat(worker.model, timeout_s=30), headers=headers)
        assert answer.status_code == status
        if status == 504:
            assert 0 < worker.requests[0].request.timeout_ms <= 200
        else:
            assert answer.json()["error"]["param"] == "x-request-timeout"
            assert worker.requests == []


async def test_a_body_counts_as_time_and_a_trickle_is_cut_off(etcd: str, nats: str, tmp_path: Path) -> None:
    with running_frontend(etcd, nats, tmp_path / "log", "--read-timeout-s", "0.3") as frontend:
        async with raw(frontend) as (reader, writer), asyncio.timeout(60):
            writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 100000\r\n\r\n")
            head = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
            while not head.done():
                writer.write(b" ")
                await asyncio.sleep(0.01)
            assert (await head).startswith(b"HTTP/1.1 408")


async def test_bodies_have_a_bound_all_together(etcd: str, nats: str, tmp_path: Path) -> None:
    flags = ("--max-bodies-mb", "1", "--max-body-mb", "1")
    with running_frontend(etcd, nats, tmp_path / "log", *flags) as frontend:
        async with raw(frontend) as one, raw(frontend) as other, asyncio.timeout(60):
            for _, writer in (one, other):  # there is room for either; neither ends
                writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n" + b" " * 600_000)
            heads = [asyncio.create_task(reader.readuntil(b"\r\n\r\n")) for reader, _ in (one, other)]
            (refused,), (held,) = await asyncio.wait(heads, return_when=asyncio.FIRST_COMPLETED)
            assert refused.result().startswith(b"HTTP/1.1 429")
            assert b"retry-after" in refused.result()
            held.cancel()
        async with httpx.AsyncClient(base_url=frontend.url, timeout=60) as http:
            async with asyncio.timeout(60):
                while (await http.post("/v1/completions", content=b" " * 900_000)).status_code != 400:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)


async def test_a_refusal_for_want_of_room_does_not_read_the_body_nor_lose_the_connection(
    etcd: str, nats: str, tmp_path: Path
) -> None:
    with running_frontend(etcd, nats, tmp_path / "log", "--max-concurrent-requests", "2") as frontend:
        async with serving(frontend, ScriptedDecode(be_silent)) as worker, raw(frontend) as (_, first):
            first.write(post("/v1/completions", {"model": worker.model, "prompt": "x", "n": 2}))
            await until(lambda: len(worker.requests) == 2)
            async with raw(frontend) as (reader, writer), asyncio.timeout(60):
                for _ in range(2):
                    writer.write(post("/v1/completions", {"not": "looked at"}))
                    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 429")
                    await reader.readuntil(b"}}")


async def test_the_request_id_travels_to_the_worker_and_back(frontend: Frontend, http: httpx.AsyncClient) -> None:
    async with serving(frontend, ScriptedDecode(answer)) as worker:
        headers = {"x-request-id": "my-id.1:2_3"}
        given = await http.post("/v1/chat/completions", json=chat(worker.model), headers=headers)
        made = await http.post("/v1/chat/completions", json=chat(worker.model))
        bad = await http.post("/v1/chat/completions", json=chat(worker.model), headers={"x-request-id": "a b"})
    assert given.headers["x-request-id"] == "my-id.1:2_3"
    assert worker.requests[0].metadata["x-request-id"] == "my-id.1:2_3"
    assert worker.requests[0].request.request_id.startswith("my-id.1:2_3")
    assert made.headers["x-request-id"] == worker.requests[1].metadata["x-request-id"]
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "x-request-id")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_url"),
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("GET", "/v1/models/", 404, "unknown_url"),
        ("GET", "/v1/models/some/one%20else", 404, "model_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/x", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
async def test_a_wrong_url_or_method_is_said_so_in_json(
    http: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    answer = await http.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_health_readiness_and_metrics_have_their_urls(frontend: Frontend, http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).json() == {"status": "alive"}
    async with serving(frontend, ScriptedDecode(answer)) as worker:
        async with asyncio.timeout(60):
            while (ready := await http.get("/ready")).status_code != 200:  # noqa: ASYNC110  another process says so
                await asyncio.sleep(0.01)
        assert worker.model in ready.json()["models"]
        await http.post("/v1/chat/completions", json=chat(worker.model))
    metrics = (await http.get("/metrics")).text
    assert 'tokenmill_requests_total{endpoint="/v1/chat/completions",status="200"}' in metrics
    assert "tokenmill_ttft_seconds_count" in metrics
    assert 'tokenmill_itl_seconds_bucket{le="+Inf"}' in metrics


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (b"not http at all\r\n\r\n", b"400", b"Invalid HTTP"),
        (b"GET /health HTTP/1.1\r\nx: " + b"y" * 40_000, b"431", b"over 32768 bytes"),
        (
            b"POST /v1/completions HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\n{}",
            b"400",
            b"without the header Upgrade",
        ),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999\r\n\r\n", b"413", b"over 16777216 bytes"),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\n{}", b"400", b"gzip"),
    ],
)
async def test_what_is_no_sensible_http_is_refused_in_json_and_the_connection_closed(
    frontend: Frontend, sent: bytes, status: bytes, words: bytes
) -> None:
    async with raw(frontend) as (reader, writer), asyncio.timeout(60):
        writer.write(sent)
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.read(-1)
    assert head.startswith(b"HTTP/1.1 " + status)
    assert words in body
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_a_body_that_grows_past_the_bound_is_refused_though_its_length_was_not_told(frontend: Frontend) -> None:
    async with raw(frontend) as (reader, writer), asyncio.timeout(60):
        writer.write(b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(17):
            writer.write(b"100000\r\n" + b" " * 0x100000 + b"\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413")


@pytest.fixture(scope="module")
def strict_frontend(etcd: str, nats: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    """With keys, room for two answers, and little patience."""
    log = tmp_path_factory.mktemp("strict-frontend") / "log"
    flags = ("--api-keys", "key-one, key-two", "--max-concurrent-requests", "2", "--request-timeout-s", "0.5")
    with running_frontend(etcd, nats, log, *flags) as frontend:
        yield frontend


async def test_only_known_keys_come_in_and_health_needs_none(strict_frontend: Frontend) -> None:
    async with httpx.AsyncClient(base_url=strict_frontend.url, timeout=60) as http:
        for headers in ({}, {"authorization": "Bearer nope"}, {"authorization": "key-one"}):
            refused = await http.get("/v1/models", headers=headers)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert refused.json()["error"]["code"] == "invalid_api_key"
        for key in ("key-one", "key-two"):
            assert (await http.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code == 200
        assert (await http.get("/health")).status_code == 200


async def test_more_answers_than_there_is_room_for_are_refused_with_a_hint(strict_frontend: Frontend) -> None:
    headers = {"authorization": "Bearer key-one"}
    async with httpx.AsyncClient(base_url=strict_frontend.url, headers=headers) as http:
        three = await http.post("/v1/chat/completions", json=chat("any", n=3))
    assert (three.status_code, three.headers["retry-after"]) == (429, "1")
    assert three.json()["error"]["code"] == "rate_limit_exceeded"


async def test_a_body_that_does_not_come_is_not_waited_for(strict_frontend: Frontend) -> None:
    async with raw(strict_frontend) as (reader, writer), asyncio.timeout(60):
        head = b"POST /v1/completions HTTP/1.1\r\nauthorization: Bearer key-one\r\ncontent-length: 10\r\n\r\n"
        writer.write(head + b"{")
        answer = await reader.read(-1)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"the request body did not come within 0.5" in answer  # and what a busy machine adds


async def test_a_drain_serves_who_still_comes_sends_them_elsewhere_and_then_the_process_ends(
    etcd: str, nats: str, tmp_path: Path
) -> None:
    go_on = asyncio.Event()

    async def wait(live: Live) -> None:
        live.send("a")
        await go_on.wait()
        live.send("b")
        live.finish(tokens=2)

    with running_frontend(etcd, nats, tmp_path / "log") as frontend:
        async with (
            routing(frontend) as router,
            serving(frontend, ScriptedDecode(wait)) as worker,
            httpx.AsyncClient(base_url=frontend.url, timeout=60) as http,
            asyncio.TaskGroup() as tasks,
        ):
            router.targets = [worker]
            old = tasks.create_task(http.post("/v1/completions", json={"model": worker.model, "prompt": "x"}))
            await until(lambda: worker.requests)
            frontend.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                while (await http.get("/ready")).status_code == 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            late = tasks.create_task(http.post("/v1/completions", json={"model": worker.model, "prompt": "x"}))
            await until(lambda: len(worker.requests) == 2)
            go_on.set()
            for answer in (await old, await late):
                assert answer.json()["choices"][0]["text"] == "ab"
                assert answer.headers["connection"] == "close"
            assert await asyncio.to_thread(frontend.process.wait, 60) == 0
            told = sorted(str(outcome.WhichOneof("outcome")) for outcome in router.told)
            assert told == ["first_token"] * 2 + ["freed"] * 2
        assert "hello" not in (tmp_path / "log").read_text(), "logs never have prompts or answers"
