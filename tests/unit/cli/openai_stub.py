"""A small HTTP server that speaks as much of the OpenAI API as the command line uses."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class OpenAiStub(ThreadingHTTPServer):
    """Answers every chat with how many messages it was given, in two parts; remembers the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[dict[str, Any]] = []
        self.refusal: tuple[int, str] | None = None
        self.broken_after_first = False
        self.go_on = threading.Event()
        """Cleared, it holds an answer after its first part."""
        self.go_on.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: OpenAiStub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, {"object": "list", "data": [{"id": "tiny"}, {"id": "other"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append(request | {"authorization": self.headers.get("authorization")})
        if self.server.refusal is not None:
            status, message = self.server.refusal
            self._send(status, {"error": {"message": message}})
            return
        self.send_response(200)
        self.end_headers()
        self._event({"choices": [{"delta": {"role": "assistant", "content": f"{len(request['messages'])}"}}]})
        self.server.go_on.wait(30)
        if self.server.broken_after_first:
            self._event({"error": {"message": "the worker was lost"}})
            return
        self._event({"choices": [{"delta": {"content": " messages"}}]})
        usage = {"prompt_tokens": 7, "completion_tokens": 2, "tokenmill": {"remote_tokens": 6}}
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _send(self, status: int, body: dict[str, Any]) -> None:
        encoded = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)
