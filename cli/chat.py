"""`tokenmill chat`: talks to a served model in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from cli.arguments import add_deployment
from cli.openai_client import Message, OpenAiClient
from controlplane.deployment import running
from controlplane.errors import NotFound, TokenmillError, Unavailable

__all__ = ["main"]

_HELP = """\
/clear   forget the conversation
/exit    leave, as Ctrl-D does
/help    this text
Ctrl-C   stop the answer"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit code."""
    arguments = _parser().parse_args(argv)
    chat = _Chat(arguments)
    if arguments.prompt:
        chat.answer(" ".join(arguments.prompt))
        return 0
    return _talk(chat)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokenmill chat",
        description="Talks to a served model over its OpenAI HTTP API. Without PROMPT it is a conversation:\n\n"
        + _HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="ask this, print the answer, leave")
    add_deployment(parser)
    parser.add_argument("--url", metavar="URL", help="of the server [default: that of the deployment on this machine]")
    parser.add_argument("--model", metavar="NAME", help="one of /v1/models [default: the first]")
    parser.add_argument("--system", metavar="TEXT", help="instructions the model gets first")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer [default: what the model allows]")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 always takes the likeliest token")
    parser.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY", ""), metavar="KEY", help="[env OPENAI_API_KEY]"
    )
    return parser


class _Chat:
    """A conversation so far, and how to go on with it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._url: str = arguments.url or _url_of(arguments.deployment)
        self._api_key: str = arguments.api_key
        self._max_tokens: int | None = arguments.max_tokens
        self._temperature: float | None = arguments.temperature
        self._system: list[Message] = [{"role": "system", "content": arguments.system}] if arguments.system else []
        self._messages = list(self._system)
        self.model: str = asyncio.run(self._choose(arguments.model))

    def clear(self) -> None:
        """Forgets everything but the instructions."""
        self._messages = list(self._system)

    def answer(self, prompt: str) -> None:
        """Prints the answer as it comes; Ctrl-C ends it, and what was said so far stays in the conversation."""
        self._messages.append({"role": "user", "content": prompt})
        said: list[str] = []
        try:
            asyncio.run(self._stream(said))
        except KeyboardInterrupt:
            print("\n(stopped)", file=sys.stderr)
        except TokenmillError:
            self._messages.pop()
            raise
        self._messages.append({"role": "assistant", "content": "".join(said)})

    async def _choose(self, wanted: str | None) -> str:
        async with OpenAiClient(self._url, api_key=self._api_key) as client:
            served = await client.models()
        if wanted is None and served:
            return served[0]
        if wanted not in served:
            raise NotFound(
                f"{self._url} serves {', '.join(served) or 'no model yet'}" + (f", not {wanted}" * bool(wanted))
            )
        return wanted

    async def _stream(self, said: list[str]) -> None:
        async with OpenAiClient(self._url, api_key=self._api_key) as client:
            answer = client.chat(self.model, self._messages, max_tokens=self._max_tokens, temperature=self._temperature)
            async for text in answer:
                said.append(text)
                print(text, end="", flush=True)
        print()


def _url_of(deployment: str) -> str:
    state = running(deployment)
    if state is None:
        raise Unavailable(f"deployment {deployment!r} does not run on this machine; start `tokenmill up` or give --url")
    if not state.url:
        raise Unavailable(f"deployment {deployment!r} is still starting")
    return state.url


def _talk(chat: _Chat) -> int:
    if sys.stdin.isatty():
        import readline  # noqa: F401  editing and history for input()
    print(f"{chat.model}; /help for help", file=sys.stderr)
    while True:
        try:
            prompt = input("> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        match prompt:
            case "":
                continue
            case "/exit" | "/quit":
                return 0
            case "/clear":
                chat.clear()
                print("(forgotten)", file=sys.stderr)
            case "/help":
                print(_HELP, file=sys.stderr)
            case command if command.startswith("/"):
                print(f"no command {command}; /help for help", file=sys.stderr)
            case _:
                try:
                    chat.answer(prompt)
                except TokenmillError as error:
                    print(f"error: {error.message}", file=sys.stderr)
