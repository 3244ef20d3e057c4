"""Settings: defaults < TOML file < environment < flags.

A section is a frozen dataclass whose fields are made with `setting`. Each program loads the sections it needs:

    file         [common] or [router], key = the field's name
    environment  TOKENMILL_<FIELD> for common, TOKENMILL_<SECTION>_<FIELD> for the others
    flag         --field-name, for bools also --no-field-name; where two loaded sections share a field's name, the later
                 one's flag is --section-field-name

An unknown key is refused with the nearest known name. What belongs to a section that this program does not load is
left to the program that does, so that one file and one environment serve a whole deployment.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import re
import socket
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

from controlplane.errors import SettingsError
from controlplane.setting_values import as_text, convert

__all__ = ["SECTIONS", "CommonSettings", "Loaded", "Shown", "as_env", "load", "setting"]

SECTIONS = ("common", "frontend", "router", "prefill", "decode", "engine", "up", "fleet")
"""Every section there is. Only names: a section's fields are known to those who load it."""

_PREFIX = "TOKENMILL_"
_NOT_SETTINGS = {f"{_PREFIX}CONFIG", f"{_PREFIX}HOME"}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Rules:
    """What `setting` says of a field beyond its type and default."""

    help: str
    choices: tuple[str, ...] | None
    minimum: float | None
    maximum: float | None
    secret: bool
    hidden: bool
    flag: str | None
    short: str | None
    metavar: str | None


def setting(
    default: Any,
    help: str,  # noqa: A002  as in argparse
    *,
    choices: Sequence[str] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    secret: bool = False,
    hidden: bool = False,
    flag: str | None = None,
    short: str | None = None,
    metavar: str | None = None,
) -> Any:
    """A field of a settings section, of a type in `setting_values`. Bounds are inclusive.

    `secret` values are never printed, `hidden` ones are left out of --help, `flag` replaces the flag's own name,
    `short` is a second one, like "-d"; `metavar` stands for the value in --help.
    """
    allowed = tuple(choices) if choices is not None else None
    rules = _Rules(help, allowed, minimum, maximum, secret, hidden, flag, short, metavar)
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata={"rules": rules})
    return field(default=default, metadata={"rules": rules})


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """What every service needs."""

    etcd: str = setting("127.0.0.1:2379", "etcd servers, comma separated", metavar="HOST:PORT")
    nats: str = setting("nats://127.0.0.1:4222", "NATS server", metavar="URL")
    deployment: str = setting("default", "name of the deployment; those of different names never meet", metavar="NAME")
    instance_id: str = setting("", "name of this instance, unique in the deployment; made when empty")
    bind: str = setting("127.0.0.1", "address every listener binds to")
    advertise: str = setting("", "host others reach this by; default: bind, or the host name if bind is a wildcard")
    grpc_port: int = setting(0, "port of the gRPC server; 0 takes a free one", minimum=0, maximum=65535)
    metrics_port: int = setting(0, "port of the Prometheus endpoint; 0 takes a free one", minimum=0, maximum=65535)
    drain_timeout_s: float = setting(30.0, "longest wait for running requests when stopping, seconds", minimum=0)
    share_ports: bool = setting(
        False, "let another instance of this user listen on the same ports, to take this one's place", hidden=True
    )
    log_level: str = setting("info", "least severe level logged", choices=("debug", "info", "warning", "error"))
    log_format: str = setting("auto", "auto: human in a terminal, else json", choices=("auto", "json", "human"))
    labels: dict[str, str] = setting({}, "labels of this instance, for people and policies")  # noqa: RUF009  made anew

    def __post_init__(self) -> None:
        for name in ("deployment", "instance_id"):
            # They become parts of etcd keys and NATS subjects.
            if re.search(r"[^A-Za-z0-9_-]", getattr(self, name)):
                message = f"{name} {getattr(self, name)!r} may only have letters, digits, - and _"
                raise SettingsError(message, param=f"common.{name}")
        if not self.deployment:
            raise SettingsError("deployment must not be empty", param="common.deployment")

    @property
    def advertised_host(self) -> str:
        """The host others reach this one by."""
        return self.advertise or (socket.gethostname() if self.bind in ("0.0.0.0", "::", "") else self.bind)


