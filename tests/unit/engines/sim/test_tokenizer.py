from __future__ import annotations

import fastokens
import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engines.sim.tokenizer import (
    BUILTIN_CHAT_TEMPLATE,
    BUILTIN_EOS_TOKEN_ID,
    BUILTIN_VOCAB_SIZE,
    builtin_tokenizer_json,
    builtin_word_token_ids,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(builtin_tokenizer_json())


@given(text=st.text())
def test_every_text_comes_back_as_it_was(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_common_word_is_one_token_and_begins_with_its_space(tokenizer: Tokenizer) -> None:
    for token in builtin_word_token_ids():
        text = tokenizer.decode([token])
        assert text.startswith(" ")
        assert text[1:].isalpha()
        assert tokenizer.encode(text).ids == [token]


def test_a_word_that_begins_another_does_not_hide_it(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(" the then these thermometer").ids) == 3 + len(" thermometer") - len(" the")


def test_the_vocabulary_is_dense_and_the_end_token_is_special(tokenizer: Tokenizer) -> None:
    assert sorted(tokenizer.get_vocab(with_added_tokens=True).values()) == list(range(BUILTIN_VOCAB_SIZE))
    assert tokenizer.id_to_token(BUILTIN_EOS_TOKEN_ID) == "<|im_end|>"
    assert tokenizer.decode([BUILTIN_EOS_TOKEN_ID]) == ""


def test_a_chat_is_rendered_with_one_token_for_each_mark(tokenizer: Tokenizer) -> None:
    text = jinja2.Template(BUILTIN_CHAT_TEMPLATE).render(
        messages=[{"role": "user", "content": "hello"}], add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(text).ids.count(BUILTIN_EOS_TOKEN_ID) == 1


@pytest.fixture(scope="module")
def fast() -> fastokens.Tokenizer:
    return fastokens.Tokenizer.from_json_str(builtin_tokenizer_json())


@given(text=st.text())
def test_fastokens_encodes_it_the_same(tokenizer: Tokenizer, fast: fastokens.Tokenizer, text: str) -> None:
    assert list(fast.encode(text).ids) == tokenizer.encode(text).ids
