"""Turns a GGUF file of the llama architecture into a model directory that transformers and vLLM load.

transformers can read such a file but not save it. Weights are written as float32, whatever the file holds, so that
two engines can be compared token by token.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

__all__ = ["convert"]

_CONTROL = 3
"""`tokenizer.ggml.token_type` of a special token."""

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, dest: Path, on_progress: Callable[[float], None]) -> None:
    """Writes config, tokenizer, chat template and weights into `dest`, which exists. `on_progress` gets 0 to 1."""
    from gguf import GGUFReader

    reader = GGUFReader(source)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    for name, content in _describe(metadata).items():
        (dest / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _write_tokenizer(metadata, dest / "tokenizer.json")
    _write_weights(reader, metadata, dest / "model.safetensors", on_progress)


def _describe(metadata: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The JSON files beside weights and tokenizer, by name."""
    tokens = metadata["tokenizer.ggml.tokens"]
    bos, eos = metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    pad, unknown = metadata["tokenizer.ggml.padding_token_id"], metadata["tokenizer.ggml.unknown_token_id"]
    special = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    return {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "hidden_size": metadata["llama.embedding_length"],
            "intermediate_size": metadata["llama.feed_forward_length"],
            "max_position_embeddings": metadata["llama.context_length"],
            "num_attention_heads": metadata["llama.attention.head_count"],
            "num_hidden_layers": metadata["llama.block_count"],
            "num_key_value_heads": metadata["llama.attention.head_count_kv"],
            # Stored as a float32; seven digits give back what was meant.
            "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.7g}"),
            "rope_theta": metadata["llama.rope.freq_base"],
            "vocab_size": metadata["llama.vocab_size"],
            **special,
        },
        "generation_config.json": special,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": metadata["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "bos_token": tokens[bos],
            "eos_token": tokens[eos],
            "pad_token": tokens[pad],
            "unk_token": tokens[unknown],
            "chat_template": metadata["tokenizer.chat_template"],
        },
    }


def _write_tokenizer(metadata: dict[str, Any], path: Path) -> None:
    """A byte-level BPE that splits numbers into digits: what `tokenizer.ggml.pre` calls "smollm"."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if (kind := metadata["tokenizer.ggml.pre"]) != "smollm":
        raise ValueError(f"pre-tokenizer {kind!r} is not known here; only 'smollm' is")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _CONTROL
        ]
    )
    tokenizer.save(str(path))


def _write_weights(
    reader: GGUFReader, metadata: dict[str, Any], path: Path, on_progress: Callable[[float], None]
) -> None:
    from gguf import dequantize
    from safetensors.numpy import save_file

    heads = {"attn_q": metadata["llama.attention.head_count"], "attn_k": metadata["llama.attention.head_count_kv"]}
    weights: dict[str, np.ndarray[Any, Any]] = {}
    for i, tensor in enumerate(reader.tensors):
        prefix, part, kind = _split(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type)
        weights[f"{prefix}{_NAMES[part]}.{kind}"] = _unpermute(values, heads[part]) if part in heads else values
        on_progress(0.8 * (i + 1) / len(reader.tensors))
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it private; it is no secret, and a container's user may be another
    on_progress(1.0)


def _split(name: str) -> tuple[str, str, str]:
    """ "blk.3.attn_q.weight" is ("model.layers.3.", "attn_q", "weight")."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.", parts[2], parts[3]
    return "", parts[0], parts[1]


def _unpermute(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undoes llama.cpp's order of rows, which pairs a head's rotary halves next to each other."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns).copy()
