"""Chat templates that do not end, or fill the memory, are stopped and named; all others render as they always did."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sft"))
import chat_templates

from posttrain.config.model import ModelConfig
from posttrain.config.trainer import DataConfig
from posttrain.data import PromptDataset
from posttrain.models import template_bounds
from posttrain.models.embedded import byte_tokenizer
from posttrain.models.loading import load_tokenizer
from posttrain.models.template_bounds import EndlessTemplate, bound_templates

LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}BODY{% endfor %}{% endfor %}"
ENDLESS = {
    "loops in loops": LOOP.replace("BODY", "{% set a = 1 %}"),
    "macros that call themselves": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "one operation without end": "{{ 10 ** (10 ** 10) }}",
}
HUGE = {
    "one text": "{{ 'x' * 10 ** 10 }}",
    "a text twice as long each time": (
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
    ),
}
LATER = "{% if messages | length > 1 %}" + LOOP + "{% endif %}hello"
"""Ends on short conversations only, so that trying it first shows nothing."""
ONE, TWO = [{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi"}, {"role": "user", "content": "ho"}]


@pytest.fixture(autouse=True)
def short_deadline(monkeypatch):
    monkeypatch.setattr(template_bounds, "RENDER_S", 1)
    monkeypatch.setattr(template_bounds, "_tried", {})


def bounded(template: str):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return bound_templates(tokenizer, "/models/mine")


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_does_not_end_is_an_error_that_names_its_folder_and_says_what_to_do(name):
    tokenizer = bounded(ENDLESS[name])
    for _ in range(2):  # the second time it is known
        with pytest.raises(EndlessTemplate, match=r"/models/mine did not end.*chat_template.jinja.*tokenizer_path"):
            tokenizer.apply_chat_template(ONE, tokenize=False)


@pytest.mark.parametrize("name", HUGE)
def test_a_template_that_fills_the_memory_is_stopped_before_it_does(name, monkeypatch):
    monkeypatch.setattr(template_bounds, "RENDER_S", 30)
    with pytest.raises(EndlessTemplate, match=r"/models/mine took more than 1024 MiB of memory"):
        bounded(HUGE[name]).apply_chat_template(ONE, tokenize=False)


def test_a_template_that_does_not_end_on_some_conversations_is_stopped_there_and_renders_others():
    tokenizer = bounded(LATER.replace("BODY", ""))
    for _ in range(2):
        assert tokenizer.apply_chat_template(ONE, tokenize=False) == "hello"
        with pytest.raises(EndlessTemplate, match="did not end"):
            tokenizer.apply_chat_template(TWO, tokenize=False)
    assert not template_bounds._renderings
    for _ in range(1000):  # nothing of it is raised later
        assert tokenizer.apply_chat_template(ONE, tokenize=False) == "hello"


def test_a_template_that_grows_on_some_conversations_is_stopped_there(monkeypatch):
    monkeypatch.setattr(template_bounds, "RENDER_S", 30)
    tokenizer = bounded(LATER.replace("BODY", "{{ 'xxxxxxxx' * 100 ~ i }}"))
    assert tokenizer.apply_chat_template(ONE, tokenize=False) == "hello"
    monkeypatch.setattr(template_bounds, "RENDER_BYTES", 1 << 27)
    with pytest.raises(EndlessTemplate, match="of memory"):
        tokenizer.apply_chat_template(TWO, tokenize=False)


def test_a_text_far_longer_than_its_conversation_is_an_error_and_a_long_conversation_is_not(monkeypatch):
    monkeypatch.setattr(template_bounds, "LONGEST", 1000)
    tokenizer = bounded("{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ 'x' * 2000 }}{% endif %}")
    long = [{"role": "user", "content": "y" * 5000}]
    assert tokenizer.apply_chat_template(long, tokenize=False) == "y" * 5000
    with pytest.raises(EndlessTemplate, match="made a text of 2,002 characters"):
        tokenizer.apply_chat_template(ONE, tokenize=False, tools=[{"name": "t"}])


def test_a_template_is_stopped_in_whatever_thread_it_is_rendered():
    tokenizer, found = bounded(LATER.replace("BODY", "")), []
    tokenizer.apply_chat_template(ONE, tokenize=False)

    def render() -> None:
        try:
            tokenizer.apply_chat_template(TWO, tokenize=False)
        except EndlessTemplate as error:
            found.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    while thread.is_alive():  # this thread renders on, and is left alone
        assert tokenizer.apply_chat_template(ONE, tokenize=False) == "hello"
    assert len(found) == 1


@pytest.mark.parametrize("generation", [False, True])
def test_other_templates_render_what_they_always_did(generation):
    templates = {name: text for name, text in vars(chat_templates).items() if name.isupper() and isinstance(text, str)}
    assert len(templates) > 6
    talk = [
        *ONE,
        {"role": "assistant", "content": "<think>\nx\n</think>\nho"},
        {"role": "user", "content": "难 \ud800"},
    ]
    options = {"tokenize": False, "add_generation_prompt": generation}
    for name, text in {**templates, "embedded": byte_tokenizer().chat_template}.items():
        plain = chat_templates.tokenizer_with(text)
        wanted = plain.apply_chat_template(talk, **options)
        assert bound_templates(plain, "/models/mine").apply_chat_template(talk, **options) == wanted, name


def test_what_a_template_refuses_itself_is_its_own_error():
    tokenizer = bounded(chat_templates.MISTRAL)
    with pytest.raises(Exception, match="roles must alternate") as caught:
        tokenizer.apply_chat_template(TWO, tokenize=False)
    assert not isinstance(caught.value, EndlessTemplate)
    without = byte_tokenizer()
    without.chat_template = None
    with pytest.raises(ValueError, match="chat_template"):
        bound_templates(without, "/models/mine").apply_chat_template(ONE)


def test_a_bounded_tokenizer_can_be_copied_pickled_saved_and_asked_for_its_parameters(tmp_path):
    tokenizer = bounded(chat_templates.CHATML)
    wanted = tokenizer.apply_chat_template(ONE, tokenize=False)
    for other in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        other.chat_template = "another"
        assert other.apply_chat_template(ONE, tokenize=False) == "another"
    assert tokenizer.apply_chat_template(ONE, tokenize=False) == wanted
    assert "add_generation_prompt" in inspect.signature(tokenizer.apply_chat_template).parameters
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(ModelConfig(path=str(tmp_path))).apply_chat_template(ONE, tokenize=False) == wanted


def test_data_of_a_model_whose_template_does_not_end_is_refused_with_the_models_folder(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = ENDLESS["loops in loops"]
    tokenizer.save_pretrained(tmp_path / "mine")
    loaded = load_tokenizer(ModelConfig(path=str(tmp_path / "mine")))
    with pytest.raises(EndlessTemplate, match=str(tmp_path / "mine")):
        PromptDataset([{"prompt": "1 + 1 = ?"}], loaded, DataConfig())
