"""The built-in tokenizer: a small byte-level BPE for a simulated model, made here rather than shipped as a file.

Every text encodes: 256 byte tokens come first. Then, for each common English word, the token " word" with its leading
space, and the prefixes that lead to it (" t", " th", " the"). All merges grow a token that begins with a space, so a
word's encoding is the longest such prefix and then bytes. Special tokens for chat come last.
"""

from __future__ import annotations

import json
from functools import cache

__all__ = [
    "BUILTIN_CHAT_TEMPLATE",
    "BUILTIN_EOS_TOKEN_ID",
    "BUILTIN_TOKENIZER",
    "BUILTIN_VOCAB_SIZE",
    "builtin_tokenizer_json",
    "builtin_word_token_ids",
]

BUILTIN_TOKENIZER = "builtin"
"""What `EngineInfo.tokenizer` and `ModelCard.tokenizer` say where this one is meant."""

BUILTIN_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_WORDS = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which one
you were her all she there would their we him been has when who will more no if out so said what up its about into
than them can only other new some could time these two may then do first any my now such like our over man me even
most made after also did many before must through back years where much your way well down should because each just
those people how too little state good very make world still own see men work long get here between both life being
under never day same another know while last might us great old year off come since against go came right used take
three states himself few house use during without again place around however home small found thought went say part
once general high upon school every does got united left number course war until always away something fact though
water less public put think almost hand enough far took head yet government system better set told nothing night end
why called eyes find going look asked later knew point next program city business give group toward young days let
room word within side social given present several order national possible rather second face per among form
important often things looked early white case big become large need best felt along god four church ever least
power light seen family interest want members others mind country area done turned although open service certain
kind problem began different door thus help sense means whole matter child idea morning river garden letter story
music number question answer reason voice moment quiet bright simple clear
"""


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte: byte-level BPE works on text, and control bytes are none."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


@cache
def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    alphabet = _byte_alphabet()
    vocab = {token: i for i, token in enumerate(alphabet)}
    merges = []
    for word in _WORDS.split():
        token = alphabet[ord(" ")]
        for letter in word:
            if token + letter not in vocab:
                merges.append((token, letter))
                vocab[token + letter] = len(vocab)
            token += letter
    return vocab, merges


BUILTIN_VOCAB_SIZE = len(_vocabulary()[0]) + len(_SPECIAL_TOKENS)
BUILTIN_EOS_TOKEN_ID = BUILTIN_VOCAB_SIZE - 1
"""<|im_end|>."""


def builtin_word_token_ids() -> list[int]:
    """The tokens that are whole words with their leading space, ascending."""
    vocab, _ = _vocabulary()
    space = _byte_alphabet()[ord(" ")]
    return sorted({vocab[space + word] for word in _WORDS.split()})


def builtin_tokenizer_json() -> str:
    """The tokenizer as Hugging Face's tokenizer.json."""
    vocab, merges = _vocabulary()
    special = [
        {
            "id": len(vocab) + i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, token in enumerate(_SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
    }
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": special,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": model,
        }
    )
