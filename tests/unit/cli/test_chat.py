import io
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from cli.main import main
from tests.unit.cli.openai_stub import OpenAiStub


def _chat(stub: OpenAiStub, *arguments: str) -> int:
    return main(["chat", "--url", stub.url, *arguments])


def _roles(request: dict[str, Any]) -> list[str]:
    return [message["role"] for message in request["messages"]]


def test_a_prompt_on_the_command_line_gets_one_answer(
    openai_stub: OpenAiStub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _chat(openai_stub, "Hello", "there") == 0
    assert capsys.readouterr().out == "1 messages\n"
    assert openai_stub.requests[0]["messages"] == [{"role": "user", "content": "Hello there"}]
    assert openai_stub.requests[0]["model"] == "tiny"


def test_a_conversation_remembers_until_it_is_cleared(openai_stub: OpenAiStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n/help\n\n/clear\nthree\n/exit\n"))
    assert _chat(openai_stub, "--system", "Be brief.") == 0
    assert [_roles(request) for request in openai_stub.requests] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]


def test_an_error_in_a_conversation_is_told_and_does_not_end_it(
    openai_stub: OpenAiStub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    openai_stub.refusal = (429, "full; try again later")
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert _chat(openai_stub) == 0
    assert capsys.readouterr().err.count("error: full; try again later") == 2
    assert _roles(openai_stub.requests[1]) == ["user"]


def test_a_model_that_is_not_served_is_refused_with_those_that_are(
    openai_stub: OpenAiStub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _chat(openai_stub, "--model", "huge", "Hello") == 1
    assert "serves tiny, other, not huge" in capsys.readouterr().err


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(openai_stub: OpenAiStub) -> None:
    openai_stub.go_on.clear()
    command = [sys.executable, "-m", "cli.main", "chat", "--url", openai_stub.url]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, bufsize=0) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        assert chat.stderr is not None
        deadline = threading.Timer(60, chat.kill)
        deadline.start()
        chat.stdin.write("one\n")
        assert chat.stdout.read(3) == "> 1"
        chat.send_signal(signal.SIGINT)
        assert "(stopped)\n" in iter(chat.stderr.readline, "")
        openai_stub.go_on.set()
        said, _ = chat.communicate("two\n", timeout=60)
        deadline.cancel()
    assert "3 messages" in said
    assert openai_stub.requests[1]["messages"][1] == {"role": "assistant", "content": "1"}
    assert chat.returncode == 0
