"""Runs with LoRA: the reference, what a checkpoint holds, resuming, exporting, and starting from an adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from runs import metrics_of, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain import cli
from posttrain.checkpoint.folders import CheckpointError
from posttrain.checkpoint.manager import CheckpointManager
from posttrain.commands.export import export_checkpoint
from posttrain.models.lora import base_only
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer
from posttrain.workers import roles

MODEL = "actor_rollout_ref__model__"
LORA = {f"{MODEL}lora_rank": 4, "actor_rollout_ref__actor__use_kl_loss": True, "trainer__save_freq": 1}
FAST = {"actor_rollout_ref__actor__optim__lr": 1e-2}


def watched(*args, **more):
    """(result, trainer, paths of the language models that were loaded) of a run."""
    trainers, loaded, fit, load = [], [], RayPPOTrainer.fit, roles.load_causal_lm
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayPPOTrainer, "fit", lambda self: trainers.append(self) or fit(self))
        patch.setattr(roles, "load_causal_lm", lambda *a, **k: loaded.append(k.get("path")) or load(*a, **k))
        return run(*args, **more), trainers[0], loaded


@pytest.fixture(scope="module")
def made(tiny_model, sums, tmp_path_factory):
    """A run of two steps with a checkpoint after each."""
    result, trainer, loaded = watched(
        tiny_model, sums, tmp_path_factory.mktemp("lora"), trainer__export_hf="last", **LORA, **FAST
    )
    checkpoints = result.path / "checkpoints"
    return SimpleNamespace(result=result, trainer=trainer, loaded=loaded, checkpoints=checkpoints, base=tiny_model)


def ids(folder: Path) -> torch.Tensor:
    return torch.tensor([AutoTokenizer.from_pretrained(folder).encode("12 + 30 = ?")])


@torch.no_grad()
def logits(model, base: Path) -> torch.Tensor:
    return model(ids(base)).logits


def plain(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def module_of(trainer):
    return trainer.actor_rollout_wg.worker.engine.module


def test_the_reference_is_the_base_with_its_adapters_off_and_no_second_model_is_loaded(made):
    assert len(made.loaded) == 1 and made.trainer.actor_rollout_wg.worker.reference.engine is None
    lines = metrics_of(made.result.path)
    assert abs(lines[0]["kl_loss"]) < 1e-6 < lines[1]["kl_loss"]  # fresh adapters change nothing, trained ones do
    with base_only(module_of(made.trainer)):
        torch.testing.assert_close(
            logits(module_of(made.trainer), made.base), logits(plain(made.base), made.base), rtol=0, atol=1e-5
        )
    assert not torch.allclose(
        logits(module_of(made.trainer), made.base), logits(plain(made.base), made.base), atol=1e-3
    )


def test_ref_log_probs_are_those_of_the_bare_base(made):
    import pyarrow.parquet as pq

    base = plain(made.base)
    for row in pq.read_table(made.result.path / "samples" / "step_2.parquet").to_pylist()[:3]:
        prompt, response = row["prompt_ids"], row["response_ids"]
        with torch.no_grad():
            log_p = torch.log_softmax(base(torch.tensor([[*prompt, *response]])).logits[0], -1)
        expected = log_p[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(row["ref_log_probs"]), expected, rtol=0, atol=1e-5)


def test_a_checkpoint_holds_adapters_their_optimizer_state_and_the_identity_of_the_base(made):
    folder = made.checkpoints / "global_step_1"
    stored = CheckpointManager(made.checkpoints).describe(folder, "actor")
    assert all("lora_" in name or name == "optim.steps_done" for name in stored) and len(stored) > 50
    state = json.loads((folder / "state.json").read_text())["lora"]["actor"]
    assert state["base"]["path"] == str(made.base) and len(state["base"]["fingerprint"]) == 16
    assert (state["adapter"]["r"], state["base"]["dtype"]) == (4, "float32")
    numbers = sum(shape.numel() for name, (shape, _) in stored.items() if name.startswith("model."))
    held = sum(shape.numel() * dtype.itemsize for name, (shape, dtype) in stored.items() if "step" not in name)
    assert held == 3 * 4 * numbers > 0  # the adapters and their two moments, in float32


def test_the_folder_of_the_last_checkpoint_is_an_adapter_that_peft_loads(made):
    folder = made.checkpoints / "global_step_2" / "huggingface"
    names = {file.name for file in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not names & {"model.safetensors", "config.json"}
    theirs = PeftModel.from_pretrained(plain(made.base), str(folder))
    ours = logits(module_of(made.trainer), made.base)
    torch.testing.assert_close(logits(theirs, made.base), ours, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(plain(folder), made.base), ours, rtol=0, atol=1e-5)  # finds the base by itself


def test_export_writes_the_merged_model_or_the_adapter_of_any_checkpoint(made, tmp_path, capsys):
    last, first = made.checkpoints / "global_step_2", made.checkpoints / "global_step_1"
    assert not (first / "huggingface").exists()
    assert cli.main(["export", str(last), str(tmp_path / "merged")]) == 0
    ours = logits(module_of(made.trainer), made.base)
    torch.testing.assert_close(logits(plain(tmp_path / "merged"), tmp_path / "merged"), ours, rtol=0, atol=1e-5)
    for step, folder in ((1, first), (2, last)):
        assert cli.main(["export", str(folder), str(tmp_path / f"adapter{step}"), "--adapter"]) == 0
        theirs = PeftModel.from_pretrained(plain(made.base), str(tmp_path / f"adapter{step}"))
        assert torch.allclose(logits(theirs, made.base), ours, rtol=0, atol=1e-5) is (step == 2)
    assert capsys.readouterr().out.count("written: ") == 3


def test_export_wants_the_right_base_and_takes_one_that_was_moved(made, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(made.base, other)
    export_checkpoint(made.checkpoints / "global_step_1", tmp_path / "a", base=str(other))
    spoil(other)
    with pytest.raises(CheckpointError, match=r"fingerprint .* but .*other has .*--base"):
        export_checkpoint(made.checkpoints / "global_step_1", tmp_path / "b", base=str(other))
    with pytest.raises(CheckpointError, match=r"was not found.*no such folder.*--base"):
        export_checkpoint(made.checkpoints / "global_step_1", tmp_path / "b", base=str(tmp_path / "gone"))
    with pytest.raises(CheckpointError, match="is not empty"):
        export_checkpoint(made.checkpoints / "global_step_1", tmp_path / "a")


def spoil(folder: Path) -> None:
    """Another base of the same shape."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights = {name: weight * 1.01 for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_resume_beside_another_base_is_refused_and_beside_a_copy_it_goes_on(made, sums, tmp_path):
    shutil.copytree(made.result.path, tmp_path / "out" / "test" / "run")
    shutil.copytree(made.base, tmp_path / "copy")
    more = {**LORA, **FAST, "trainer__total_training_steps": 3}
    longer = run(tmp_path / "copy", sums, tmp_path / "out", **more)
    assert longer.steps == 3
    spoil(tmp_path / "copy")
    with pytest.raises(CheckpointError, match=r"adapters were trained beside the base .*has other weights"):
        run(tmp_path / "copy", sums, tmp_path / "out", **{**more, "trainer__total_training_steps": 4})
    with pytest.raises(CheckpointError, match="holds LoRA adapters only"):
        run(made.base, sums, tmp_path / "out", **{**more, f"{MODEL}lora_rank": 0})


