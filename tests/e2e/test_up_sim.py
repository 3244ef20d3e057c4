"""`tokenmill up` with the simulated engine, as a user runs it: real processes, signals, ports and folders."""

import json
import os
import re
import signal
import socket
import threading
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.e2e.command_line import Tokenmill, eventually

_SIM = ("--engine", "sim", "--time-scale", "20", "--port", "0")


def _up(*more: str) -> tuple[str, ...]:
    return ("up", *_SIM, *more)


def _url(said: str) -> str:
    found = re.search(r"is served at (http://\S+)/v1", said)
    assert found, said
    return found[1]


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def _ask(url: str) -> str:
    request = {"model": "sim", "prompt": "Hello", "max_tokens": 4}
    response = httpx.post(f"{url}/v1/completions", json=request, timeout=30, trust_env=False)
    response.raise_for_status()
    return str(response.json()["choices"][0]["text"])


def _answers(url: str) -> bool:
    try:
        return bool(_ask(url))
    except httpx.HTTPError:
        return False


def _instances(tokenmill: Tokenmill, *flags: str) -> list[dict[str, Any]]:
    shown = tokenmill.run("status", "--json", *flags)
    assert shown.returncode == 0, shown.stderr
    document = json.loads(shown.stdout)
    assert list(document) == ["instances"]
    return list(document["instances"])


