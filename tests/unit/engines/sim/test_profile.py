from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.errors import SettingsError
from engines.sim.config import SimConfig
from engines.sim.profile import profile, profile_names


def test_every_profile_that_comes_with_us_can_be_read_and_names_its_source() -> None:
    assert SimConfig().profile in profile_names()
    assert all(profile(name).source for name in profile_names())


def test_a_file_of_ones_own_is_a_profile(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("step_us = 1\nprefill_us = 2.5\ndecode_us = 3\ncontext_us = 0.004\n")
    mine = profile(str(file))
    assert mine.step_ps(10, 0, 2, 1000) == 1_000_000 + 25_000_000 + 6_000_000 + 4_000_000


def test_an_unknown_profile_is_refused_with_those_there_are() -> None:
    with pytest.raises(SettingsError, match="h100-8b"):
        profile("abacus")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("step_us = ", "is not TOML"),
        ("step_us = 1", "lacks prefill_us, decode_us, context_us"),
        ("step_us = 1\nprefill_us = 1\ndecode_us = 1\ncontext_us = 1\nstep_ms = 1", "step_ms"),
        ("step_us = 1\nprefill_us = '1'\ndecode_us = 1\ncontext_us = 1", "prefill_us = '1'"),
        ("step_us = 1\nprefill_us = -1\ndecode_us = 1\ncontext_us = 1", "prefill_us is -1"),
        ("step_us = 0\nprefill_us = 1\ndecode_us = 1\ncontext_us = 1", "more than 0"),
        ("step_us = 1\nprefill_us = 1\ndecode_us = 1\ncontext_us = 1\nkv_tokens = 0", "kv_tokens is 0"),
    ],
)
def test_a_bad_profile_is_refused_with_what_is_wrong(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=complaint):
        profile(str(file))


def test_a_profile_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        profile(str(tmp_path / "none.toml"))
