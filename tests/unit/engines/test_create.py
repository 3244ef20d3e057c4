from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import pytest

import engines
from controlplane.errors import SettingsError
from engines.settings import EngineSettings
from engines.sim.config import FAULTS, SimConfig
from engines.vllm.config import VllmConfig


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        (EngineSettings(engine="sim", dtype="float32"), "engine.dtype"),
        (EngineSettings(engine="vllm", model="m", sim_time_scale=2.0), "engine.sim_time_scale"),
        (EngineSettings(engine="vllm"), "engine.model"),
        (EngineSettings(engine="sim", sim_total_blocks=1), "max_model_len"),
    ],
)
def test_a_setting_that_the_engine_cannot_take_is_refused_by_name(settings: EngineSettings, param: str) -> None:
    with pytest.raises(SettingsError) as refused:
        engines.check(settings)
    assert refused.value.param == param


def test_good_settings_pass() -> None:
    engines.check(EngineSettings(engine="sim", block_size=32, sim_time_scale=0.0))
    engines.check(EngineSettings(engine="vllm", model="m", dtype="float32"))


@pytest.mark.parametrize(("names", "config"), [(engines._SIM, SimConfig), (engines._VLLM, VllmConfig)])
def test_every_setting_reaches_a_field_of_its_engine(names: dict[str, str], config: type) -> None:
    assert set(names) <= {one.name for one in fields(EngineSettings)}
    assert set(names.values()) <= {one.name for one in fields(config)}


def test_every_setting_belongs_to_some_engine() -> None:
    assert {one.name for one in fields(EngineSettings)} == {"engine", *engines._SIM, *engines._VLLM}


def test_faults_are_those_that_the_engines_know() -> None:
    (fault,) = (one for one in fields(EngineSettings) if one.name == "fault")
    assert fault.metadata["rules"].choices == FAULTS


def test_importing_the_package_imports_no_engine() -> None:
    code = "import engines.settings, sys; sys.exit(any(name in sys.modules for name in ('vllm', 'torch', 'nixl')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
