"""Chat templates, and what they may and may not do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controlplane.errors import InvalidRequest, SettingsError
from services.frontend.templates import ChatTemplate

HELLO = [{"role": "user", "content": "hello"}]


def test_the_built_in_template_ends_where_the_answer_begins() -> None:
    template = ChatTemplate.load("builtin")
    assert template is not None
    assert template.render(HELLO) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_of_its_own_file_wins_over_the_configuration(tmp_path: Path) -> None:
    config = {"chat_template": "config", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.load(str(tmp_path))
    assert template is not None
    assert template.render(HELLO) == "config"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    template = ChatTemplate.load(str(tmp_path))
    assert template is not None
    assert template.render(HELLO) == "<s>hello</s>"


def test_of_several_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    template = ChatTemplate.load(str(tmp_path))
    assert template is not None
    assert template.render(HELLO) == "plain"


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert ChatTemplate.load(str(tmp_path)) is None


def test_what_transformers_offers_is_there() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{% generation %}!{% endgeneration %}{{ strftime_now('%Y')[:2] }}"
    )
    text = ChatTemplate(source).render([{"role": "user", "content": "<é>"}, {"role": "user", "content": "no"}])
    assert text == '{"role": "user", "content": "<é>"}!20'


def test_a_template_that_refuses_names_its_reason() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate") as refused:
        template.render(HELLO)
    assert refused.value.param == "messages"


def test_a_template_that_breaks_does_not_repeat_the_messages() -> None:
    with pytest.raises(InvalidRequest) as refused:
        ChatTemplate("{{ messages[0].content + 1 }}").render([{"role": "user", "content": "a secret"}])
    assert "secret" not in refused.value.message


@pytest.mark.parametrize("source", ["{{ 1 // 0 }}", "{% for i in range(10**9) %}{% endfor %}", "{{ nested | tojson }}"])
def test_however_a_template_breaks_the_request_is_refused(source: str) -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(InvalidRequest, match="cannot render"):
        ChatTemplate(source).render(HELLO, {"nested": nested})


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt"])
def test_an_argument_that_is_the_servers_own_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ChatTemplate("x").render(HELLO, {name: False})
    assert refused.value.param == f"chat_template_kwargs.{name}"


def test_arguments_may_have_any_name() -> None:
    assert ChatTemplate("{{ self is defined }}x").render(HELLO, {"self": 1, "a b": 2, "": 3}).endswith("x")


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{{ cycler.__init__ }}"]
)
def test_a_template_cannot_leave_its_sandbox_or_change_the_request(source: str) -> None:
    messages = list(HELLO)
    try:
        text = ChatTemplate(source).render(messages)
    except InvalidRequest:
        text = ""
    assert text == ""
    assert messages == HELLO


def test_a_broken_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(SettingsError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(str(tmp_path))


def test_a_source_that_is_no_template_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(SettingsError, match="not valid"):
        ChatTemplate("{% for %}")
