"""Texts built token by token equal texts decoded at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engines.sim.tokenizer import builtin_tokenizer_json
from services.frontend.detokenizer import Detokenizer, TableDetokenizer, TokenTable, WindowDetokenizer

BROKEN = "\ufffd"


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer.from_str(builtin_tokenizer_json())
    tokenizer.add_tokens(["<tool>", " grüße ", "日本"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral have it: words behind "▁", bytes for what has no word."""
    words = ["▁the", "▁", "a", "é", "日", "▁▁", "x▁y"]
    vocabulary = {"<unk>": 0, "<s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    vocabulary |= {word: 258 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("<s>", special=True)])
    return tokenizer


def metaspace() -> Tokenizer:
    vocabulary = [("<unk>", 0.0), ("▁the", -1.0), ("▁", -2.0), ("s", -2.0), ("▁é", -3.0)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def table_of(tokenizer: Tokenizer) -> TokenTable:
    table = TokenTable.of(tokenizer)
    assert table is not None
    return table


def pieces_of(detokenizer: Detokenizer, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    pieces, start = [], 0
    for size in [*cuts, len(ids)]:
        pieces.append(detokenizer.feed(ids[start : start + size]))
        start += size
    return [*pieces, detokenizer.finish()]


BYTE_LEVEL = byte_level()
BYTE_LEVEL_TABLE = table_of(BYTE_LEVEL)
any_ids = st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=60)
byte_heavy_ids = st.lists(st.integers(0, 255), max_size=60)
any_cuts = st.lists(st.integers(0, 5), max_size=40)


@given(any_ids | byte_heavy_ids, any_cuts)
def test_any_byte_level_tokens_in_any_pieces_give_the_text_of_decoding_them_at_once(
    ids: list[int], cuts: list[int]
) -> None:
    text = "".join(pieces_of(TableDetokenizer(BYTE_LEVEL_TABLE), ids, cuts))
    assert text == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=40), any_cuts)
def test_no_piece_of_a_valid_text_ever_has_a_broken_character(text: str, cuts: list[int]) -> None:
    text = text.replace(BROKEN, "")
    ids = BYTE_LEVEL.encode(text).ids
    pieces = pieces_of(TableDetokenizer(BYTE_LEVEL_TABLE), ids, cuts)
    assert BROKEN not in "".join(pieces)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids)


def test_an_emoji_appears_whole_with_its_last_byte_and_not_before() -> None:
    ids = BYTE_LEVEL.encode("👋").ids
    detokenizer = TableDetokenizer(BYTE_LEVEL_TABLE)
    assert [detokenizer.feed([token_id]) for token_id in ids] == ["", "", "", "👋"]
    assert detokenizer.finish() == ""


def test_a_character_cut_off_by_the_end_is_shown_as_one_broken_character() -> None:
    detokenizer = TableDetokenizer(BYTE_LEVEL_TABLE)
    assert detokenizer.feed(BYTE_LEVEL.encode("a👋").ids[:-1]) == "a"
    assert detokenizer.finish() == BROKEN


def test_special_tokens_and_ids_outside_the_vocabulary_have_no_text() -> None:
    ids = [*BYTE_LEVEL.encode(" the").ids, BYTE_LEVEL.token_to_id("<|im_end|>"), 10_000_000]
    assert TableDetokenizer(BYTE_LEVEL_TABLE).feed(ids) == " the"
    assert TableDetokenizer(BYTE_LEVEL_TABLE).feed([10_000_000]) == ""


@pytest.mark.parametrize("make", [byte_fallback, metaspace])
def test_other_families_decode_as_their_tokenizer_does(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    table = table_of(tokenizer)
    assert table.matches(tokenizer, ["the the", " the  thes", "é日👋 the"])
    assert table.strips_space


@given(st.text(alphabet="a é日👋\u0301the", max_size=20), any_cuts)
def test_a_text_in_fallback_bytes_comes_out_whole(text: str, cuts: list[int]) -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.encode(text).ids
    pieces = pieces_of(TableDetokenizer(table_of(tokenizer)), ids, cuts)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert BROKEN not in "".join(pieces)


def test_a_decoder_of_another_kind_has_no_table() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    assert TokenTable.of(tokenizer) is None
    assert "".join(pieces_of(WindowDetokenizer(tokenizer), [1, 2, 1], [1, 1])) == "playing play"


def test_a_table_that_disagrees_with_its_tokenizer_is_noticed() -> None:
    table = table_of(BYTE_LEVEL)
    table.pieces[BYTE_LEVEL.token_to_id("Ġthe")] = " teh"
    assert not table.matches(BYTE_LEVEL, ["see the sea"])


@given(st.text(max_size=30).filter(lambda text: BROKEN not in text), any_cuts)
def test_the_window_gives_the_same_text_as_the_table(text: str, cuts: list[int]) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    assert "".join(pieces_of(WindowDetokenizer(BYTE_LEVEL), ids, cuts)) == BYTE_LEVEL.decode(ids)
