"""Chat templates: the jinja2 program that comes with a model and turns messages into its prompt.

It is somebody else's code, so it runs in jinja2's sandbox, with the extensions that `transformers` gives it and that
templates rely on: raise_exception, strftime_now, a plain tojson, break and continue, {% generation %}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from controlplane.errors import InvalidRequest, SettingsError
from engines.sim.tokenizer import BUILTIN_CHAT_TEMPLATE, BUILTIN_TOKENIZER

__all__ = ["ChatTemplate"]

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ChatTemplate:
    """Of one model."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises `SettingsError` when the source is not a template."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise SettingsError(f"the model's chat template is not valid: {error}") from error
        # jinja2's own is a ChainMap, which every rendering would copy at great cost.
        self._template.globals = dict(self._template.globals)
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def load(cls, source: str) -> ChatTemplate | None:
        """From a model's directory: chat_template.jinja, else tokenizer_config.json. None: the model has none.

        Raises `SettingsError` for files that cannot be used.
        """
        if source == BUILTIN_TOKENIZER:
            return cls(BUILTIN_CHAT_TEMPLATE)
        directory = Path(source)
        config: dict[str, Any] = {}
        try:
            if (path := directory / "tokenizer_config.json").is_file():
                config = json.loads(path.read_text(encoding="utf-8"))
            if (path := directory / "chat_template.jinja").is_file():
                template = path.read_text(encoding="utf-8")
            else:
                template = _default_of(config.get("chat_template"))
        except (OSError, ValueError) as error:
            raise SettingsError(f"cannot read {path}: {error}") from error
        return cls(template, _texts_of(config)) if template else None

    def render(self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any] | None = None) -> str:
        """The prompt up to where the assistant's answer begins. Raises `InvalidRequest` where the template refuses."""
        given = {"messages": messages, "add_generation_prompt": True}
        for name in given.keys() & (extra or {}).keys():
            param = f"chat_template_kwargs.{name}"
            raise InvalidRequest(f"{param} is not yours to set; leave it out", param=param)
        try:
            return self._template.render(
                {**self._special_tokens, "tools": None, "documents": None, **(extra or {}), **given}
            )
        except _Refused as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from None
        except Exception as error:  # somebody else's program, over what a client sent: it may fail in any way
            raise InvalidRequest(
                f"the model's chat template cannot render these messages ({type(error).__name__}); "
                "check their roles and their order",
                param="messages",
            ) from None


class _Refused(Exception):
    """The template called raise_exception."""


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's own text for training; here its content is all that matters."""

    tags = {"generation"}  # noqa: RUF012  jinja2's way

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of jinja2's own."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _default_of(templates: str | list[dict[str, str]] | None) -> str:
    """A model may have several by name; the one named default answers chats."""
    if isinstance(templates, list):
        return next((one["template"] for one in templates if one.get("name") == "default"), "")
    return templates or ""


def _texts_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens a template may name; each is given as a text or as {"content": text}."""
    named = {name: config[name] for name in _SPECIAL_TOKENS if config.get(name)}
    return {name: value["content"] if isinstance(value, dict) else value for name, value in named.items()}
