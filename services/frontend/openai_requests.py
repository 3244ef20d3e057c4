"""What OpenAI's clients send, read and checked. Nothing here knows a model; `generation.py` holds it against one.

Fields OpenAI has and that change nothing here are ignored; fields that would change the answer and are not supported
are refused; unknown ones too, as OpenAI does it. Extensions have the names vLLM gave them.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import orjson

from controlplane.errors import InvalidRequest, Unsupported
from engines.base import MAX_LOGPROBS, SamplingParams
from services.frontend.fields import Fields, shown
from services.frontend.routing import ANYWHERE, LEAST_PRIORITY, MOST_PRIORITY, Routing
from services.frontend.sampling import read_sampling

__all__ = [
    "MAX_TIMEOUT_S",
    "ChatRequest",
    "CompletionRequest",
    "Options",
    "check_message",
    "read_chat",
    "read_completion",
    "read_stop",
]

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_CHOICES = 128
MAX_TIMEOUT_S = 86_400
_MAX_TOKENS = 2**31 - 1
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Options:
    """What chats and completions share."""

    model: str
    """Empty: the only model served."""
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    routing: Routing = ANYWHERE
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """POST /v1/chat/completions."""

    options: Options
    messages: list[dict[str, Any]]
    template_arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """POST /v1/completions."""

    options: Options
    prompts: list[str | array[int]]


def read_chat(body: bytes, routing: Routing = ANYWHERE) -> ChatRequest:
    """Raises `InvalidRequest` or `Unsupported`, naming the field."""
    fields = _object(body)
    messages = _messages(fields)
    template_arguments = fields.object("chat_template_kwargs")
    older = fields.integer("max_tokens", minimum=1, maximum=_MAX_TOKENS)
    newer = fields.integer("max_completion_tokens", minimum=1, maximum=_MAX_TOKENS)
    wants_logprobs = fields.boolean("logprobs")
    top_logprobs = fields.integer("top_logprobs", minimum=0, maximum=MAX_LOGPROBS)
    if top_logprobs is not None and not wants_logprobs:
        raise InvalidRequest(f"top_logprobs is {top_logprobs}, and it needs logprobs to be true", param="top_logprobs")
    fields.only("tools", ([],), "tool calling is not served yet")
    fields.only("tool_choice", ("none", "auto"), "tool calling is not served yet")
    fields.only("functions", ([],), "tool calling is not served yet")
    fields.only("function_call", ("none", "auto"), "tool calling is not served yet")
    fields.only("response_format", ({"type": "text"},), "only text can be asked for; describe the format in the prompt")
    fields.only("modalities", (["text"],), "only text is served")
    fields.only("audio", (), "only text is served")
    fields.only("prediction", (), "predicted outputs are not served")
    fields.only("web_search_options", (), "nothing is searched")
    fields.only("reasoning_effort", (), "it depends on the model's template; see chat_template_kwargs")
    fields.only("verbosity", (), "it has no meaning for these models")
    fields.ignore("parallel_tool_calls")
    options = _options(
        fields,
        routing,
        max_tokens=older if newer is None else newer,
        logprobs=(top_logprobs or 0) if wants_logprobs else None,
    )
    return ChatRequest(options, messages, template_arguments)


def read_completion(body: bytes, routing: Routing = ANYWHERE) -> CompletionRequest:
    """Raises `InvalidRequest` or `Unsupported`, naming the field."""
    fields = _object(body)
    prompts = _prompts(fields)
    fields.only("echo", (False,), "the answer cannot repeat its prompt; join the two yourself")
    fields.only("suffix", ("",), "text cannot be inserted; send what comes before it as the prompt")
    best_of = fields.integer("best_of", minimum=1, maximum=MAX_CHOICES)
    options = _options(
        fields,
        routing,
        max_tokens=fields.integer("max_tokens", minimum=1, maximum=_MAX_TOKENS),
        logprobs=fields.integer("logprobs", minimum=0, maximum=MAX_LOGPROBS),
    )
    if best_of is not None and best_of != options.n:
        raise Unsupported(
            f"best_of is {best_of}, and it must equal n ({options.n}): answers are not ranked", param="best_of"
        )
    if len(prompts) * options.n > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n {options.n} make {len(prompts) * options.n} answers; "
            f"at most {MAX_CHOICES} may be asked for at once",
            param="prompt",
        )
    return CompletionRequest(options, prompts)


def read_stop(fields: Fields) -> tuple[str, ...]:
    """A string or a list of them."""
    value = fields.take("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        fields.refuse("stop", value, "must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} strings; at most {MAX_STOPS} are allowed", param="stop")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            fields.refuse("stop", stop, f"must have 1 to {MAX_STOP_CHARS} characters each")
    return tuple(stops)


def _object(body: bytes) -> Fields:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the request body must be a JSON object, not {_kind(value)}")
    return Fields(value)


def _options(fields: Fields, routing: Routing, *, max_tokens: int | None, logprobs: int | None) -> Options:
    """Reads what is left, then refuses what nobody knows."""
    stream = fields.boolean("stream")
    streaming = Fields(fields.object("stream_options"), "stream_options.")
    include_usage = streaming.boolean("include_usage")
    streaming.ignore("include_obfuscation")
    streaming.refuse_unread()
    if include_usage and not stream:
        raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
    model = fields.text("model")
    if model is None:
        raise InvalidRequest("model is missing; GET /v1/models lists the names", param="model")
    options = Options(
        model=model,
        sampling=read_sampling(fields, max_tokens=max_tokens, logprobs=logprobs),
        stop=read_stop(fields),
        n=fields.integer("n", minimum=1, maximum=MAX_CHOICES) or 1,
        stream=stream,
        include_usage=include_usage,
        routing=routing.with_priority(fields.integer("priority", minimum=LEAST_PRIORITY, maximum=MOST_PRIORITY)),
        timeout_s=fields.number("timeout_s", minimum=0, maximum=MAX_TIMEOUT_S, above=True),
    )
    fields.only("logit_bias", ({},), "token probabilities cannot be changed")
    fields.only("store", (False,), "nothing is stored")
    fields.only("service_tier", ("auto", "default"), "there is one tier")
    fields.ignore("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
    fields.refuse_unread()
    return options


def _messages(fields: Fields) -> list[dict[str, Any]]:
    value = fields.take("messages")
    if value is None:
        raise InvalidRequest("messages is missing; send at least one", param="messages")
    if not isinstance(value, list):
        fields.refuse("messages", value, "must be a list of messages")
    if not value:
        fields.refuse("messages", value, "must have at least one message")
    return [check_message(message, f"messages[{i}]") for i, message in enumerate(value)]


def check_message(value: Any, where: str) -> dict[str, Any]:
    """One message of a chat, as templates take it."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be an object with role and content, not {_kind(value)}", param=where)
    fields = Fields(value, f"{where}.")
    role = fields.text("role") or ""
    if role not in _ROLES:
        fields.refuse("role", role, f"must be one of: {', '.join(_ROLES)}")
    for call in ("tool_calls", "function_call", "audio"):
        fields.only(call, ([],), "only text messages are served")
    message: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _content(fields, where, role),
    }
    if (name := fields.text("name")) is not None:
        message["name"] = name
    if (call_id := fields.text("tool_call_id")) is not None:
        message["tool_call_id"] = call_id
    fields.ignore("refusal", "annotations")
    fields.refuse_unread()
    return message


