from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
from controlplane.settings import CommonSettings
from controlplane.telemetry import configure_logging, get_logger
configure_logging(CommonSettings(log_format=sys.argv[1], instance_id="router-1"), service="router")
get_logger("ours").info("hello", n=1)
get_logger("ours").info("refused", path="/\\x1b[31m\\nforged")
get_logger("ours").debug("too fine")
logging.getLogger("a.library").warning("from %s", "outside")
prompt = "the prompt"
try:
    1 / 0
except ZeroDivisionError:
    get_logger("ours").exception("broke")
"""


def logged(log_format: str) -> str:
    """What a process logs; its own, for logging is configured once a process."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM, log_format], capture_output=True, text=True, check=True)
    assert ended.stdout == ""
    return ended.stderr


def test_json_logs_are_one_object_a_line_with_who_and_where() -> None:
    hello, refused, library, broke = (json.loads(line) for line in logged("json").splitlines())
    assert (hello["event"], hello["n"], hello["level"]) == ("hello", 1, "info")
    assert refused["path"] == "/\x1b[31m\nforged"
    assert (library["event"], library["logger"], library["instance_id"]) == ("from outside", "a.library", "router-1")
    assert "ZeroDivisionError" in broke["exception"]


@pytest.mark.parametrize("log_format", ["json", "human", "auto"])
def test_a_traceback_shows_no_local_variables(log_format: str) -> None:
    text = logged(log_format)
    assert "ZeroDivisionError" in text
    assert "the prompt" not in text


def test_what_a_client_sent_cannot_drive_a_terminal_or_forge_a_line() -> None:
    text = logged("human")
    assert "\x1b[31m" not in text
    assert "\nforged" not in text
    assert r"/\x1b[31m\nforged" in text


def test_auto_is_json_where_nobody_watches() -> None:
    assert all(json.loads(line) for line in logged("auto").splitlines())