@dataclass(frozen=True, slots=True)
class Shown:
    """One setting as `tokenmill config show` prints it; a secret's value is masked."""

    key: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class _Setting:
    """One field of one loaded section, with all its names."""

    section: str
    name: str
    type: Any
    default: Any
    rules: _Rules

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def env(self) -> str:
        return _env_name(self.section, self.name)


class Loaded:
    """The settings a program runs with, and where each came from."""

    def __init__(self, sections: Mapping[type, object], sources: dict[str, str], shown: list[Shown]) -> None:
        self._sections = sections
        self.sources = sources
        """"section.field" -> "default", "file PATH", "environment NAME" or "flag --name"."""
        self.shown = shown

    def get(self, section: type[T]) -> T:
        """The loaded instance of a section's class."""
        loaded = self._sections[section]
        assert isinstance(loaded, section)
        return loaded


def load(
    sections: Mapping[str, type], argv: Sequence[str], env: Mapping[str, str], *, prog: str, description: str = ""
) -> Loaded:
    """Reads every source and checks every value. Raises `SettingsError`; --help and --version print and exit."""
    settings = [known for section, cls in sections.items() for known in _settings_of(section, cls)]
    flags = _flag_names(settings)
    given_flags = _read_flags(prog, description, settings, flags, argv)
    path = given_flags.pop("config", None) or env.get(f"{_PREFIX}CONFIG", "")

    given: dict[str, tuple[Any, str]] = {}
    given |= {key: (value, f"file {path}") for key, value in (_read_file(path, settings) if path else {}).items()}
    given |= {known.key: (text, f"environment {known.env}") for known, text in _read_env(settings, env)}
    given |= {key: (value, f"flag {flags[key]}") for key, value in given_flags.items()}

    values: dict[str, dict[str, Any]] = {section: {} for section in sections}
    shown = []
    sources = {}
    for known in settings:
        value, source = given.get(known.key, (known.default, "default"))
        if known.key in given:
            value = _checked(known, value, source)
        values[known.section][known.name] = value
        sources[known.key] = source
        shown.append(Shown(known.key, "***" if known.rules.secret and value else as_text(value), source))
    return Loaded({cls: cls(**values[section]) for section, cls in sections.items()}, sources, shown)


def as_env(section: str, settings: object) -> dict[str, str]:
    """The environment that makes another program load these settings: what differs from the defaults."""
    return {
        known.env: as_text(value)
        for known in _settings_of(section, type(settings))
        if (value := getattr(settings, known.name)) != known.default
    }


def _settings_of(section: str, cls: type) -> Iterator[_Setting]:
    if section not in SECTIONS:
        raise ValueError(f"section {section!r} of {cls.__name__} is not in SECTIONS")
    hints = get_type_hints(cls)
    for one in fields(cls):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        yield _Setting(section, one.name, hints[one.name], default, one.metadata["rules"])


def _env_name(section: str, name: str) -> str:
    return f"{_PREFIX}{name.upper()}" if section == "common" else f"{_PREFIX}{section.upper()}_{name.upper()}"


def _flag_names(settings: Sequence[_Setting]) -> dict[str, str]:
    names: dict[str, str] = {}
    for known in settings:
        flag = known.rules.flag or f"--{known.name.replace('_', '-')}"
        names[known.key] = flag if flag not in names.values() else f"--{known.section}-{flag.removeprefix('--')}"
    return names


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}; see {self.prog} --help")


