"""What the clients of a chaos run ask for. Pure: the same seed, the same questions.

Prompts share long beginnings, so that prefix caches and remote prefill have work; some hold text of many bytes a
character, so that a piece cut in the wrong place shows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["LONG_ANSWERS", "MIXED", "REAL_MODEL", "Ask", "Face", "Mix", "asks"]


class Face(StrEnum):
    """Which API is asked."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    GRPC = "grpc"
    GRPC_CHAT = "grpc chat"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, and how its client behaves."""

    number: int
    face: Face
    stream: bool
    """gRPC always streams."""
    prompt: str
    max_tokens: int
    deadline_s: float
    """When the client no longer waits. gRPC sends it along."""
    hasty: bool = False
    """Its deadline is so short that it may end the answer, which is right then."""
    hang_up_after_s: float | None = None
    """The client goes away this long after it asked."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Of what kinds the questions are."""

    shortest_answer: int
    longest_answer: int
    beginnings: tuple[int, ...] = (0, 0, 60, 400, 1500)
    """Words of the beginnings that prompts share."""
    streamed: float = 0.75
    """Part of the HTTP requests."""
    grpc: float = 0.3
    hang_ups: float = 0.08
    hasty: float = 0.04
    deadline_s: float = 60.0


MIXED = Mix(shortest_answer=1, longest_answer=240)
LONG_ANSWERS = Mix(shortest_answer=300, longest_answer=400, beginnings=(0, 60), streamed=1.0, hang_ups=0.0, hasty=0.0)
"""Streams that are in their middle when something happens."""
REAL_MODEL = Mix(
    shortest_answer=8, longest_answer=40, beginnings=(0, 60, 250), hang_ups=0.15, hasty=0.0, deadline_s=300.0
)
"""For a small one on a CPU."""

_WORDS = (
    *("the", "garden", "river", "letter", "music", "story", "question", "number", "quiet", "bright", "simple", "clear"),
    *(
        "morning",
        "of",
        "and",
        "to",
        "in",
        "with",
        "from",
        "under",
        "great",
        "small",
        "people",
        "every",
        "never",
        "word",
    ),
    *("system", "school", "city", "night", "naïve", "café", "Straße", "日本語", "данные", "👩\u200d🚀"),
)
_COMMON_SEED = 7
"""The shared beginnings are the same in every run."""
_VARIANTS = 3


def asks(seed: int, mix: Mix) -> Iterator[Ask]:
    """Questions without end."""
    beginnings = _beginnings(mix.beginnings)
    choose = random.Random(seed)
    number = 0
    while True:
        number += 1
        on_grpc = choose.random() < mix.grpc
        face = choose.choice((Face.GRPC, Face.GRPC_CHAT) if on_grpc else (Face.COMPLETIONS, Face.CHAT))
        hasty = on_grpc and choose.random() < mix.hasty / max(mix.grpc, mix.hasty)
        ending = " ".join(choose.choices(_WORDS, k=choose.randint(1, 40)))
        yield Ask(
            number=number,
            face=face,
            stream=on_grpc or choose.random() < mix.streamed,
            prompt=f"{choose.choice(beginnings)}{number} {ending}?",
            max_tokens=choose.randint(mix.shortest_answer, mix.longest_answer),
            deadline_s=choose.uniform(0.05, 1.0) if hasty else mix.deadline_s,
            hasty=hasty,
            hang_up_after_s=choose.uniform(0.0, 1.5) if choose.random() < mix.hang_ups else None,
        )


def _beginnings(lengths: tuple[int, ...]) -> list[str]:
    choose = random.Random(_COMMON_SEED)
    return [" ".join(choose.choices(_WORDS, k=length)) + " " for length in lengths for _ in range(_VARIANTS)]
