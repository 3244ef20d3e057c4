"""Prompts of every kind that matters to blocks of 32 tokens, and what one engine by itself makes of them."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

__all__ = ["EIGHT", "NAMES", "Alone", "prompts", "story"]


@dataclass(frozen=True)
class Alone:
    """One engine's own answer."""

    prompt: list[int]
    answer: list[int]
    margin: float
    """The least distance of any step's two best log probabilities: below 1e-3, rounding may decide."""


_TEXTS = {
    "short": "The capital of France is",
    "two words": "Once upon",
    "chat": "<|im_start|>user\nName three colours of the rainbow.<|im_end|>\n<|im_start|>assistant\n",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "digits": "1 2 3 4 5 6 7 8 9 10 11 12 13 14",
    "greek": "Ἐν ἀρχῇ ἦν ὁ λόγος, καὶ ὁ λόγος ἦν πρὸς τὸν θεόν",
    "emoji": "Weather report: ☀️ 🌧️ 🌈 and in Tōkyō 東京は今日も晴れです。",
}

_STORY = (
    "In the year {n} the mill at river stone {n} ground {m} sacks of wheat, and its keeper wrote in the book that the "
    "wheel had turned for {k} days without rest. "
)

_QUESTIONS = {
    "prefix, first": "How many sacks were ground in the first year? Answer:",
    "prefix, second": "Who wrote in the book? Answer:",
    "prefix, third": "What turned without rest? Answer:",
}


def story(tokenizer: Tokenizer) -> list[int]:
    """2,500 tokens to cut prompts from: two parts that do not begin alike share no block."""
    return list(tokenizer.encode("".join(_STORY.format(n=n, m=n * 37 % 101, k=n * 53 % 97) for n in range(1, 60))).ids)


def prompts(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """All of them by name, as token ids."""
    told = story(tokenizer)
    return {
        **{name: tokenizer.encode(text).ids for name, text in _TEXTS.items()},
        **{name: told[:300] + tokenizer.encode(text).ids for name, text in _QUESTIONS.items()},
        "1500 tokens": told[50:1550],
        "two whole blocks": told[1000:1064],
        "two blocks and a token": told[900:965],
    }


NAMES = (
    *_TEXTS,
    *_QUESTIONS,
    "1500 tokens",
    "two whole blocks",
    "two blocks and a token",
)

EIGHT = ("short", "chat", "code", "greek", "emoji", "prefix, first", "prefix, second", "1500 tokens")
"""To be asked at once."""