def test_a_run_starts_from_an_adapter_on_disk_and_its_reference_is_the_base_without_it(made, sums, tmp_path, capsys):
    adapter = made.checkpoints / "global_step_2" / "huggingface"
    shutil.copytree(made.base, tmp_path / "copy")
    start = {f"{MODEL}lora_adapter_path": str(adapter), "actor_rollout_ref__actor__use_kl_loss": True}
    result, trainer, _ = watched(tmp_path / "copy", sums, tmp_path, trainer__total_training_steps=1, **start)
    said = capsys.readouterr().out
    assert f"was made beside {made.base}; here its base is {tmp_path / 'copy'}" in said
    assert "The reference is the base without the adapter" in said
    assert metrics_of(result.path)[0]["kl_loss"] > 1e-5  # the policy is not the reference at the first step
    layer = module_of(trainer).get_base_model().model.layers[0].self_attn.q_proj
    assert layer.r["default"] == 4 and float(layer.lora_B["default"].weight.detach().abs().max()) > 1e-3


def test_the_critic_trains_adapters_and_its_value_head_beside_a_frozen_base(tiny_model, sums, tmp_path):
    more = {"algorithm__adv_estimator": "gae", "critic__model__lora_rank": 2, "critic__optim__lr": 1e-2}
    result, trainer, _ = watched(tiny_model, sums, tmp_path, **more)
    critic = trainer.critic_wg.worker.engine.module
    trained = {name for name, weight in critic.named_parameters() if weight.requires_grad}
    assert len(trained) == 2 * 14 + 2 and {"value_head.weight", "value_head.bias"} < trained
    start = plain(tiny_model).state_dict()
    for name, weight in critic.base_model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(weight, start["model." + name.replace(".base_layer", "")]), name
    newest = result.path / "checkpoints" / "global_step_2"
    names = CheckpointManager(newest.parent).describe(newest, "critic")
    assert all("lora_" in name or "value_head" in name or name == "optim.steps_done" for name in names)
    assert json.loads((newest / "state.json").read_text())["lora"]["critic"]["base"]["path"] == str(tiny_model)
    assert float(critic.value_head.weight.detach().abs().max()) > 0 < metrics_of(result.path)[0]["critic/vf_loss"]
    assert run(tiny_model, sums, tmp_path, **more, trainer__total_training_steps=3).steps == 3  # resumes


def test_wrong_target_modules_end_a_run_with_the_names_that_there_are(tiny_model, sums, tmp_path):
    from posttrain.models.adapter_targets import AdapterError

    with pytest.raises(
        AdapterError, match=r"actor_rollout_ref\.model\.target_modules=.*q_pro.*q_proj \(2\), k_proj \(2\)"
    ):
        run(tiny_model, sums, tmp_path, **LORA, **{f"{MODEL}target_modules": ["q_pro"]})
