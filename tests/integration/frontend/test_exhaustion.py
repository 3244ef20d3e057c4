"""A frontend whose machine runs out of something: it goes on with what it has, and recovers by itself."""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path

import httpx

from tests.integration.frontend.peers import Live, ScriptedDecode, running_frontend, serving


async def answer(live: Live) -> None:
    live.send("hi")
    live.finish(tokens=1)


async def test_without_file_descriptors_open_connections_are_served_and_new_ones_as_soon_as_some_are_free(
    etcd: str, nats: str, tmp_path: Path
) -> None:
    with running_frontend(etcd, nats, tmp_path / "log") as frontend:
        pid = frontend.process.pid
        async with (
            serving(frontend, ScriptedDecode(answer)) as worker,
            httpx.AsyncClient(base_url=frontend.url, timeout=60) as http,
        ):
            body = {"model": worker.model, "prompt": "x"}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            limit = len(os.listdir(f"/proc/{pid}/fd")) + 20
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limit))
            crowd = [await asyncio.open_connection("127.0.0.1", frontend.http_port) for _ in range(100)]
            async with asyncio.timeout(30):
                while len(os.listdir(f"/proc/{pid}/fd")) < limit - 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            for _ in range(5):
                assert (await http.post("/v1/completions", json=body)).status_code == 200, "on the connection it has"
            for _, writer in crowd:
                writer.close()
            async with asyncio.timeout(60):
                while not await answers(f"{frontend.url}/v1/completions", body):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        assert frontend.process.poll() is None


async def answers(url: str, body: dict[str, str]) -> bool:
    """Over a new connection."""
    try:
        async with httpx.AsyncClient(timeout=5) as http:
            return (await http.post(url, json=body)).status_code == 200
    except httpx.TransportError:
        return False


async def test_a_full_disk_under_its_log_fails_no_request(etcd: str, nats: str) -> None:
    with running_frontend(etcd, nats, Path("/dev/full")) as frontend:
        async with (
            serving(frontend, ScriptedDecode(answer)) as worker,
            httpx.AsyncClient(base_url=frontend.url, timeout=60) as http,
        ):
            for body, status in (
                ({"model": worker.model, "prompt": "x"}, 200),
                ({"model": "none", "prompt": "x"}, 404),
            ):
                for _ in range(3):
                    assert (await http.post("/v1/completions", json=body)).status_code == status
        assert frontend.process.poll() is None
