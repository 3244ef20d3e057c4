"""Talks to Tokenmill over gRPC: lists models, streams a chat, cancels it, sets a deadline, reads error details."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import grpc
from google.rpc import status_pb2

from tokenmill.common.v1 import common_pb2
from tokenmill.inference.v1 import inference_pb2, inference_pb2_grpc


def main() -> int:
    """Returns the exit code."""
    arguments = parse()
    metadata = [("authorization", f"Bearer {arguments.key}")] if arguments.key else []
    try:
        with connect(arguments) as channel:
            inference = inference_pb2_grpc.InferenceStub(channel)
            if arguments.command == "models":
                list_models(inference, metadata)
            else:
                chat(inference, metadata, arguments)
    except grpc.RpcError as error:
        code, param = read_details(error)
        print(f"error: code={code} param={param}: {error.details()}", file=sys.stderr)
        return 1
    return 0


def parse() -> argparse.Namespace:
    """The command line; ends the program with code 2 where it is wrong."""
    parser = argparse.ArgumentParser(prog="client")
    parser.add_argument("--address", required=True, metavar="HOST:PORT")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--ca", metavar="FILE", help="PEM of the CA to trust; default: the system's")
    parser.add_argument("--key", help="API key")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("models")
    chat = commands.add_parser("chat")
    chat.add_argument("prompt", metavar="PROMPT")
    chat.add_argument("--max-tokens", type=int, metavar="N")
    chat.add_argument("--cancel-after", type=int, metavar="CHUNKS")
    chat.add_argument("--deadline", type=float, metavar="SECONDS")
    return parser.parse_args()


def connect(arguments: argparse.Namespace) -> grpc.Channel:
    """A channel; it connects with the first call."""
    if not arguments.tls:
        return grpc.insecure_channel(arguments.address)
    ca = Path(arguments.ca).read_bytes() if arguments.ca else None
    return grpc.secure_channel(arguments.address, grpc.ssl_channel_credentials(ca))


def list_models(inference: inference_pb2_grpc.InferenceStub, metadata: list[tuple[str, str]]) -> None:
    """Prints name, longest prompt and answer together, and ready workers of each."""
    for model in inference.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata).models:
        print(model.name, model.max_model_len, model.ready_workers, sep="\t")


def chat(
    inference: inference_pb2_grpc.InferenceStub, metadata: list[tuple[str, str]], arguments: argparse.Namespace
) -> None:
    """Prints the answer as it comes. The model is left open: the only one served."""
    request = inference_pb2.ChatRequest(
        messages=[inference_pb2.Message(role="user", content=arguments.prompt)],
        sampling=common_pb2.Sampling(temperature=0, max_tokens=arguments.max_tokens),
    )
    call = inference.Chat(request, metadata=metadata, timeout=arguments.deadline)
    for chunks, response in enumerate(call, start=1):
        print(response.text, end="", flush=True)
        if response.HasField("usage"):
            reason = common_pb2.FinishReason.Name(response.finish_reason).removeprefix("FINISH_REASON_").lower()
            print(f"\nfinished: {reason}, {response.usage.completion_tokens} tokens", file=sys.stderr)
        elif chunks == arguments.cancel_after:
            call.cancel()  # the server stops at once
            print(f"\ncancelled after {chunks} chunks", file=sys.stderr)
            break
    print()


def read_details(error: grpc.RpcError) -> tuple[str, str]:
    """Our code and the field at fault; for a call that never reached Tokenmill, gRPC's own code."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:
                ours = common_pb2.ErrorDetail()
                if detail.Unpack(ours):
                    return ours.code, ours.param
    return error.code().name.lower(), ""


if __name__ == "__main__":
    sys.exit(main())
