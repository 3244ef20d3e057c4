from __future__ import annotations

from typing import Any

import pytest

from controlplane.errors import SettingsError
from engines.sim.config import SimConfig


def test_the_defaults_work_together() -> None:
    SimConfig()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("max_num_seqs", -1),
        ("lease_s", 0.0),
        ("read_timeout_s", float("inf")),
        ("time_scale", float("nan")),
        ("time_scale", -1.0),
        ("kv_bytes_per_block", 12),
        ("answer_tokens", -1),
        ("max_model_len", 1_000_000),
        ("fault", "explode"),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=field) as refused:
        SimConfig(**{field: value})
    assert refused.value.param == field
