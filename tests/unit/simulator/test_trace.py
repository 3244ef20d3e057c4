from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.errors import SettingsError
from simulator.trace import Arrival, block_hashes, read_trace, spread

from .traces import mooncake, write_mooncake

ROW = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}'
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"


def test_mooncake_rows_become_arrivals_by_time(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"timestamp": 5000, "input_length": 513, "output_length": 2, "hash_ids": [7, 8]},
        {"timestamp": 2000, "input_length": 512, "output_length": 1, "hash_ids": [7]},
    ]
    assert read_trace(write_mooncake(tmp_path / "trace.jsonl", rows)) == [
        Arrival(1, 0.0, 512, 1, (7,)),
        Arrival(0, 3.0, 513, 2, (7, 8)),
    ]


def test_azure_rows_become_arrivals_without_prefixes(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(f"{HEAD}\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0299600,3180,8\n")
    first, second = read_trace(file)
    assert (first.prompt_tokens, first.output_tokens, first.hash_ids) == (4808, 10, ())
    assert second.at_s == pytest.approx(0.05)


def test_a_limit_takes_the_first_requests_only(tmp_path: Path) -> None:
    assert len(read_trace(write_mooncake(tmp_path / "trace.jsonl", mooncake(20)), limit=5)) == 5


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.jsonl", f"{ROW}\n\n{{", "a.jsonl, line 3: "),
        ("a.jsonl", ROW.replace("600", '"600"'), "line 1: Expected `int`, got `str` - at `\\$.input_length`"),
        ("a.jsonl", ROW.replace(', "hash_ids": [0, 1]', ""), "line 1: .*hash_ids"),
        ("a.jsonl", ROW.replace("[0, 1]", "[0]"), "line 1: 1 hash_ids for an input_length of 600; it takes 2"),
        ("a.jsonl", ROW.replace("[0, 1]", "[0, -1]"), "line 1: a hash id is not"),
        ("a.jsonl", ROW.replace("600", "0"), "line 1: input_length is 0"),
        ("a.jsonl", ROW.replace(": 5,", ": 0,"), "line 1: output_length is 0"),
        ("a.jsonl", ROW.replace("0,", "-1,", 1), "line 1: timestamp is -1"),
        ("a.jsonl", "", "has no requests"),
        ("a.csv", f"{HEAD}\n2023-11-16 18:17:03,4808\n", "a.csv, line 2: 2 values"),
        ("a.csv", f"{HEAD}\n\nyesterday,4808,10\n", "line 3: Invalid isoformat"),
        ("a.csv", f"{HEAD}\n2023-11-16 18:17:03,many,10\n", "line 2: .*'many'"),
        ("a.csv", f"{HEAD}\n2023-11-16 18:17:03,4808,0\n", "line 2: GeneratedTokens is 0"),
        ("a.csv", "time,tokens\n1,2\n", "line 1: the columns are time, tokens"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused_with_its_line(
    tmp_path: Path, name: str, text: str, complaint: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(SettingsError, match=complaint):
        read_trace(file)


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")


def test_arrivals_of_a_coarse_clock_are_spread_over_its_ticks_by_the_seed(tmp_path: Path) -> None:
    arrivals = read_trace(write_mooncake(tmp_path / "trace.jsonl", mooncake(200, tick_ms=3000)))
    moved = spread(arrivals, seed=1)
    assert len({one.at_s for one in moved}) == len(moved)
    came = {one.number: one.at_s for one in arrivals}
    assert all(0 <= one.at_s - came[one.number] < 3 for one in moved)
    assert moved == sorted(moved, key=lambda one: one.at_s)
    assert moved == spread(arrivals, seed=1) != spread(arrivals, seed=2)


def test_arrivals_of_a_fine_clock_stay_where_they_are_and_speed_draws_them_together(tmp_path: Path) -> None:
    arrivals = read_trace(write_mooncake(tmp_path / "trace.jsonl", mooncake(50)))
    assert spread(arrivals, seed=1) == arrivals
    assert [one.at_s for one in spread(arrivals, seed=1, speed=2.0)] == [one.at_s / 2 for one in arrivals]


@pytest.mark.parametrize("block_size", [512, 16])
def test_prompts_share_the_hashes_of_their_equal_full_blocks_and_no_others(block_size: int) -> None:
    one = block_hashes(Arrival(0, 0.0, 1500, 1, (1, 2, 3)), block_size)
    other = block_hashes(Arrival(1, 0.0, 2100, 1, (1, 2, 4, 5, 6)), block_size)
    assert len(one) == 1500 // block_size
    assert len(set(one)) == len(one)
    shared = 1024 // block_size
    assert one[:shared] == other[:shared]
    assert not set(one[shared:]) & set(other[shared:])


def test_equal_ids_after_different_ones_are_different_prefixes() -> None:
    one = block_hashes(Arrival(0, 0.0, 1024, 1, (1, 3)), 512)
    other = block_hashes(Arrival(1, 0.0, 1024, 1, (2, 3)), 512)
    assert not set(one) & set(other)


def test_prompts_without_ids_share_nothing() -> None:
    one, other = (block_hashes(Arrival(number, 0.0, 4096, 1), 512) for number in (0, 1))
    assert len(one) == 8
    assert not set(one) & set(other)
