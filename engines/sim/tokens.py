"""What a simulated model says: words that look chosen at random, each a function of all tokens before it.

    next token = words[xxh3_64(all tokens before it as u32 LE, seed) mod number of words]

So an answer does not depend on batching, chunking or preemption, goes on exactly where it broke off when prompt and
emitted tokens are sent elsewhere, and differs as soon as any token before it differs, as a real model's would. xxh3
is a streaming hash: a token costs one update, whatever the length.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from xxhash import xxh3_64

from controlplane.errors import SettingsError
from engines.sim.tokenizer import (
    BUILTIN_EOS_TOKEN_ID,
    BUILTIN_TOKENIZER,
    BUILTIN_VOCAB_SIZE,
    builtin_word_token_ids,
)

__all__ = ["TokenSource", "Vocabulary", "builtin_vocabulary", "load_vocabulary"]

_FEWEST_WORDS = 16


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens a simulated model may say."""

    tokenizer: str
    """As in `EngineInfo.tokenizer`."""
    identity: bytes
    """Differs between tokenizers."""
    size: int
    words: tuple[int, ...]
    eos_token_ids: tuple[int, ...]


def builtin_vocabulary() -> Vocabulary:
    """Of the built-in tokenizer."""
    words = tuple(builtin_word_token_ids())
    return Vocabulary(BUILTIN_TOKENIZER, b"builtin", BUILTIN_VOCAB_SIZE, words, (BUILTIN_EOS_TOKEN_ID,))


def load_vocabulary(directory: Path) -> Vocabulary:
    """Of a model's directory. Raises `SettingsError` when it holds no tokenizer.json."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise SettingsError(f"model {directory} has no tokenizer.json; name a directory that has one", param="model")
    tokenizer = Tokenizer.from_file(str(path))
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    vocab = {token_id: text for text, token_id in tokenizer.get_vocab().items() if token_id not in special}
    words = [i for i, text in vocab.items() if text[0] in "Ġ▁" and text[1:].isascii() and text[1:].isalpha()]
    if len(words) < _FEWEST_WORDS:
        words = list(vocab)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    identity = xxh3_64(path.read_bytes()).digest()
    return Vocabulary(str(directory), identity, size, tuple(sorted(words)), _eos_token_ids(directory))


def _eos_token_ids(directory: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        eos = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if eos is not None:
            return (eos,) if isinstance(eos, int) else tuple(eos)
    return ()


class TokenSource:
    """One sequence's tokens to come."""

    __slots__ = ("_answer_tokens", "_eos", "_update", "_value", "_words")

    def __init__(self, vocabulary: Vocabulary, prompt: array[int], seed: int, answer_tokens: int) -> None:
        state = xxh3_64(prompt.tobytes(), seed & 0xFFFF_FFFF_FFFF_FFFF)
        self._update = state.update
        self._value = state.intdigest
        self._words = vocabulary.words
        self._eos = vocabulary.eos_token_ids[0] if vocabulary.eos_token_ids else None
        self._answer_tokens = answer_tokens if self._eos is not None else 0
        """Mean length of an answer; 0: it does not end by itself."""

    def next(self, may_end: bool, avoid: Collection[int] = ()) -> int:
        """The next token: the end token only if it `may_end`, never one of `avoid`."""
        value = self._value()
        words = self._words
        token = words[value % len(words)]
        if self._answer_tokens and may_end and (value >> 32) % self._answer_tokens == 0 and self._eos is not None:
            token = self._eos
        elif avoid:
            token = next((t for i in range(len(words)) if (t := words[(value + i) % len(words)]) not in avoid), token)
        self._update(token.to_bytes(4, "little"))
        return token