def _read_flags(
    prog: str, description: str, settings: Sequence[_Setting], flags: Mapping[str, str], argv: Sequence[str]
) -> dict[str, Any]:
    parser = _Parser(
        prog=prog,
        usage="%(prog)s [flags]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=f"tokenmill {importlib.metadata.version('tokenmill')}")
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with settings [env {_PREFIX}CONFIG]")
    groups = {section: parser.add_argument_group(section) for section in dict.fromkeys(one.section for one in settings)}
    for known in settings:
        form: dict[str, Any] = {"metavar": known.rules.metavar or known.name.rsplit("_", 1)[-1].upper()}
        if known.type is bool:
            form = {"action": argparse.BooleanOptionalAction}
        elif known.rules.choices:
            form = {"metavar": "|".join(known.rules.choices)}
        names = [known.rules.short, flags[known.key]] if known.rules.short else [flags[known.key]]
        groups[known.section].add_argument(*names, dest=known.key, help=_help(known), **form)
    given, unknown = parser.parse_known_args(list(argv))
    for argument in unknown:
        if argument.startswith("-"):
            name = argument.split("=", 1)[0]
            raise _unknown("flag", name, parser._option_string_actions)
        raise SettingsError(f"unexpected argument {argument!r}; see {prog} --help")
    return vars(given)


def _help(known: _Setting) -> str:
    if known.rules.hidden:
        return argparse.SUPPRESS
    default = as_text(known.default)
    text = f"{known.rules.help} [{f'default {default}, ' if default else ''}env {known.env}]"
    return text.replace("%", "%%")


def _read_file(path: str, settings: Sequence[_Setting]) -> dict[str, Any]:
    try:
        document = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {path}: {error.strerror}", param="config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"the settings file {path} is not TOML: {error}", param="config") from error
    loaded = {known.section for known in settings}
    keys = {known.key for known in settings}
    values = {}
    for section, table in document.items():
        if section not in SECTIONS:
            raise _unknown(f"section in {path}:", f"[{section}]", [f"[{name}]" for name in SECTIONS])
        if not isinstance(table, dict):
            raise SettingsError(
                f"{section} in {path} must be a table: write [{section}] and its keys below", param=section
            )
        for name, value in table.items() if section in loaded else ():
            if (key := f"{section}.{name}") not in keys:
                raise _unknown(f"key in {path}:", key, keys)
            values[key] = value
    return values


def _read_env(settings: Sequence[_Setting], env: Mapping[str, str]) -> Iterator[tuple[_Setting, str]]:
    by_name = {known.env: known for known in settings}
    loaded = {known.section for known in settings}
    elsewhere = tuple(f"{_PREFIX}{section.upper()}_" for section in SECTIONS if section not in loaded)
    for name, text in env.items():
        if name in by_name:
            yield by_name[name], text
        elif name.startswith(_PREFIX) and name not in _NOT_SETTINGS and not name.startswith(elsewhere):
            raise _unknown("environment variable", name, [*by_name, *_NOT_SETTINGS, *(f"{one}*" for one in elsewhere)])


def _unknown(kind: str, name: str, known: Iterable[str]) -> SettingsError:
    nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)
    return SettingsError(f"unknown {kind} {name}; the nearest known name is {nearest[0]}", param=name)


def _checked(known: _Setting, value: Any, source: str) -> Any:
    """The value in the setting's type and within its bounds, from a text or from TOML."""
    rules = known.rules
    printed = "***" if rules.secret else repr(value)

    def refuse(why: str) -> SettingsError:
        return SettingsError(f"{known.key} = {printed} (from {source}) {why}", param=known.key)

    try:
        value = convert(known.type, value)
    except ValueError as error:
        raise refuse(str(error)) from None
    if rules.choices is not None and value not in rules.choices:
        raise refuse(f"must be one of: {', '.join(rules.choices)}")
    if value is None:
        return None
    if rules.minimum is not None and value < rules.minimum:
        raise refuse(f"must be at least {rules.minimum:g}")
    if rules.maximum is not None and value > rules.maximum:
        raise refuse(f"must be at most {rules.maximum:g}")
    return value
