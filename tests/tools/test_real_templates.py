"""Real chat templates: `auto` picks the right format, calls come back as they were, and what is appended turn by turn
is the conversation that the template renders at once, or differs from it as is known here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from template_round_trips import make_trips, read_templates

from posttrain.conversations.formats.base import FORMATS

FOLDER = Path(__file__).parent / "real_templates"
TEMPLATES = read_templates(FOLDER)
_UNESCAPED = ("quotes", "lines", "line at the end")  # the template does not escape texts


@dataclass(frozen=True)
class Expected:
    formats: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    several: bool = True
    rejected: str = ""


def reads(name: str, *differs: str, **more: Any) -> Expected:
    return Expected((name,), differs, **more)


_UNWRITTEN = Expected(rejected="does not write tool calls, and its prompt shows no known format")
_HIDDEN = "the chat template does not show write_note to the model"
EXPECTED = {
    "Apertus-8B-Instruct": reads("apertus", "text"),
    "Bielik-11B-v3.0-Instruct": reads("hermes", "text"),
    "ByteDance-Seed-OSS": reads("seed_oss"),
    "GLM-4.6": reads("glm", "thinking"),
    "GLM-4.7-Flash": reads("glm", "thinking"),
    "HuggingFaceTB-SmolLM3-3B": _UNWRITTEN,
    "Kimi-K2-Instruct": Expected(rejected="rejects messages with tool calls .*'append' of 'list' object is unsafe"),
    "MiMo-VL": reads("hermes"),
    "MiniMax-M1": reads("apriel"),
    "MiniMax-M2": reads("minimax_m2", "thinking"),
    "Mistral-Small-3.2-24B-Instruct-2506": reads("mistral", "text"),
    "Qwen-QwQ-32B": reads("hermes", "thinking"),
    "Qwen-Qwen2.5-7B-Instruct": reads("hermes"),
    "Qwen-Qwen3-0.6B": reads("hermes", "thinking"),
    "Qwen3-Coder": reads("qwen3_coder"),
    "Qwen3.5-4B": reads("qwen3_coder", "thinking"),
    "StepFun3.5-Flash": reads("qwen3_coder", "thinking"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": reads("deepseek_v3", "text", "thinking", rejected=_HIDDEN),
    "deepseek-ai-DeepSeek-V3.1": reads("deepseek_v3", rejected=_HIDDEN),
    "deepseek-ai-DeepSeek-V3.2": reads("deepseek_v32", "thinking"),
    "deepseek-ai-DeepSeek-V4": reads("deepseek_v32"),
    "google-gemma-4-31B-it": reads("gemma4", "thinking"),
    "ibm-granite-granite-3.3-2B-Instruct": _UNWRITTEN,
    "ibm-granite-granite-4.0": reads("hermes"),
    "ibm-granite-granite-4.1": reads("hermes"),
    "mistralai-Ministral-3-14B-Reasoning-2512": reads("mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": reads("mistral", "text"),
    "moonshotai-Kimi-K2": reads("kimi_k2", "text"),
    "openai-gpt-oss-120b": reads("harmony", "text", several=False),
    "unsloth-Apriel-1.5": reads("apriel", "text"),
    "unsloth-mistral-Devstral-Small-2507": reads("mistral"),
    "vllm-deepseekv3": reads("deepseek_v3", "blanks"),
    "vllm-deepseekv31": reads("deepseek_v3", "thinking"),
    "vllm-functiongemma": reads("functiongemma", rejected=_HIDDEN),
    "vllm-gemma4": reads("gemma4", "thinking"),
    "vllm-granite": reads("granite"),
    "vllm-hermes": reads("hermes", "blanks"),
    "vllm-hunyuan_a13b": reads("apriel"),
    "vllm-llama3.1_json": reads("llama3_json", several=False),
    "vllm-llama3.2_json": reads("llama3_json", several=False),
    "vllm-llama4_json": reads("llama3_json", "blanks"),
    "vllm-llama4_pythonic": reads("llama_pythonic", changed=("text like JSON", *_UNESCAPED)),
    "vllm-mistral3": reads("mistral", "text"),
    "vllm-muse_glimmer": reads("muse_glimmer"),
    "vllm-phi4_mini": Expected(rejected="shows no tool results behind a call"),
    "vllm-qwen3coder": reads("qwen3_coder"),
    "vllm-xlam_qwen": reads("xlam"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_real_template_proves_its_format_and_continues_as_it_is_known_to(name):
    trips, expected = make_trips(TEMPLATES[name]), EXPECTED[name]
    assert trips.formats == list(expected.formats)
    assert trips.changed == list(expected.changed)
    assert sorted(trips.differs) == list(expected.differs), trips.differs
    assert trips.several == expected.several
    assert trips.note == ""
    assert re.search(expected.rejected, trips.rejected) if expected.rejected else not trips.rejected


def test_every_template_has_its_expectation_its_origin_and_its_licence():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert set(TEMPLATES) == set(EXPECTED) and len(TEMPLATES) >= 20
    for name in TEMPLATES:
        assert f"| `{name}` |" in page
    assert {name for one in EXPECTED.values() for name in one.formats} <= set(FORMATS)
