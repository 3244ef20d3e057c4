"""Token ids to text as they come: never a broken character, and in the end the same text as decoding all at once.

Most tokens are whole UTF-8 by themselves, so their text stands ready in a table; the few that are parts of a character
go through an incremental UTF-8 decoder. `TokenTable.of` knows the two kinds of decoders that language models come with
(byte-level, and byte fallback behind "▁"); `matches` compares the table with the tokenizer itself, and a tokenizer of
another kind is served by `WindowDetokenizer`, which decodes the last few tokens anew each time.
"""

from __future__ import annotations

import codecs
import json
import random
import re
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer as HfTokenizer

__all__ = ["Detokenizer", "TableDetokenizer", "TokenTable", "WindowDetokenizer"]

_BROKEN = "\ufffd"


class Detokenizer(Protocol):
    """The text of one answer, in the order of its tokens."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text these tokens complete; what may still become another character is kept back."""

    def finish(self) -> str:
        """What was kept back: the answer ends here."""


class TokenTable:
    """Token id -> its text, or its bytes where they are no whole characters. Special tokens and holes are empty."""

    __slots__ = ("pieces", "strips_space")

    def __init__(self, pieces: list[str | bytes], strips_space: bool) -> None:
        self.pieces = pieces
        self.strips_space = strips_space
        """One leading space of the answer belongs to the tokenizer, not to the text."""

    @classmethod
    def of(cls, tokenizer: HfTokenizer) -> TokenTable | None:
        """None: a decoder of another kind."""
        decoder = json.loads(tokenizer.to_str())["decoder"] or {}
        steps = decoder.get("decoders", [decoder])
        kinds = {step.get("type") for step in steps}
        special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        if kinds == {"ByteLevel"}:
            to_bytes, strips_space = _byte_level, False
        elif kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and kinds & {"Replace", "Metaspace"}:
            to_bytes = _byte_fallback if "ByteFallback" in kinds else _metaspace
            strips_space = any(
                step["type"] == "Strip" or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
                for step in steps
            )
        else:
            return None
        pieces: list[str | bytes] = [""] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            if token_id not in special:
                pieces[token_id] = _text_if_whole(to_bytes(token))
        return cls(pieces, strips_space)

    def matches(self, tokenizer: HfTokenizer, texts: Sequence[str]) -> bool:
        """Whether it decodes these texts, and random tokens that are whole characters, as the tokenizer does."""
        whole = [token_id for token_id, piece in enumerate(self.pieces) if isinstance(piece, str)]
        chosen = random.Random(0)
        samples = [tokenizer.encode(text).ids for text in texts]
        samples += [chosen.choices(whole, k=32) for _ in range(200)]
        return all(self.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) for ids in samples)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The whole text at once."""
        detokenizer = TableDetokenizer(self)
        return detokenizer.feed(token_ids) + detokenizer.finish()


class TableDetokenizer:
    """One answer over a table."""

    __slots__ = ("_decoder", "_partial", "_pieces", "_strip")

    def __init__(self, table: TokenTable) -> None:
        self._pieces = table.pieces
        self._strip = table.strips_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._partial = False
        """The decoder holds the first bytes of a character."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer`."""
        pieces = self._pieces
        if len(token_ids) == 1 and not self._partial and not self._strip:
            try:
                piece = pieces[token_ids[0]]
            except IndexError:
                return ""
            if piece.__class__ is str:
                return piece
        text = "".join([self._next(pieces[i]) for i in token_ids if i < len(pieces)])
        return self._stripped(text) if self._strip else text

    def finish(self) -> str:
        """See `Detokenizer`."""
        self._partial = False
        text = self._decoder.decode(b"", final=True)
        return self._stripped(text) if self._strip else text

    def _next(self, piece: str | bytes) -> str:
        if isinstance(piece, str):
            if not self._partial:
                return piece
            piece = piece.encode()
        text = self._decoder.decode(piece)
        self._partial = bool(self._decoder.getstate()[0])
        return text

    def _stripped(self, text: str) -> str:
        if text:
            self._strip = False
        return text.removeprefix(" ")


class WindowDetokenizer:
    """One answer over any tokenizer: decodes a window of its last tokens. Slow, and right wherever text only grows.

    The window begins at a border where all text before was whole; what the tokens since then add to the text of those
    before them is new, unless it ends in a broken character, which later tokens may mend.
    """

    __slots__ = ("_context", "_ids", "_new", "_tokenizer")

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0
        """The window's first token."""
        self._new = 0
        """The first token whose text was not given out."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer`."""
        self._ids += token_ids
        text = self._text_since_new()
        if not text or text.endswith(_BROKEN):
            return ""
        self._context, self._new = self._new, len(self._ids)
        return text

    def finish(self) -> str:
        """See `Detokenizer`."""
        text = self._text_since_new()
        self._context = self._new = len(self._ids)
        return text

    def _text_since_new(self) -> str:
        before = self._tokenizer.decode(self._ids[self._context : self._new], skip_special_tokens=True)
        after = self._tokenizer.decode(self._ids[self._context :], skip_special_tokens=True)
        return after[len(before) :]


def _byte_of_stand_in() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, the other way round."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}


_BYTES = _byte_of_stand_in()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level(token: str) -> bytes:
    """A token with a character that stands for no byte (an added token's) is taken as it is written."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else _metaspace(token)


def _metaspace(token: str) -> bytes:
    return token.replace("▁", " ").encode()


def _text_if_whole(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
