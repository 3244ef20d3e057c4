"""A model's tokenizer: text to token ids, and what the way back needs.

`fastokens` encodes about eight times faster than `tokenizers`. It is used where it gave the same ids for every probe
when the model was loaded; otherwise `tokenizers` does the work, and the log says so.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import fastokens
from tokenizers import Tokenizer as HfTokenizer

from controlplane.errors import SettingsError
from engines.sim.tokenizer import BUILTIN_TOKENIZER, builtin_tokenizer_json
from services.frontend.detokenizer import Detokenizer, TableDetokenizer, TokenTable, WindowDetokenizer

__all__ = ["PROBES", "Tokenizer"]

PROBES = (
    "",
    " ",
    "Hello, world!",
    "  two  spaces,\ttabs\n\nand\r\nlines  ",
    "It's 12,345.678 o'clock; they'll've gone (50%) — \"really\"…",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # ünïcödé\n",
    "Ein Straßenfest in Zürich, ¿qué tal?, naïve café, Ελληνικά, русский язык, עברית, العربية, हिन्दी, ไทย",
    "日本語のテキスト、中文文本，한국어 텍스트",
    "👋🏽👨‍👩‍👧‍👦🇩🇪 e\u0301 \u200b\u00a0\ufeff \ufffd 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    'https://example.com/a?b=c&d=%20#e <b>html</b> {"json": [1, 2.5e-3, null]}',
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "<s> </s> <|endoftext|> <|im_start|>user\nhi<|im_end|>\n<|eot_id|> [INST] x [/INST] <unk>",
)
"""Texts on which two tokenizers that differ are likely to differ."""


class Tokenizer:
    """Of one model. Made in a thread: loading takes up to seconds. Safe to use from several threads afterwards."""

    def __init__(self, tokenizer_json: str) -> None:
        self._hf = HfTokenizer.from_str(tokenizer_json)
        self._hf.no_truncation()
        self._hf.no_padding()
        self.encodes_with, self._fast = self._verified_fast(tokenizer_json)
        """"fastokens", or "tokenizers (why)"."""
        self.longest_token = max(map(len, self._hf.get_vocab()), default=0)
        """In characters as the vocabulary writes them: no token stands for more text than that."""
        table = TokenTable.of(self._hf)
        self._table = table if table is not None and table.matches(self._hf, PROBES) else None

    @classmethod
    def load(cls, source: str) -> Tokenizer:
        """From a directory with tokenizer.json, or the built-in one."""
        if source == BUILTIN_TOKENIZER:
            return cls(builtin_tokenizer_json())
        path = Path(source) / "tokenizer.json"
        try:
            return cls(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingsError(
                f"cannot read {path}: {error.strerror}; the model's directory must be readable here"
            ) from error
        except Exception as error:  # tokenizers raises bare Exception for a file it cannot use
            raise SettingsError(f"{path} is not a tokenizer: {error}") from error

    @property
    def decodes_with(self) -> str:
        """ "table", or "window" for a tokenizer whose decoder is of another kind."""
        return "table" if self._table is not None else "window"

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        """Token ids as u32. Chat templates write their special tokens themselves, so they are not added there."""
        ids = array("I")
        if self._fast is not None:
            try:
                ids.frombytes(self._fast.encode_batch_flat([text], add_special_tokens)[0])
                return ids
            except ValueError:  # its regular expressions run out of stack, over a million spaces for example
                pass
        ids.extend(self._hf.encode(text, add_special_tokens=add_special_tokens).ids)
        return ids

    def detokenizer(self) -> Detokenizer:
        """For one answer."""
        return TableDetokenizer(self._table) if self._table is not None else WindowDetokenizer(self._hf)

    def token_bytes(self, token_id: int) -> bytes:
        """One token's own bytes, a special token's name included; for log probabilities."""
        piece: str | bytes = ""
        if self._table is not None and token_id < len(self._table.pieces):
            piece = self._table.pieces[token_id]
        if not piece:
            piece = self._hf.decode([token_id], skip_special_tokens=False)
        return piece.encode() if isinstance(piece, str) else piece

    def _verified_fast(self, tokenizer_json: str) -> tuple[str, Any]:
        try:
            fast = fastokens.Tokenizer.from_json_str(tokenizer_json)
            fast.no_truncation()
            fast.no_padding()
            for probe in PROBES:
                for special in (False, True):
                    if fast.encode(probe, special).ids != self._hf.encode(probe, add_special_tokens=special).ids:
                        return "tokenizers (fastokens encodes a probe differently)", None
        except Exception as error:  # whatever it cannot do, tokenizers can
            return f"tokenizers (fastokens cannot load this one: {error})", None
        return "fastokens", fast
