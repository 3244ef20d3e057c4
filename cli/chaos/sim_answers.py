"""The right answers of the simulated engine, computed beside it. Pure."""

from __future__ import annotations

from array import array

from tokenizers import Tokenizer

from cli.chaos.asks import Ask, Face
from cli.chaos.checker import Expected
from engines.sim.tokenizer import builtin_tokenizer_json
from engines.sim.tokens import TokenSource, builtin_vocabulary

__all__ = ["SimAnswers"]


class SimAnswers:
    """Tokens follow from the prompt's by the engine's rule; text and counts are the plain tokenizer's."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._tokenizer = Tokenizer.from_str(builtin_tokenizer_json())
        self._vocabulary = builtin_vocabulary()

    def expected(self, ask: Ask) -> Expected:
        """The answer to this question."""
        prompt = ask.prompt
        if ask.face in (Face.CHAT, Face.GRPC_CHAT):
            prompt = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        prompt_ids = array("I", self._tokenizer.encode(prompt, add_special_tokens=False).ids)
        source = TokenSource(self._vocabulary, prompt_ids, self._seed, answer_tokens=0)
        answer = [source.next(may_end=False) for _ in range(ask.max_tokens)]
        return Expected(self._tokenizer.decode(answer), len(prompt_ids), len(answer))