def test_once_prints_one_answer_that_prefill_and_decode_made_together(tokenmill: Tokenmill) -> None:
    done = tokenmill.run(*_up("--once", "Why is the sky blue?", "--max-tokens", "8"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "ready" in done.stderr
    assert "ready" not in done.stdout
    tokenmill.assert_nothing_left()


def test_running_etcd_and_nats_servers_are_used_and_left_running(
    tokenmill: Tokenmill, etcd: str, nats: str, deployment: str
) -> None:
    running = tokenmill.start(*_up("--etcd", etcd, "--nats", nats, "--deployment", deployment))
    url = _url(running.wait_for("stop "))
    assert not any("/nats-server " in command or "/etcd " in command for command in tokenmill.processes().values())
    elsewhere = tokenmill.run("status", "--json", "--etcd", etcd, "--nats", nats, "--deployment", deployment)
    assert [one["load"] is not None for one in json.loads(elsewhere.stdout)["instances"] if one["role"]] == [True, True]
    running.send(signal.SIGINT)
    assert running.exit_code() == 0, running.said
    tokenmill.assert_nothing_left(_port(url))
    assert tokenmill.run("status", "--etcd", etcd, "--deployment", deployment).returncode == 1


def test_a_background_deployment_is_seen_talked_to_and_stopped(tokenmill: Tokenmill) -> None:
    started = tokenmill.run(*_up("-d", "--prefill", "2", "--decode", "2"))
    assert started.returncode == 0, started.stderr
    url = started.stdout.strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)

    instances = _instances(tokenmill)
    assert [(one["service"], one["role"]) for one in instances] == [
        ("frontend", ""), ("router", ""), ("prefill", "prefill"), ("prefill", "prefill"), ("decode", "decode"),
        ("decode", "decode"),
    ]  # fmt: skip
    for one in instances:
        assert one["state"] == "ready"
        assert one["pid"] in tokenmill.processes()
        assert one["address"].startswith("127.0.0.1:")
    assert all(one["load"]["kv_total_blocks"] > 0 for one in instances if one["role"])
    assert "ready" in tokenmill.run("status").stdout

    talked = tokenmill.run("chat", "Hello", "there", "--max-tokens", "5")
    assert talked.returncode == 0, talked.stderr
    assert talked.stdout.strip()

    stopped = tokenmill.run("down")
    assert stopped.returncode == 0, stopped.stderr
    tokenmill.assert_nothing_left(_port(url))
    assert tokenmill.run("status").returncode == 1


def test_ctrl_c_leaves_no_process_port_or_folder(tokenmill: Tokenmill) -> None:
    running = tokenmill.start(*_up("--ask", "Hello"))
    url = _url(running.wait_for("stop "))
    running.wait_for("> Hello")
    running.send(signal.SIGINT)
    assert running.exit_code() == 0, running.said
    tokenmill.assert_nothing_left(_port(url))


@pytest.mark.parametrize("more", [(), ("--detach",)], ids=["foreground", "background"])
def test_ctrl_c_while_starting_leaves_nothing_either(tokenmill: Tokenmill, more: tuple[str, ...]) -> None:
    running = tokenmill.start(*_up(*more))
    running.wait_for("etcd: ready")
    running.send(signal.SIGINT)
    assert running.exit_code() == 130, running.said
    tokenmill.assert_nothing_left()


def test_a_running_answer_is_finished_before_the_suite_stops(tokenmill: Tokenmill) -> None:
    running = tokenmill.start("up", "--engine", "sim", "--time-scale", "1", "--port", "0")
    client = OpenAI(base_url=f"{_url(running.wait_for('stop '))}/v1", api_key="any")
    answer = client.completions.create(
        model="sim", prompt="Hello", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(answer))
    running.send(signal.SIGTERM)
    reasons = [choice.finish_reason for event in answer for choice in event.choices if choice.finish_reason]
    assert reasons == ["length"]
    assert running.exit_code() == 0, running.said
    tokenmill.assert_nothing_left()


def test_a_second_ctrl_c_does_not_wait_for_running_answers(tokenmill: Tokenmill) -> None:
    running = tokenmill.start("up", "--engine", "sim", "--time-scale", "0.1", "--port", "0")
    url = _url(running.wait_for("stop "))

    def endless() -> None:
        request = {"model": "sim", "prompt": "Hello", "max_tokens": 2000, "ignore_eos": True}
        try:
            httpx.post(f"{url}/v1/completions", json=request, timeout=120, trust_env=False)
        except httpx.HTTPError:
            return

    asking = threading.Thread(target=endless)
    asking.start()
    eventually(lambda: any((one["load"] or {}).get("running_requests") for one in _instances(tokenmill)))
    running.send(signal.SIGINT)
    running.wait_for("Ctrl-C again")
    running.send(signal.SIGINT)
    assert running.exit_code(timeout_s=10) == 130, running.said
    asking.join(30)
    tokenmill.assert_nothing_left(_port(url))


@pytest.mark.parametrize("victim", ["services.decode", "services.prefill", "services.router", "services.frontend"])
def test_a_killed_service_is_restarted_and_the_reason_told(tokenmill: Tokenmill, victim: str) -> None:
    running = tokenmill.start(*_up())
    url = _url(running.wait_for("stop "))
    first = tokenmill.pid_of(victim)
    os.kill(first, signal.SIGKILL)
    name = victim.removeprefix("services.")
    running.wait_for(f"{name}: was killed by SIGKILL")
    eventually(lambda: running.said.count(f"{name}: ready") == 2)
    assert tokenmill.pid_of(victim) != first
    eventually(lambda: _answers(url), timeout_s=10)
    assert running.said.count("frontend: ready") <= 2  # a lost worker makes it unready once, not again and again
    running.send(signal.SIGINT)
    assert running.exit_code() == 0, running.said
    tokenmill.assert_nothing_left(_port(url))


@pytest.mark.parametrize("victim", ["etcd", "nats-server"])
def test_a_killed_etcd_or_nats_is_restarted_while_the_suite_serves(tokenmill: Tokenmill, victim: str) -> None:
    running = tokenmill.start(*_up())
    url = _url(running.wait_for("stop "))
    first = tokenmill.pid_of(f"/{victim} ")
    os.kill(first, signal.SIGKILL)
    assert _answers(url)
    running.wait_for("was killed by SIGKILL")
    eventually(lambda: any(f"/{victim} " in command for command in tokenmill.processes().values()))
    assert tokenmill.pid_of(f"/{victim} ") != first
    eventually(lambda: all(one["state"] == "ready" for one in _instances(tokenmill)))
    assert _answers(url)
    running.send(signal.SIGINT)
    assert running.exit_code() == 0, running.said
    tokenmill.assert_nothing_left(_port(url))


def test_a_killed_supervisor_leaves_no_process_and_the_next_command_cleans_up(tokenmill: Tokenmill) -> None:
    running = tokenmill.start(*_up())
    url = _url(running.wait_for("stop "))
    running.send(signal.SIGKILL)
    eventually(lambda: not tokenmill.processes(), timeout_s=30)
    looked = tokenmill.run("status")
    assert looked.returncode == 1
    assert "does not run" in looked.stderr
    tokenmill.assert_nothing_left(_port(url))


def test_a_model_that_is_not_there_ends_up_at_once_with_a_clear_message(tokenmill: Tokenmill) -> None:
    failed = tokenmill.run(*_up("--model", "./nowhere"))
    assert failed.returncode == 2
    assert "./nowhere" in failed.stderr
    tokenmill.assert_nothing_left()


@pytest.mark.parametrize("more", [(), ("--detach",)], ids=["foreground", "background"])
def test_a_worker_that_cannot_start_ends_up_with_its_reason(tokenmill: Tokenmill, more: tuple[str, ...]) -> None:
    failed = tokenmill.run(*_up("--sim-profile", "no-such-profile", *more))
    assert failed.returncode == 1
    assert re.search(r"tokenmill up: (prefill|decode) cannot start", failed.stderr), failed.stderr
    assert "no-such-profile" in failed.stderr
    tokenmill.assert_nothing_left()


def test_a_port_in_use_is_told_before_anything_starts(tokenmill: Tokenmill) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        failed = tokenmill.run("up", "--engine", "sim", "--port", str(port))
    assert failed.returncode == 1
    assert f"port {port}" in failed.stderr
    assert "--port" in failed.stderr
    assert "etcd: " not in failed.stderr
    tokenmill.assert_nothing_left()


def test_two_deployments_live_side_by_side_and_one_name_runs_once(tokenmill: Tokenmill) -> None:
    urls = []
    for name in ("one", "two"):
        started = tokenmill.run(*_up("-d", "--deployment", name))
        assert started.returncode == 0, started.stderr
        urls.append(started.stdout.strip())
    again = tokenmill.run(*_up("--deployment", "one"))
    assert again.returncode == 1
    assert "'one' already runs on this machine (pid" in again.stderr
    assert tokenmill.run("down", "--deployment", "one").returncode == 0
    assert len(_instances(tokenmill, "--deployment", "two")) == 4
    assert _answers(urls[1])
    assert tokenmill.run("down", "--deployment", "two").returncode == 0
    tokenmill.assert_nothing_left(*map(_port, urls))