def _content(fields: Fields, where: str, role: str) -> str:
    """A string, or a list of text parts, which are joined. Only an assistant may have said nothing."""
    value = fields.take("content")
    if isinstance(value, str):
        return value
    if value is None and role == "assistant":
        return ""
    if not isinstance(value, list):
        param = f"{where}.content"
        raise InvalidRequest(f"{param} must be a string or a list of text parts, not {_kind(value)}", param=param)
    return "".join(_text_part(part, f"{where}.content[{i}]") for i, part in enumerate(value))


def _text_part(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
        raise Unsupported(f"{where} is of type {shown(part['type'])}; only text parts are served", param=where)
    raise InvalidRequest(f'{where} must be {{"type": "text", "text": "..."}}', param=where)


def _prompts(fields: Fields) -> list[str | array[int]]:
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    value = fields.take("prompt")
    if value is None:
        raise InvalidRequest("prompt is missing", param="prompt")
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(one, str) for one in value):
            return list(value)
        if all(type(one) is int for one in value):
            return [_token_ids(value, "prompt")]
        if all(isinstance(one, list) and one and all(type(token) is int for token in one) for one in value):
            return [_token_ids(one, f"prompt[{i}]") for i, one in enumerate(value)]
    raise InvalidRequest(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists, and not empty",
        param="prompt",
    )


def _token_ids(value: list[int], where: str) -> array[int]:
    try:
        return array("I", value)
    except OverflowError:
        raise InvalidRequest(f"{where} has a number that is no token id", param=where) from None


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object")
