"""`rollout.engine_kwargs`: arguments of an engine's own, checked before anything is loaded."""

from __future__ import annotations

import pytest

from posttrain.rollout.engines import ENGINES

ROLLOUT = "actor_rollout_ref.rollout"
KEY = f"{ROLLOUT}.engine_kwargs"
ON_VLLM = (f"{ROLLOUT}.name=vllm", "preset=embedded")
SOURCE = """
from dataclasses import dataclass
import a_module_that_is_not_there


@dataclass
class EngineArgs:
    model: str = "a"
    block_size: int | None = None
    max_model_len: int | None = None
    swap_space: float = 4
    enforce_eager: bool = False
    enable_chunked_prefill: bool = True

    def create(self):
        inside: int = 1
"""


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """An installed vLLM of which nothing can be imported."""
    folder = tmp_path / "site" / "vllm"
    (folder / "engine").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "engine" / "arg_utils.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path / "site")


def test_each_way_to_write_them_ends_in_one_dict_and_is_shown(load, vllm):
    given = [f"+{KEY}.vllm.block_size=32", f"{ROLLOUT}.enforce_eager=True", f"++{KEY}.vllm.swap_space=null"]
    resolved = load(*ON_VLLM, *given, environment=True)
    wanted = {"vllm": {"block_size": 32, "enforce_eager": True, "swap_space": None}}
    assert resolved.value(KEY) == wanted
    assert f"{KEY}: {{vllm: {{block_size: 32, enforce_eager: true, swap_space: null}}}}" in resolved.describe()
    whole = f"{KEY}={{vllm: {{block_size: 32, swap_space: null}}}}"
    for order in ([whole, given[1]], [given[1], whole]):
        assert load(*ON_VLLM, *order, environment=True).value(KEY) == wanted


@pytest.mark.parametrize("first", ["engine_kwargs", "enforce_eager"])
def test_a_file_may_hold_both_in_any_order(load, write, first):
    lines = {
        "engine_kwargs": "    engine_kwargs: {vllm: {block_size: 8}, sglang: {}}",
        "enforce_eager": "    enforce_eager: true",
    }
    ordered = [lines[name] for name in sorted(lines, key=lambda name: name != first)]
    write("mine.yaml", "\n".join(["actor_rollout_ref:", "  rollout:", *ordered]) + "\n")
    found = load("--config-path", ".", "--config-name", "mine", *ON_VLLM)
    assert found.value(KEY) == {"vllm": {"block_size": 8, "enforce_eager": True}}


@pytest.mark.parametrize("nothing", [f"{KEY}=null", f"{KEY}={{}}", f"{KEY}.vllm=null", f"{KEY}.vllm.dtype=null"])
def test_null_is_not_given(load, vllm, nothing):
    assert not any("engine_kwargs" in note for note in load(*ON_VLLM, nothing, environment=True).notes)


@pytest.mark.parametrize(
    ("setting", "said", "do"),
    [
        ("vllm.block_sise=32", "has no such argument.", "did you mean `block_size`?"),
        ("vllm.inside=1", "has no such argument.", "remove it"),
        ("vllm.disable_mm_preprocessor_cache=True", "has no such argument.", "mm_processor_cache_gb=0"),
        ("vllm.model=x", "`actor_rollout_ref.model.path` decides it", "set actor_rollout_ref.model.path"),
        ("vllm.seed=3", "`trainer.seed` decides it", "set trainer.seed"),
        ("vllm.gpu_memory_utilization=0.5", f"`{ROLLOUT}.gpu_memory_utilization` decides it", "set"),
        ("vllm.tensor_parallel_size=2", f"`{ROLLOUT}.tensor_model_parallel_size` decides it", "set"),
        ("vllm.logprobs_mode=raw_logprobs", "is built on processed_logprobs", "remove it"),
        ("vllm.speculative_config.method=ngram", "posttrain's engine decides it itself", "remove it"),
        ("vllm.max_model_len=auto", "expected an integer above 0", "give"),
        ("vllm.max_model_len=7", "rows may have", "leave it out"),
        ("vlm.block_size=1", "no rollout engine of this name", "did you mean `vllm`?"),
        ("vllm=32", "expected arguments by their names", "NAME=VALUE"),
    ],
)
def test_what_is_wrong_is_told_once_with_what_to_do(problems, vllm, setting, said, do):
    text = problems(*ON_VLLM, f"{KEY}.{setting}", environment=True)
    assert text.startswith("1 problem") and said in text and do in text


