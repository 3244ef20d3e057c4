"""The compose project under test, seen from outside: its containers, its API, its metrics."""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from controlplane.embedded import free_port
from tests.containers.engine import ROOT, docker

__all__ = ["Answer", "Project", "until"]

_ANSWER_TIMEOUT_S = 90.0
_BUILD_TIMEOUT_S = 3600.0
_UP_TIMEOUT_S = 240


@dataclass
class Answer:
    """One streamed answer: its text, and the error that ended it, if any."""

    text: str = ""
    finish_reason: str = ""
    error: dict[str, Any] = field(default_factory=dict)


class Project:
    """A compose project of its own name and ports, from the repository's docker-compose.yml and .env."""

    def __init__(self, name: str, profile: str, folder: Path, settings: Mapping[str, str]) -> None:
        self.name = name
        self.profile = profile
        self.http_port, self.grpc_port, self.prometheus_port = free_port(), free_port(), free_port()
        self._env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("TOKENMILL_")},
            **_as_this_machine_fetches(folder),
            "HTTP_PORT": str(self.http_port),
            "GRPC_PORT": str(self.grpc_port),
            "PROMETHEUS_PORT": str(self.prometheus_port),
            "BUILDKIT_PROGRESS": "plain",
            **settings,
        }

    # Containers

    def compose(self, *arguments: str, timeout_s: float = _UP_TIMEOUT_S + 60) -> str:
        """Runs `docker compose` on this project; returns its standard output."""
        command = ["docker", "compose", "--project-name", self.name, "--profile", self.profile, *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=self._env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        return done.stdout

    def config(self, profile: str) -> dict[str, Any]:
        """The project as Compose reads it, with another profile beside its own."""
        return dict(json.loads(self.compose("--profile", profile, "config", "--format", "json")))

    def build(self) -> None:
        """Every image of the profile."""
        self.compose("build", timeout_s=_BUILD_TIMEOUT_S)

    def up(self, *, decode: int = 1) -> None:
        """Returns when all are healthy. With all of them so already, at once."""
        # To Compose one that was unhealthy when last asked, as after a pause, is a failure.
        until(lambda: not self._unhealthy(), "no container is unhealthy")
        scale = f"decode-{self.profile}={decode}"
        self.compose("up", "--wait", "--wait-timeout", str(_UP_TIMEOUT_S), "--no-build", "--scale", scale)

    def containers(self, service: str) -> list[str]:
        """Ids of a service's running containers."""
        return self.compose("ps", "--quiet", service).split()

    def _unhealthy(self) -> str:
        return docker(
            "ps", "--quiet", "--filter", "health=unhealthy", "--filter", f"label=com.docker.compose.project={self.name}"
        )

    def metric(self, container: str, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels, as the container shows them; 0 when there are none."""
        program = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9090/metrics').read().decode())"
        total = 0.0
        for line in docker("exec", container, "python3", "-c", program).splitlines():
            sample = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
            if sample and all(f'{key}="{value}"' in (sample[1] or "") for key, value in labels.items()):
                total += float(sample[2])
        return total

    def instances(self) -> list[dict[str, Any]]:
        """What `tokenmill status` shows, asked for in the router's container."""
        (router,) = self.containers("router")
        return list(
            json.loads(docker("exec", router, "tokenmill", "status", "--json", check=False) or "{}")["instances"]
        )

    def stop_times(self, stop: Callable[[], object]) -> dict[str, float]:
        """Seconds from the first signal to the end of each service while `stop` runs. Ours must end with code 0."""
        since = time.time()
        stop()
        events = docker(
            *("events", "--since", f"{since:.3f}", "--until", f"{time.time():.3f}", "--format", "{{json .}}"),
            *("--filter", f"label=com.docker.compose.project={self.name}", "--filter", "type=container"),
        )
        signalled: dict[str, float] = {}
        took: dict[str, float] = {}
        for event in map(json.loads, events.splitlines()):
            about, at = event["Actor"]["Attributes"], event["timeNano"] / 1e9
            if event["Action"] == "kill":
                signalled.setdefault(event["Actor"]["ID"], at)
            if event["Action"] == "die":
                assert about["image"].split("-")[0] != "tokenmill" or about["exitCode"] == "0", about
                service = about["com.docker.compose.service"]
                took[service] = max(took.get(service, 0.0), at - signalled[event["Actor"]["ID"]])
        return took

    # Answers

    @property
    def url(self) -> str:
        """Of the OpenAI API."""
        return f"http://127.0.0.1:{self.http_port}/v1"

    def ask(self, prompt: str, *, model: str = "sim", tokens: int = 32) -> str:
        """A whole answer that must come."""
        answer = self.stream(prompt, model=model, tokens=tokens)
        assert not answer.error, answer.error
        assert answer.finish_reason == "length", answer
        return answer.text

    def stream(
        self, prompt: str, *, model: str = "sim", tokens: int = 32, on_text: Callable[[], object] = lambda: None
    ) -> Answer:
        """An answer as it comes; `on_text` is called at each piece. Everything but an error event must be in order."""
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        answer = Answer()
        with httpx.stream(
            "POST", f"{self.url}/completions", json=body, timeout=_ANSWER_TIMEOUT_S, trust_env=False
        ) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
                answer.error = {"status": response.status_code, **response.json()["error"]}
                return answer
            lines = list(_events(response.iter_lines(), answer, on_text))
        assert answer.error or lines[-1] == "[DONE]", lines
        return answer


def until(condition: Callable[[], bool], what: str, *, timeout_s: float = 60.0) -> float:
    """Seconds until it held; fails when it does not in time."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + timeout_s, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.1)
    return time.monotonic() - started


def _events(lines: Iterator[str], answer: Answer, on_text: Callable[[], object]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        yield data
        if data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            answer.error = event["error"]
            continue
        for choice in event["choices"]:
            answer.text += choice["text"]
            answer.finish_reason = choice["finish_reason"] or answer.finish_reason
            if choice["text"]:
                on_text()


def _as_this_machine_fetches(folder: Path) -> dict[str, str]:
    """Lets pip in a build use the index and trust the certificates that pip uses here."""
    if os.environ.get("PIP_CONF"):
        return {}
    certificates = os.environ.get("PIP_CERT") or ssl.get_default_verify_paths().cafile
    lines = ["[global]", "timeout = 180"]
    if certificates:
        lines.append("cert = /run/secrets/ca")
    index = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    ).stdout.strip()
    if index:
        lines.append(f"index-url = {index}")
    (folder / "pip.conf").write_text("\n".join(lines) + "\n")
    return {"PIP_CONF": str(folder / "pip.conf"), "EXTRA_CA": certificates or os.devnull}
