from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import SettingsError
from controlplane.settings import CommonSettings, Loaded, as_env, load, setting


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    policy: str = setting("lmetric", "how to choose", choices=("lmetric", "round_robin"))
    grpc_port: int = setting(0, "shares its name with a common one", minimum=0)
    weight: float = setting(1.0, "100% of it", minimum=0, maximum=2)
    sticky: bool = setting(True, "stay")
    pin: str | None = setting(None, "one instance")
    limit: int | None = setting(None, "at most", minimum=1)
    token: str = setting("", "who we are", secret=True)
    models: tuple[str, ...] = setting((), "which")


SECTIONS = {"common": CommonSettings, "router": RouterSettings}


def loaded(*argv: str, **env: str) -> Loaded:
    return load(SECTIONS, argv, env, prog="tokenmill router")


def router(*argv: str, **env: str) -> RouterSettings:
    return loaded(*argv, **env).get(RouterSettings)


def refusal(*argv: str, **env: str) -> SettingsError:
    with pytest.raises(SettingsError) as refused:
        loaded(*argv, **env)
    return refused.value


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text('[common]\ndeployment = "a"\nnats = "a"\netcd = "a"\n[router]\nweight = 1')
    got = loaded("--etcd", "c", "--config", str(file), TOKENMILL_NATS="b", TOKENMILL_ETCD="b")
    common = got.get(CommonSettings)
    assert (common.deployment, common.nats, common.etcd, common.bind) == ("a", "b", "c", "127.0.0.1")
    assert got.sources["common.deployment"] == f"file {file}"
    assert got.sources["common.nats"] == "environment TOKENMILL_NATS"
    assert got.sources["common.etcd"] == "flag --etcd"
    assert got.sources["common.bind"] == "default"
    assert isinstance(got.get(RouterSettings).weight, float)


def test_the_file_can_be_named_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text('[router]\nmodels = ["a", "b"]\n[common.labels]\nrack = "7"')
    got = loaded(TOKENMILL_CONFIG=str(file))
    assert got.get(RouterSettings).models == ("a", "b")
    assert got.get(CommonSettings).labels == {"rack": "7"}


def test_every_type_reads_from_a_text() -> None:
    got = router("--no-sticky", "--pin=x", "--limit=3", "--models=a, b", TOKENMILL_ROUTER_WEIGHT="0.5")
    assert got == RouterSettings(sticky=False, pin="x", limit=3, models=("a", "b"), weight=0.5)
    assert router("--sticky", TOKENMILL_ROUTER_STICKY="no").sticky
    assert router(TOKENMILL_ROUTER_PIN="").pin is None
    assert loaded("--labels", "a=1,b=x=y").get(CommonSettings).labels == {"a": "1", "b": "x=y"}


def test_a_field_name_shared_by_two_sections_gets_a_flag_with_the_section() -> None:
    got = loaded("--grpc-port", "1", "--router-grpc-port", "2")
    assert (got.get(CommonSettings).grpc_port, got.get(RouterSettings).grpc_port) == (1, 2)


@pytest.mark.parametrize(
    ("argv", "env", "named"),
    [
        (["--polcy", "x"], {}, "--policy"),
        (["--grpcport=1"], {}, "--grpc-port"),
        ([], {"TOKENMILL_ROUTER_POLICI": "x"}, "TOKENMILL_ROUTER_POLICY"),
        ([], {"TOKENMILL_DEPLOYMEN": "x"}, "TOKENMILL_DEPLOYMENT"),
        ([], {"TOKENMILL_FRONTED_PORT": "1"}, "TOKENMILL_FRONTEND_*"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(
    argv: list[str], env: dict[str, str], named: str
) -> None:
    assert refusal(*argv, **env).message.endswith(f"nearest known name is {named}")


@pytest.mark.parametrize(
    ("text", "named"),
    [("[router]\npolicey = 'x'", "router.policy"), ("[ruter]\n", "[router]"), ("deployment = 'x'", "nearest known")],
)
def test_an_unknown_key_in_the_file_is_refused_with_the_nearest_known_one(
    text: str, named: str, tmp_path: Path
) -> None:
    (tmp_path / "t.toml").write_text(text)
    assert named in refusal("--config", str(tmp_path / "t.toml")).message


def test_what_belongs_to_a_section_of_another_program_is_left_to_it(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text("[frontend]\nport = 1\nwhatever = 2")
    loaded("--config", str(file), TOKENMILL_FRONTEND_PORT="x", PATH="/bin")


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--policy", "best"], "router.policy = 'best' (from flag --policy) must be one of: lmetric, round_robin"),
        (["--weight", "3"], "must be at most 2"),
        (["--weight", "-1"], "must be at least 0"),
        (["--weight", "nan"], "must be a number"),
        (["--limit", "1.5"], "must be a whole number"),
        (["--labels", "a"], "must be a table"),
        (["--deployment", "a.b"], "letters, digits"),
        (["--deployment", ""], "must not be empty"),
        (["--policy"], "expected one argument"),
        (["stray"], "unexpected argument 'stray'"),
        (["--config", "/nowhere"], "cannot read the settings file /nowhere: No such file"),
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_what_it_must_be(argv: list[str], why: str) -> None:
    assert why in refusal(*argv).message


@pytest.mark.parametrize("text", ["[router]\nlimit = true", "[router]\npolicy = 1", "router = 3", "[router", "\xff"])
def test_a_file_of_the_wrong_shape_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_bytes(text.encode("latin-1"))
    refusal("--config", str(tmp_path / "t.toml"))


def test_a_secret_is_never_shown() -> None:
    got = loaded("--token", "hunter2")
    assert got.get(RouterSettings).token == "hunter2"
    assert "hunter2" not in str(got.shown)
    assert "***" in {one.value for one in got.shown}


def test_help_lists_every_setting_with_its_default_and_environment_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        loaded("--help")
    assert ended.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "--policy lmetric|round_robin how to choose [default lmetric, env TOKENMILL_ROUTER_POLICY]" in printed
    assert "100% of it" in printed


texts = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1)


@given(
    st.builds(
        RouterSettings,
        policy=st.sampled_from(["lmetric", "round_robin"]),
        grpc_port=st.integers(0),
        weight=st.floats(0, 2),
        sticky=st.booleans(),
        pin=st.none() | texts,
        limit=st.none() | st.integers(1),
        token=texts,
        models=st.lists(texts).map(tuple),
    )
)
def test_settings_given_to_a_child_by_its_environment_arrive_unchanged(settings: RouterSettings) -> None:
    assert router(**as_env("router", settings)) == settings


def test_the_advertised_host_is_one_that_others_can_reach() -> None:
    assert CommonSettings().advertised_host == "127.0.0.1"
    assert CommonSettings(bind="0.0.0.0").advertised_host not in ("0.0.0.0", "")
    assert CommonSettings(bind="0.0.0.0", advertise="node7").advertised_host == "node7"
