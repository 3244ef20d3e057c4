"""How long a step takes, and how much KV there is room for: one GPU class with one model size.

A profile is a small TOML file, `profiles/NAME.toml` here or anywhere by its path, with the fields of `Profile`.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import MISSING, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from controlplane.errors import SettingsError

__all__ = ["Profile", "profile", "profile_names"]

_FILES = files("engines.sim") / "profiles"
_PS = 1_000_000
"""Picoseconds in a microsecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Times in microseconds; linear, as measured step times nearly are between the extremes."""

    step_us: float
    """Each step: launch, sampling, the weights read once."""
    prefill_us: float
    """Each prompt token computed."""
    prefill_context_us: float = 0.0
    """Each pair of a prompt token computed and one before it that it attends to: what makes long prompts slower."""
    decode_us: float
    """Each sequence that decodes."""
    context_us: float
    """Each token of context that a decoding sequence attends to."""
    kv_tokens: int = 400_000
    """Tokens whose KV a worker has room for."""
    kv_bytes_per_token: int = 131_072
    kv_transfer_gb_s: float = 40.0
    """Gigabytes a second from one worker to another."""
    kv_transfer_us: float = 2_000.0
    """Each transfer, whatever its size."""
    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    hardware: str = ""
    model: str = ""
    source: str = ""
    """Where the figures come from."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str):
                continue
            least = 1 if field.type == "int" else 0
            if not (math.isfinite(value) and value >= least):
                raise SettingsError(f"{field.name} is {value}; it must be at least {least}", param="profile")
        if not self.step_us or not self.kv_transfer_gb_s:
            raise SettingsError("step_us and kv_transfer_gb_s must be more than 0", param="profile")

    def step_ps(self, prefill_tokens: int, prefill_pairs: int, decoding: int, context_tokens: int) -> int:
        """Picoseconds for one step. Whole ones: the sum over many steps is then exact in whatever order."""
        return (
            round(self.step_us * _PS)
            + round(self.prefill_us * _PS) * prefill_tokens
            + round(self.prefill_context_us * _PS) * prefill_pairs
            + round(self.decode_us * _PS) * decoding
            + round(self.context_us * _PS) * context_tokens
        )

    def transfer_s(self, tokens: int) -> float:
        """Seconds for the KV of so many tokens to come from another worker."""
        return 1e-6 * self.kv_transfer_us + tokens * self.kv_bytes_per_token / (1e9 * self.kv_transfer_gb_s)


def profile_names() -> list[str]:
    """Those that come with us."""
    return sorted(entry.name.removesuffix(".toml") for entry in _FILES.iterdir() if entry.name.endswith(".toml"))


def profile(name: str) -> Profile:
    """The profile of that name, or from the file of that path. Raises `SettingsError`."""
    if name in profile_names():
        return _parse(name, (_FILES / f"{name}.toml").read_text(encoding="utf-8"))
    if not name.endswith(".toml"):
        known = ", ".join(profile_names())
        raise SettingsError(f"profile is {name!r}; it must be one of {known}, or the path of a .toml", param="profile")
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"profile {name} cannot be read: {error}", param="profile") from error
    return _parse(name, text)


def _parse(name: str, text: str) -> Profile:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"profile {name} is not TOML: {error}", param="profile") from error
    known = {field.name: field for field in fields(Profile)}
    if unknown := values.keys() - known.keys():
        raise SettingsError(
            f"profile {name} has {', '.join(sorted(unknown))}; its fields are {', '.join(known)}", param="profile"
        )
    if missing := [field.name for field in known.values() if field.default is MISSING and field.name not in values]:
        raise SettingsError(f"profile {name} lacks {', '.join(missing)}", param="profile")
    for key, value in values.items():
        _check_type(name, key, value, str(known[key].type))
    return Profile(**values)


def _check_type(name: str, key: str, value: Any, wanted: str) -> None:
    allowed = {"str": (str,), "int": (int,), "float": (int, float)}[wanted]
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise SettingsError(f"profile {name} has {key} = {value!r}; it must be of type {wanted}", param="profile")
