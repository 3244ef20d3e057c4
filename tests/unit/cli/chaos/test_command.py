"""What is refused before anything starts."""

import pytest

from cli.chaos.command import main
from controlplane.errors import SettingsError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "vllm"], "--scenario real-model"),
        (["--scenario", "real-model", "--engine", "sim"], "--scenario real-model"),
        (["--model", "/models/m"], "without a --model"),
        (["--decodes", "2"], "--decode"),
        (["--faults", "kil-decode"], "kill-decode"),
        (["--scenario", "decode-kill", "--faults", "mute-decode"], "none to choose from"),
        (["--frontends", "1", "--faults", "kill-frontend"], "none to choose from"),
    ],
)
def test_what_cannot_be_run_is_refused_with_what_can(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("chaos")
    monkeypatch.setenv("TMPDIR", str(folder))
    with pytest.raises(SettingsError, match=message):
        main(arguments)
    assert list(folder.iterdir()) == []
