"""`tokenmill`: one command, a subcommand per service and for the user."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.program import run_program

__all__ = ["main"]


@dataclass(frozen=True, slots=True)
class _Command:
    """A subcommand; its module, which has `main(argv) -> int`, is imported only when it runs."""

    module: str
    summary: str


_FOR_USERS = {
    "up": _Command("cli.up.command", "start a deployment on this machine and keep it running"),
    "down": _Command("cli.down", "stop a deployment that runs in the background"),
    "restart": _Command("cli.restart", "restart parts of a deployment, with --rolling without losing a request"),
    "status": _Command("cli.status", "show instances, their state and load"),
    "drain": _Command("cli.drain", "take an instance out of use: it finishes what runs, then ends"),
    "undrain": _Command("cli.undrain", "take a drain back that is not done yet"),
    "health": _Command("cli.health", "ask one service whether it can do its work now"),
    "chat": _Command("cli.chat", "talk to a served model in the terminal"),
    "simulate": _Command("cli.simulate", "replay a request trace through the router and simulated workers"),
    "models": _Command("cli.models", "fetch the demonstration model, list local models"),
    "chaos": _Command("cli.chaos.command", "make parts of a deployment fail and check every answer"),
    "config": _Command("cli.config", "show every setting, its value and where it came from"),
}
_SERVICES = {
    "frontend": _Command("services.frontend.__main__", "OpenAI HTTP and gRPC in, tokens out"),
    "router": _Command("cli.router", "decides which worker serves a request; router explain: why it did"),
    "prefill": _Command("services.prefill.__main__", "a worker that computes prompts"),
    "decode": _Command("services.decode.__main__", "a worker that generates"),
    "fleet": _Command("services.fleet.__main__", "many light simulated workers in one process"),
}
_COMMANDS = _FOR_USERS | _SERVICES


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand. 0: done; 1: it failed; 2: it was called wrongly; 130: it was interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    name, *rest = arguments
    if name == "--version":
        print(f"tokenmill {importlib.metadata.version('tokenmill')}")
        return 0
    if name not in _COMMANDS:
        nearest = difflib.get_close_matches(name, _COMMANDS, n=1, cutoff=0.0)[0]
        print(f"tokenmill: no command {name!r}; did you mean {nearest!r}? See tokenmill --help", file=sys.stderr)
        return 2
    try:
        return run_program(f"tokenmill {name}", lambda: importlib.import_module(_COMMANDS[name].module).main(rest))
    except BrokenPipeError:  # who read our output has seen enough; Python's own flush at exit must not fail on it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _help() -> str:
    def listed(commands: dict[str, _Command]) -> str:
        return "\n".join(f"  {name:10}{command.summary}" for name, command in commands.items())

    return f"""\
usage: tokenmill COMMAND [flags]

Serves large language models over many processes, GPUs and machines as if they were one.

{listed(_FOR_USERS)}

services, each its own process (`tokenmill up` starts them for you):
{listed(_SERVICES)}

tokenmill COMMAND --help tells more. A first try, without any model:
  tokenmill up --engine sim --once "Hello\""""


if __name__ == "__main__":
    sys.exit(main())
