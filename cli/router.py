"""`tokenmill router`: the service; `tokenmill router explain REQUEST_ID`: why a request went where it went."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Literal

import grpc
from google.protobuf.json_format import MessageToJson
from prometheus_client import CollectorRegistry
from rich.text import Text

from cli.arguments import add_deployment, add_etcd, running_here
from cli.tables import print_table
from cli.tls import add_tls, channel_credentials, channel_options
from controlplane.discovery import Discovery
from controlplane.errors import NotFound, Unavailable
from controlplane.settings import CommonSettings
from controlplane.telemetry import configure_logging
from tokenmill.router.v1 import router_pb2, router_pb2_grpc

__all__ = ["main"]

_CONNECT_TIMEOUT_S = 5.0
_ASK_TIMEOUT_S = 5.0
_Measured = Literal["cached_tokens", "prefill_ms", "ttft_ms", "completion_tokens"]


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until told to stop, or explains; returns the process's exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["explain"]:
        return _explain(arguments[1:])
    from services.router.__main__ import main as serve

    return serve(arguments)


def _explain(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    configure_logging(CommonSettings(log_level="error"), service="explain")
    etcd = arguments.etcd or running_here(arguments.deployment).etcd
    explained = asyncio.run(_ask(etcd, arguments))
    if arguments.json:
        print(MessageToJson(explained, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
    else:
        _print(explained)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokenmill router explain",
        description="Shows one of the routers' latest decisions: every worker compared, all that its score came from, "
        "who was left out and why, and what came of it.",
    )
    parser.add_argument("request_id", metavar="REQUEST_ID", help="as in the x-request-id header of the answer")
    add_deployment(parser)
    add_etcd(parser)
    parser.add_argument("--json", action="store_true", help="print router.proto's ExplainResponse, for programs")
    add_tls(parser)
    return parser


async def _ask(etcd: str, arguments: argparse.Namespace) -> router_pb2.ExplainResponse:
    """The first router's answer that knows the request."""
    discovery = await Discovery.connect(etcd, arguments.deployment, CollectorRegistry(), timeout_s=_CONNECT_TIMEOUT_S)
    try:
        routers = [one.address for one in discovery.by_service("router")]
    finally:
        await discovery.close()
    if not routers:
        raise Unavailable(f"no router of deployment {arguments.deployment!r} is registered in etcd at {etcd}")
    request = router_pb2.ExplainRequest(request_id=arguments.request_id)
    silent = ""
    for address in routers:
        async with _channel(address, arguments) as channel:
            try:
                return await router_pb2_grpc.RouterStub(channel).Explain(request, timeout=_ASK_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    silent = f"; {address} did not answer: {error.code().name}, {error.details()}"
    raise NotFound(
        f"no router knows the request {arguments.request_id!r}: they remember their latest explain_ring decisions"
        f"{silent}",
        param="request_id",
    )


def _channel(address: str, arguments: argparse.Namespace) -> grpc.aio.Channel:
    credentials = channel_credentials(arguments)
    if credentials is None:
        return grpc.aio.insecure_channel(address)
    return grpc.aio.secure_channel(address, credentials, channel_options(arguments))


def _print(explained: router_pb2.ExplainResponse) -> None:
    print(f"{explained.request_id}: {explained.why}")
    print(
        f"{explained.prompt_tokens} prompt tokens, {explained.blocks} blocks; policy {explained.policy}, "
        f"{explained.age_ms / 1000:.1f} s ago"
    )
    for comparison in explained.comparisons:
        terms = list(dict.fromkeys(name for one in comparison.candidates for name in sorted(one.terms)))
        rows: list[list[str | Text]] = [
            [
                Text(one.instance_id, style="bold" if one.instance_id == comparison.best else ""),
                "best" if one.instance_id == comparison.best else "",
                f"{one.score:.6g}",
                *(f"{one.terms[name]:.4g}" if name.endswith("_s") else f"{one.terms[name]:g}" for name in terms),
            ]
            for one in sorted(comparison.candidates, key=lambda one: one.score)
        ]
        print(f"\n{comparison.job}")
        print_table(["instance", "", "score", *terms], rows)
    if explained.filtered:
        print("\nleft out")
        left_out: list[list[str | Text]] = [[one.instance_id, one.role, one.filtered] for one in explained.filtered]
        print_table(["instance", "role", "why"], left_out)
    print("\nwhat came of it")
    print_table(["", "expected", "measured"], [list(row) for row in _outcome(explained)])


def _outcome(explained: router_pb2.ExplainResponse) -> list[tuple[str, str, str]]:
    def measured(name: _Measured) -> str:
        return str(getattr(explained, name)) if explained.HasField(name) else "not yet"

    predicted = str(explained.predicted_ttft_ms) if explained.predicted_ttft_ms else "unknown"
    return [
        ("cached tokens", str(explained.expected_cached_tokens), measured("cached_tokens")),
        ("time to first token, ms", predicted, measured("ttft_ms")),
        *([("remote prefill, ms", "", measured("prefill_ms"))] if explained.prefill else []),
        ("answer, tokens", "", measured("completion_tokens")),
    ]
