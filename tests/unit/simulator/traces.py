"""Small traces, made here."""

from __future__ import annotations

import json
import random
from pathlib import Path

__all__ = ["mooncake", "write_mooncake"]


def mooncake(requests: int, seed: int = 0, *, longest: int = 6000, tick_ms: int = 0) -> list[dict[str, object]]:
    """Conversations whose turns repeat all that was said before, and that begin alike."""
    chance = random.Random(seed)
    talks: list[list[int]] = []
    rows: list[dict[str, object]] = []
    fresh = 1
    for number in range(requests):
        if talks and chance.random() < 0.6:
            talk = chance.choice(talks)
        else:
            talks.append(talk := [0])
        length = chance.randint(1, longest)
        blocks = -(-length // 512)
        del talk[max(1, blocks - 1) :]
        while len(talk) < blocks:
            talk.append(fresh)
            fresh += 1
        at = number * chance.randint(100, 400)
        rows.append(
            {
                "timestamp": at // tick_ms * tick_ms if tick_ms else at,
                "input_length": length,
                "output_length": chance.randint(1, 700),
                "hash_ids": talk[:blocks],
            }
        )
    rows.sort(key=lambda row: row["timestamp"])  # type: ignore[arg-type,return-value]
    return rows


def write_mooncake(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
