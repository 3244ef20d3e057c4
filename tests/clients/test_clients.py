"""One table of cases, held against the client of every language."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import trustme

from tests.clients.builds import Built
from tests.clients.conftest import KEY, Suite

PROMPT = "Why is the sky blue?"
LONG = ("chat", PROMPT, "--max-tokens", "20000")
"""Far longer than any of these tests takes."""


@dataclass(frozen=True)
class Case:
    name: str
    arguments: tuple[str, ...]
    code: int
    stderr: str = ""
    """A regular expression for the whole of it, spaces around left out."""
    stdout: str | None = None
    """A regular expression for the whole of it; None: anything."""
    closed: bool = False
    """Asks the frontend with TLS and keys, else the one without."""
    given: tuple[str, ...] = ()
    """Flags before the command; CA and NO_CA stand for the files of those names."""


SECURE = ("--tls", "--ca", "CA")
REFUSED = r"(?:.*\n)?error: code={} param={}: .+"
"""What gRPC itself logs before, in some languages, is left to it."""
CASES = (
    Case("models", ("models",), 0, stdout=r"sim\t\d+\t1\n"),
    Case("models over TLS with a key", ("models",), 0, "", r"sim\t\d+\t1\n", True, (*SECURE, "--key", KEY)),
    Case("chat to the most tokens allowed", ("chat", PROMPT, "--max-tokens", "8"), 0, "finished: length, 8 tokens"),
    Case("cancel", (*LONG, "--cancel-after", "2"), 0, "cancelled after 2 chunks", r".+\n"),
    Case("deadline", (*LONG, "--deadline", "2"), 1, REFUSED.format("deadline_exceeded", r"\w*")),
    Case("a field out of range", ("chat", PROMPT, "--max-tokens", "0"), 1,
         REFUSED.format("invalid_request", r"sampling\.max_tokens"), ""),
    Case("no key", ("chat", PROMPT), 1, REFUSED.format("unauthenticated", "authorization"), "", True, SECURE),
    Case("a wrong key", ("models",), 1, REFUSED.format("unauthenticated", "authorization"), "", True,
         (*SECURE, "--key", "wrong")),
    Case("a certificate that is not trusted", ("models",), 1, REFUSED.format("unavailable", ""), "", True,
         ("--tls", "--ca", "NO_CA")),
    Case("clear text to a frontend with TLS", ("models",), 1, REFUSED.format("unavailable", ""), "", True),
    Case("an unknown command", ("modls",), 2, "usage: .+", ""),
    Case("no prompt", ("chat",), 2, "usage: .+", ""),
    Case("a flag that is no number", ("chat", PROMPT, "--max-tokens", "x"), 2, "usage: .+", ""),
    Case("an unknown flag", ("chat", PROMPT, "--max-tokns", "1"), 2, "usage: .+", ""),
)  # fmt: skip


@pytest.fixture(scope="session")
def other_ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("other") / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(path))
    return path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_language_does_and_says_the_same(client: Built, case: Case, suite: Suite, other_ca: Path) -> None:
    files = {"CA": str(suite.ca), "NO_CA": str(other_ca)}
    frontend = suite.closed if case.closed else suite.open
    given = [files.get(word, word) for word in case.given]
    done = client("--address", f"localhost:{frontend.grpc_port}", *given, *case.arguments)
    assert done.returncode == case.code, done
    assert re.fullmatch(case.stderr, done.stderr.strip(), re.DOTALL), done
    assert case.stdout is None or re.fullmatch(case.stdout, done.stdout), done


def test_the_answer_is_that_of_the_http_api(client: Built, suite: Suite) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, "temperature": 0, "model": "sim"}
    answer = httpx.post(f"{suite.open.url}/v1/chat/completions", json=body, timeout=60).json()
    done = client("--address", f"localhost:{suite.open.grpc_port}", "chat", PROMPT, "--max-tokens", "24")
    assert done.stdout == answer["choices"][0]["message"]["content"] + "\n"


def test_cancelling_a_call_ends_it_at_the_server(client: Built, suite: Suite) -> None:
    before = _cancelled(suite)
    client("--address", f"localhost:{suite.open.grpc_port}", *LONG, "--cancel-after", "1")
    deadline = time.monotonic() + 10
    while _cancelled(suite) == before:
        assert time.monotonic() < deadline, "the frontend did not hear of it"
        time.sleep(0.05)


def _cancelled(suite: Suite) -> float:
    metrics = httpx.get(f"{suite.open.url}/metrics").text
    name = r'^tokenmill_requests_total\{[^}]*endpoint="inference.v1/Chat"[^}]*status="CANCELLED"[^}]*\} (\S+)$'
    found = re.search(name, metrics, re.MULTILINE)
    return float(found[1]) if found else 0.0