def test_what_is_so_anyway_is_taken(load, vllm):
    taken = load(*ON_VLLM, f"{KEY}.vllm.async_scheduling=False", f"{KEY}.vllm.load_format=dummy", environment=True)
    assert taken.value(KEY)["vllm"]["load_format"] == "dummy"


def test_a_limit_of_exactly_the_longest_row_is_enough(load, vllm):
    sizes = ["data.max_prompt_length=100", "data.max_response_length=28"]
    assert load(*ON_VLLM, *sizes, f"{KEY}.vllm.max_model_len=128", environment=True)


def test_with_another_engine_they_are_a_note(load, problems):
    resolved = load(f"{KEY}.vllm.wobble=1", f"{ROLLOUT}.enforce_eager=False", f"{KEY}.sglang.attention_backend=fa3")
    given = f"{KEY}.vllm.wobble, {KEY}.vllm.enforce_eager, {KEY}.sglang.attention_backend"
    assert f"{given} have no effect with {ROLLOUT}.name=native." in resolved.notes
    assert "has no arguments of its own" in problems(f"{KEY}.native.x=1")


def test_on_a_cpu_a_note_says_what_vllm_runs_with(load):
    on_cpu = load(*ON_VLLM, "trainer.device=cpu", f"{ROLLOUT}.enforce_eager=False").notes
    assert f"{KEY}.vllm.enforce_eager=False has no effect: on a CPU vLLM runs with True." in on_cpu
    on_gpu = load(*ON_VLLM, "trainer.device=cuda", f"{ROLLOUT}.enforce_eager=False").notes
    assert not any("enforce_eager" in note for note in on_gpu)


def test_names_of_sglang_are_read_from_its_groups_of_arguments(load, problems, tmp_path, monkeypatch):
    """An installed SGLang of which nothing can be imported."""
    folder = tmp_path / "site" / "sglang"
    (folder / "srt" / "arg_groups" / "fields").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "srt" / "server_args.py").write_text("class PortArgs:\n    port: int\n")
    (folder / "srt" / "arg_groups" / "fields" / "memory.py").write_text(
        "class Memory:\n    page_size: int\n    context_length: int\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    on = (f"{ROLLOUT}.name=sglang", "preset=embedded")
    assert load(*on, f"+{KEY}.sglang.page_size=16", environment=True).value(KEY) == {"sglang": {"page_size": 16}}
    for setting, said in (
        ("page_sise=1", "the SGLang that is installed has no such argument. did you mean `page_size`?"),
        ("port=1", "has no such argument"),
        ("tp_size=2", f"`{ROLLOUT}.tensor_model_parallel_size` decides it"),
        ("context_length=7", "rows may have"),
    ):
        text = " ".join(problems(*on, f"+{KEY}.sglang.{setting}", environment=True).split())
        assert text.startswith("1 problem") and all(part in text for part in said.split(". ")), text


def test_an_engine_of_ones_own_has_arguments_under_its_name(load, monkeypatch):
    monkeypatch.setitem(ENGINES, "mine", lambda order: "")
    assert load(f"{ROLLOUT}.name=mine", f"{KEY}.mine.depth=3").value(KEY) == {"mine": {"depth": 3}}


@pytest.mark.parametrize("engine", ["hf", "vllm", "sglang"])
def test_fp8_is_rejected_for_engines_that_do_not_read_it_and_taken_for_native(load, problems, engine):
    key = "actor_rollout_ref.rollout.quantization"
    common = ("actor_rollout_ref.model.path=m", "data.train_files=f.json", f"{key}=fp8")
    text = problems(*common, f"actor_rollout_ref.rollout.name={engine}")
    assert f"`{key}=fp8` is built for the engine native, and rollout.name={engine}." in text
    resolved = load(*common)
    assert resolved.config.actor_rollout_ref.rollout.quantization == "fp8"
    assert resolved.config.algorithm.rollout_correction.rollout_is == "token"
    kept = load(*common, "algorithm.rollout_correction.rollout_is=null")
    assert kept.config.algorithm.rollout_correction.rollout_is is None
