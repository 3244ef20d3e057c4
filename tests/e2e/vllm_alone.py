"""What vLLM by itself answers, without a line of ours: `python vllm_alone.py MODEL PROMPTS ANSWERS`, files of JSON.

PROMPTS maps a name to token ids; ANSWERS maps it to those of a greedy answer and to how clear the choice of each was.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

__all__ = ["ANSWER_TOKENS"]

ANSWER_TOKENS = 16


def main(model: str, prompts_file: str, answers_file: str) -> None:
    from vllm import LLM, SamplingParams

    prompts: dict[str, list[int]] = json.loads(Path(prompts_file).read_text())
    llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=2048, kv_cache_memory_bytes=256 << 20)
    greedy = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True, logprobs=2, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts.values()], greedy, use_tqdm=False)
    answers = {}
    for name, output in zip(prompts, outputs, strict=True):
        (answer,) = output.outputs
        best = [sorted((each.logprob for each in step.values()), reverse=True) for step in answer.logprobs or ()]
        answers[name] = {"tokens": list(answer.token_ids), "margin": min(first - second for first, second, *_ in best)}
    Path(answers_file).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
