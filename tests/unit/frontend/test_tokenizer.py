"""The tokenizer's two encoders agree."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models, pre_tokenizers

from controlplane.errors import SettingsError
from engines.sim.tokenizer import builtin_tokenizer_json
from services.frontend.tokenizer import Tokenizer

BUILTIN = Tokenizer.load("builtin")
REFERENCE = HfTokenizer.from_str(builtin_tokenizer_json())


def test_the_built_in_tokenizer_takes_the_fast_ways() -> None:
    assert (BUILTIN.encodes_with, BUILTIN.decodes_with) == ("fastokens", "table")


@given(st.text(max_size=80), st.booleans())
def test_any_text_encodes_as_the_reference_does(text: str, special: bool) -> None:
    assert (
        list(BUILTIN.encode(text, add_special_tokens=special)) == REFERENCE.encode(text, add_special_tokens=special).ids
    )


def test_a_tokenizer_that_fastokens_cannot_load_is_served_by_tokenizers() -> None:
    source = HfTokenizer(models.WordLevel({"[UNK]": 0, "hello": 1}, unk_token="[UNK]"))
    source.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(source.to_str())
    assert tokenizer.encodes_with.startswith("tokenizers (")
    assert list(tokenizer.encode("hello there", add_special_tokens=False)) == [1, 0]
    assert tokenizer.decodes_with == "window"
    assert tokenizer.detokenizer().feed([1]) == "hello"


def test_what_the_fast_encoder_gives_up_on_is_encoded_all_the_same() -> None:
    source = HfTokenizer(models.BPE({byte: i for i, byte in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    bytes_of_it = pre_tokenizers.ByteLevel(add_prefix_space=False)
    source.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_of_it])
    tokenizer = Tokenizer(source.to_str())
    assert tokenizer.encodes_with == "fastokens"
    assert len(tokenizer.encode(" " * 1_000_000, add_special_tokens=False)) == 1_000_000


def test_the_longest_token_is_known() -> None:
    assert BUILTIN.longest_token == max(len(piece) for piece in REFERENCE.get_vocab())


def test_a_token_has_its_own_bytes_also_where_they_are_part_of_a_character() -> None:
    ids = BUILTIN.encode("👋", add_special_tokens=False)
    assert b"".join(map(BUILTIN.token_bytes, ids)) == "👋".encode()
    assert BUILTIN.token_bytes(REFERENCE.token_to_id("<|im_end|>")) == b"<|im_end|>"


def test_a_missing_tokenizer_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"tokenizer\.json"):
        Tokenizer.load(str(tmp_path))


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(str(tmp_path))
