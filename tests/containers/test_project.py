"""The whole suite from its images, on Compose: answers, scaling, and parts that die, hang or are cut off.

A simulated worker's answer is a function of its prompt, so that every answer can be compared, whoever gave it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest

from tests.containers.engine import docker, inspect
from tests.containers.project import Answer, Project, until
from tokenmill.inference.v1 import inference_pb2, inference_pb2_grpc

DECODE = "decode-sim"
STREAMS = 6
LONG = 400
"""Tokens; some seconds of a simulated answer."""
STOPS_WITHIN_S = 5.0


def _prompt(number: int) -> str:
    return f"Chapter {number}. " + "It was a dark and stormy night. " * 30


def _all_ready(project: Project, decode: int, *, without: str = "") -> float:
    """Seconds until every instance is ready and no other is left, least of all the one with this id."""

    def ready() -> bool:
        found = {one["instance_id"]: one["state"] for one in project.instances()}
        return len(found) == decode + 3 and set(found.values()) == {"ready"} and without not in found

    return until(ready, f"{decode + 3} instances are ready and no other is left")


@pytest.fixture
def three(project: Project) -> Project:
    """With three decode workers, all well."""
    project.up(decode=3)
    _all_ready(project, 3)
    return project


def test_one_command_starts_it_and_one_stops_it(project: Project, figures: dict[str, str]) -> None:
    project.compose("down")
    for _ in range(3):  # whatever else the machine does only adds to a time: the best one counts
        started = time.monotonic()
        project.up()
        healthy = time.monotonic() - started
        assert project.ask("Hello")
        answered = time.monotonic() - started
        took = project.stop_times(lambda: project.compose("down"))
        assert took.keys() == {"etcd", "nats", "router", "frontend", "prefill-sim", "decode-sim"}
        if max(took.values()) < STOPS_WITHIN_S:
            break
    figures["up --wait, sim"] = f"{healthy:.1f} s"
    figures["up to first answer, sim"] = f"{answered:.1f} s"
    figures["stop times"] = ", ".join(f"{service} {seconds:.1f} s" for service, seconds in sorted(took.items()))
    assert max(took.values()) < STOPS_WITHIN_S


def test_answers_over_http_and_grpc_are_the_same_and_kv_travels_between_containers(project: Project) -> None:
    project.up()
    (decode,) = project.containers(DECODE)
    read_before = project.metric(decode, "tokenmill_kv_handoffs_total", outcome="read")
    prompts = [_prompt(number) for number in range(3)]

    over_http = [project.ask(prompt) for prompt in prompts]
    with grpc.insecure_channel(f"127.0.0.1:{project.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        over_grpc = [_generate(stub, prompt) for prompt in prompts]

    assert over_http == over_grpc
    assert len(set(over_http)) == len(prompts)
    assert project.metric(decode, "tokenmill_kv_handoffs_total", outcome="read") >= read_before + len(prompts)


def _generate(stub: inference_pb2_grpc.InferenceStub, prompt: str) -> str:
    request = inference_pb2.GenerateRequest(prompt=prompt)
    request.sampling.max_tokens = 32
    request.sampling.ignore_eos = True
    return "".join(part.text for part in stub.Generate(request, timeout=30))


def test_scaled_workers_are_found_and_share_the_work(three: Project) -> None:
    workers = three.containers(DECODE)
    assert len(workers) == 3
    _ask_all(three, range(100, 124))
    for worker in workers:
        assert three.metric(worker, "tokenmill_kv_handoffs_total", outcome="read") > 0


def test_a_worker_killed_in_mid_stream_costs_no_other_answer_and_comes_back(
    three: Project, figures: dict[str, str]
) -> None:
    worker = three.containers(DECODE)[0]
    (before,) = (one["instance_id"] for one in three.instances() if one["host"] == worker[:12])
    _disturbed(three, lambda: _crash(worker))
    figures["killed worker ready again after"] = f"{_all_ready(three, 3, without=before):.1f} s"
    assert inspect(worker)["RestartCount"] == 1
    _ask_all(three, range(STREAMS))


def test_a_worker_that_is_paused_costs_no_later_answer_and_comes_back(three: Project, figures: dict[str, str]) -> None:
    worker = three.containers(DECODE)[0]
    try:
        _disturbed(three, lambda: docker("pause", worker))
    finally:
        docker("unpause", worker)
    figures["paused worker ready again after"] = f"{_all_ready(three, 3):.1f} s"
    _ask_all(three, range(STREAMS))


def test_a_worker_cut_off_the_network_costs_no_later_answer_and_comes_back(
    three: Project, figures: dict[str, str]
) -> None:
    network, worker = f"{three.name}_default", three.containers(DECODE)[0]
    try:
        _disturbed(three, lambda: docker("network", "disconnect", network, worker))
    finally:
        docker("network", "connect", "--alias", "tokenmill", network, worker)  # as Compose did
    figures["cut off worker ready again after"] = f"{_all_ready(three, 3):.1f} s"
    _ask_all(three, range(STREAMS))


@pytest.mark.parametrize("server", ["etcd", "nats"])
def test_answers_go_on_while_a_server_restarts(three: Project, server: str) -> None:
    expected = _ask_all(three, range(STREAMS))
    with ThreadPoolExecutor() as pool:
        restart = pool.submit(three.compose, "stop", server)
        while not restart.done():
            assert _ask_all(three, range(STREAMS)) == expected
        restart.result()
        assert _ask_all(three, range(STREAMS)) == expected  # while it is away
        three.compose("start", server)
    _all_ready(three, 3)
    metric, good = {"etcd": ("tokenmill_discovery_stale", 0.0), "nats": ("tokenmill_bus_connected", 1.0)}[server]
    for service in ("frontend", "router", "prefill-sim", "decode-sim"):
        for container in three.containers(service):
            until(lambda container=container: three.metric(container, metric) == good, f"{service}: {metric} {good:g}")
    assert _ask_all(three, range(STREAMS)) == expected


def test_prometheus_finds_every_container(three: Project) -> None:
    try:
        three.compose("--profile", "monitoring", "up", "--detach", "--no-build", "prometheus")
        url = f"http://127.0.0.1:{three.prometheus_port}/api/v1/query"

        def found() -> int:
            try:
                answer = httpx.get(url, params={"query": 'up{job="tokenmill"} == 1'}, trust_env=False)
            except httpx.TransportError:
                return 0
            return len(answer.json()["data"]["result"]) if answer.is_success else 0

        until(lambda: found() == 6, "frontend, router, a prefill and three decode workers are scraped")
    finally:
        three.compose("--profile", "monitoring", "rm", "--stop", "--force", "prometheus")


def _ask_all(project: Project, numbers: range) -> list[str]:
    """Asks at once; every answer must come."""
    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(lambda number: project.ask(_prompt(number)), numbers))


def _disturbed(project: Project, disturb: Callable[[], object]) -> None:
    """Does something to one of three decode workers while long answers come from all.

    Answers under way are right, or end in an error after a right beginning, and only those of that worker do so.
    Requests that come later are all answered.
    """
    expected = [project.ask(_prompt(number), tokens=LONG) for number in range(STREAMS)]
    begun = [threading.Event() for _ in range(STREAMS)]

    def stream(number: int) -> Answer:
        return project.stream(_prompt(number), tokens=LONG, on_text=begun[number].set)

    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(stream, number) for number in range(STREAMS)]
        assert all(event.wait(60) for event in begun)
        disturb()
        later = _ask_all(project, range(200, 200 + STREAMS))
        answers = [one.result() for one in streams]

    for answer, right in zip(answers, expected, strict=True):
        assert right.startswith(answer.text)
        assert answer.error or answer.text == right
    assert [answer for answer in answers if not answer.error], "other workers' answers went on"
    assert later == _ask_all(project, range(200, 200 + STREAMS))


def _crash(container: str) -> None:
    """Kills its process from outside. `docker kill` would do so too, and then not restart it."""
    pid = inspect(container)["State"]["Pid"]  # type: ignore[index]
    image = str(inspect(container)["Image"])
    docker("run", "--rm", "--pid=host", "--user=0", "--entrypoint=sh", image, "-c", f"kill -9 {pid}")
