"""LoRA in the configuration: its spellings, an adapter folder that decides, and what 4-bit bases need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.config.environment import check_environment
from posttrain.config.trees import SFT

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
START = ("algorithm.adv_estimator=grpo",)
STORED = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "exclude_modules": None}


def adapter(folder: Path, weights: str = "adapter_model.safetensors", **changes) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(STORED | changes))
    (folder / weights).write_bytes(b"")
    return folder


def test_nested_spellings_mean_the_flat_ones(load):
    keys = [f"{MODEL}.lora.rank=8", f"{MODEL}.lora.alpha=32", f"{MODEL}.lora.type=lora"]
    keys += [f"{MODEL}.lora.target_modules=[q_proj,v_proj]", "model.lora.exclude_modules=v_proj"]
    model = load(*START, *keys).config.actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha) == (8, 32)
    assert (model.target_modules, model.exclude_modules) == (["q_proj", "v_proj"], "v_proj")


@pytest.mark.parametrize("text", [r".*\.(q|v)_proj", r".*layers\.[01]\..*_proj$"])
def test_a_regular_expression_arrives_as_it_was_written(load, text):
    model = load(*START, f"{MODEL}.lora_rank=4", f"{MODEL}.target_modules='{text}'").config.actor_rollout_ref.model
    assert model.target_modules == text


def test_supervised_runs_read_expressions_and_adapter_folders_the_same_way(load, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    expression = r".*layers\.[01]\..*_proj$HOME"
    given = ["model.lora_rank=4", f"model.target_modules='{expression}'", "model.lora_adapter_path=~/adapter"]
    model = load(*given, tree=SFT).config.model
    assert (model.target_modules, model.lora_adapter_path) == (expression, "/home/me/adapter")


@pytest.mark.parametrize("key", [f"{ROLLOUT}.load_format=safetensors", f"{ROLLOUT}.layered_summon=True"])
def test_keys_of_engines_that_load_weights_are_answered_with_a_note(load, key):
    notes = load(*START, f"{MODEL}.lora_rank=4", key).notes
    assert any(key.split("=")[0] in note and "has the trainer's own weights" in note for note in notes)


def test_rank_alpha_and_targets_come_from_the_adapter_folder(load, working_folder):
    adapter(working_folder / "sft")
    found = load(*START, f"{MODEL}.lora_adapter_path=sft")
    model = found.config.actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, model.target_modules) == (4, 8, ["q_proj", "v_proj"])
    assert found.where(f"{MODEL}.lora_rank") == "sft/adapter_config.json"
    load(*START, f"{MODEL}.lora_adapter_path=sft", f"{MODEL}.lora_rank=4", f"{MODEL}.target_modules=[v_proj,q_proj]")


def test_experts_that_an_adapter_names_apart_are_among_its_targets(load, problems, working_folder):
    adapter(working_folder / "sft", target_parameters=["mlp.experts.down_proj"])
    given = (*START, f"{MODEL}.lora_adapter_path=sft")
    targets = ["q_proj", "v_proj", "mlp.experts.down_proj"]
    assert load(*given).config.actor_rollout_ref.model.target_modules == targets
    assert load(*given, f"{MODEL}.target_modules=[mlp.experts.down_proj,q_proj,v_proj]")
    assert "target_modules=['q_proj', 'v_proj', 'mlp" in problems(*given, f"{MODEL}.target_modules=[q_proj,v_proj]")
    adapter(working_folder / "regex", target_parameters=["down_proj"], target_modules=r".*\.q_proj")
    found = load(*START, f"{MODEL}.lora_adapter_path=regex").config.actor_rollout_ref.model.target_modules
    assert found == [r".*\.q_proj", "down_proj"]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (f"{ACTOR}.peft_config.lora_r=16", "peft_config.lora_r=16`, but the adapter in sft has r=4"),
        (f"{MODEL}.lora_alpha=99", "lora_alpha=99`, but the adapter in sft has lora_alpha=8"),
        (f"{MODEL}.target_modules=all-linear", "target_modules=['q_proj', 'v_proj']"),
    ],
)
def test_a_value_beside_an_adapter_that_says_another_is_an_error_that_names_both(problems, working_folder, key, words):
    adapter(working_folder / "sft")
    text = problems(*START, f"{MODEL}.lora_adapter_path=sft", key)
    assert words in text and "remove" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (None, "does not exist"),
        ({"weights": "adapter_model.bin"}, "adapter_model.bin is a pickle, which is never loaded"),
        ({"weights": "other"}, "holds no adapter_model.safetensors"),
        ({"peft_type": "IA3"}, "peft_type=IA3 is not LORA"),
        ({"r": 0}, "r=0 is no rank"),
        ({"modules_to_save": ["lm_head"]}, "merge this adapter into its base"),
        ({"use_dora": True}, "variant of LoRA that is not built"),
        ({"bias": "all"}, "it trained biases"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed the base"),
    ],
)
def test_adapter_folders_that_cannot_serve_are_refused_before_a_model_is_loaded(load, working_folder, changes, words):
    if changes is not None:
        adapter(working_folder / "sft", **changes)
    problems = check_environment(load(*START, f"{MODEL}.lora_adapter_path=sft"), working_folder)
    assert any("lora_adapter_path" in str(problem) and words in str(problem) for problem in problems)


def test_an_adapter_folder_as_the_model_is_answered_with_the_two_keys_to_set(load, working_folder):
    adapter(working_folder / "sft")
    problems = check_environment(load(*START, f"{MODEL}.path=./sft"), working_folder)
    text = "\n".join(map(str, problems))
    assert "holds a LoRA adapter, not a model" in text and f"{MODEL}.lora_adapter_path=./sft" in text


def test_4_bits_need_adapters_stay_on_their_device_and_need_bitsandbytes(load, problems, working_folder, monkeypatch):
    nf4 = (*START, f"{MODEL}.quantization=nf4")
    assert "weights of 4 bits cannot be trained" in problems(*nf4)
    lora = (*nf4, f"{MODEL}.lora_rank=4")
    assert "stay on their device" in problems(*lora, f"{ACTOR}.fsdp_config.param_offload=True")
    assert "float32 or bfloat16" in problems(*lora, f"{MODEL}.dtype=float64")
    assert "known: nf4" in problems(*START, f"{MODEL}.quantization=int3", f"{MODEL}.lora_rank=4")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = "\n".join(map(str, check_environment(load(*lora), working_folder)))
    assert "the package bitsandbytes is not installed" in text and "posttrain[qlora]" in text


FP8 = f"{ACTOR}.quantization=fp8"


def test_a_base_in_fp8_needs_adapters_beside_it(load, problems):
    assert "without adapters: 8-bit copies of weights that are trained" in problems(*START, FP8)
    assert load(*START, FP8, f"{MODEL}.lora_rank=4").config.actor_rollout_ref.actor.quantization == "fp8"
    assert "known: fp8" in problems(*START, f"{ACTOR}.quantization=fp4", f"{MODEL}.lora_rank=4")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("trainer.n_gpus_per_node=2", "with 2 workers that train: their weights are sharded"),
        (f"{ACTOR}.strategy=megatron", f"is not built for {ACTOR}.strategy=megatron"),
        (f"{MODEL}.quantization=nf4", f"is not built for {MODEL}.quantization=nf4"),
        (f"{MODEL}.use_remove_padding=False", f"is not built for {MODEL}.use_remove_padding=False"),
        (f"{ACTOR}.fsdp_config.param_offload=True", f"is not built for {ACTOR}.fsdp_config.param_offload=True"),
        ("trainer.exact=True", "is not built for trainer.exact=True"),
        (f"{MODEL}.dtype=float64", f"with {MODEL}.dtype=float64"),
    ],
)
def test_what_a_base_in_fp8_is_not_built_for_is_named_before_a_model_is_loaded(problems, other, words):
    assert f"`{ACTOR}.quantization=fp8` {words}" in problems(*START, f"{MODEL}.lora_rank=4", FP8, other)


def test_settings_of_adapters_that_there_are_not_are_named(load):
    notes = "\n".join(load(*START, f"{MODEL}.exclude_modules=q_proj", "trainer.export_lora=merged").notes)
    assert f"{MODEL}.exclude_modules, trainer.export_lora have no effect" in notes
    notes = "\n".join(load("algorithm.adv_estimator=gae", "critic.model.lora_alpha=4").notes)
    assert "critic.model.lora_alpha has no effect: critic.model.lora_rank is 0" in notes
