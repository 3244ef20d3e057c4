from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from xxhash import xxh3_64_intdigest

from controlplane.errors import SettingsError
from engines.sim.tokenizer import BUILTIN_EOS_TOKEN_ID, builtin_tokenizer_json
from engines.sim.tokens import TokenSource, builtin_vocabulary, load_vocabulary

VOCABULARY = builtin_vocabulary()
tokens = st.lists(st.integers(0, VOCABULARY.size - 1), min_size=1, max_size=300)


def answer(prompt: list[int], count: int, seed: int = 0, answer_tokens: int = 0) -> list[int]:
    source = TokenSource(VOCABULARY, array("I", prompt), seed, answer_tokens)
    return [source.next(may_end=True) for _ in range(count)]


@given(prompt=tokens, seed=st.integers(-(2**63), 2**63))
def test_each_token_is_the_documented_function_of_all_before_it(prompt: list[int], seed: int) -> None:
    known = array("I", prompt)
    for token in answer(prompt, 20, seed):
        words = VOCABULARY.words
        assert token == words[xxh3_64_intdigest(known.tobytes(), seed % 2**64) % len(words)]
        known.append(token)


@given(prompt=tokens, emitted=st.integers(0, 40))
def test_an_answer_goes_on_where_it_broke_off(prompt: list[int], emitted: int) -> None:
    whole = answer(prompt, 50)
    assert answer(prompt + whole[:emitted], 50 - emitted) == whole[emitted:]


def test_another_prompt_or_seed_gives_another_answer() -> None:
    assert answer([1, 2, 3], 8) != answer([1, 2, 4], 8)
    assert answer([1, 2, 3], 8, seed=1) != answer([1, 2, 3], 8, seed=2)


def test_it_says_words_and_ends_only_when_told_to() -> None:
    text = Tokenizer.from_str(builtin_tokenizer_json()).decode(answer([5], 500))
    assert all(word.isalpha() for word in text.split())
    assert BUILTIN_EOS_TOKEN_ID not in answer([5], 5000)


def test_answers_have_about_the_mean_length_asked_for() -> None:
    lengths = [answer([i], 2000, answer_tokens=50).index(BUILTIN_EOS_TOKEN_ID) for i in range(400)]
    assert 40 < sum(lengths) / len(lengths) < 60


def test_it_does_not_end_before_it_may_nor_says_what_it_must_avoid() -> None:
    source = TokenSource(VOCABULARY, array("I", [5]), 0, 1)
    avoid = set(VOCABULARY.words[::2])
    said = [source.next(False, avoid) for _ in range(200)]
    assert BUILTIN_EOS_TOKEN_ID not in said
    assert not avoid & set(said)
    assert source.next(True) == BUILTIN_EOS_TOKEN_ID


def test_a_models_own_tokenizer_gives_its_words(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(builtin_tokenizer_json())
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": BUILTIN_EOS_TOKEN_ID}))
    vocabulary = load_vocabulary(tmp_path)
    assert vocabulary.tokenizer == str(tmp_path)
    assert vocabulary.size == VOCABULARY.size
    assert set(vocabulary.words) >= set(VOCABULARY.words)
    assert vocabulary.eos_token_ids == (BUILTIN_EOS_TOKEN_ID,)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"tokenizer\.json"):
        load_vocabulary(tmp_path)
