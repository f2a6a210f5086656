"""Adapters of supervised runs: what a checkpoint says of them, export, resuming, and starting from an adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lora_tools import logits, plain, scores, started, watched
from peft import PeftModel
from sft_runs import PREFERENCES, metrics_of, reward_model, sft
from transformers import AutoModelForSequenceClassification

from posttrain import cli
from posttrain.checkpoint.folders import CheckpointError
from posttrain.checkpoint.manager import CheckpointManager
from posttrain.commands.export import export_checkpoint

LORA = {"model__lora_rank": 4, "model__lora_alpha": 8, "optim__lr": 1e-2, "trainer__save_freq": 1}


@pytest.fixture(scope="module")
def made(tiny_model, tmp_path_factory):
    """Two steps of SFT with adapters, a checkpoint after each."""
    result, module = watched(sft, tiny_model, tmp_path_factory.mktemp("sft-lora"), **LORA)
    return SimpleNamespace(
        path=result.path, last=result.path / "checkpoints" / "global_step_2", module=module, base=tiny_model
    )


@pytest.fixture(scope="module")
def judge(tiny_model, tmp_path_factory):
    """The same of a reward model."""
    result, module = watched(reward_model, tiny_model, tmp_path_factory.mktemp("rm-lora"), **LORA)
    return SimpleNamespace(path=result.path, last=result.path / "checkpoints" / "global_step_2", module=module)


@pytest.fixture(scope="module")
def adapter(made, tmp_path_factory):
    return export_checkpoint(made.last, tmp_path_factory.mktemp("out") / "adapter", adapter=True)


@pytest.fixture(scope="module")
def judge_adapter(judge, tmp_path_factory):
    return export_checkpoint(judge.last, tmp_path_factory.mktemp("out") / "judge", adapter=True)


def classifier(folder: Path) -> Any:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, num_labels=1)
    model.config.pad_token_id = 0
    return model.eval()


def spoil(folder: Path) -> None:
    """Another base of the same shape."""
    from safetensors.torch import load_file, save_file

    weights = {name: weight * 1.01 for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_checkpoint_holds_adapters_alone_and_the_identity_of_their_base(made):
    state = json.loads((made.last / "state.json").read_text())["lora"]["model"]
    assert state["base"]["path"] == str(made.base) and len(state["base"]["fingerprint"]) == 16
    assert (state["adapter"]["r"], state["adapter"]["lora_alpha"], state["base"]["dtype"]) == (4, 8, "float32")
    stored = CheckpointManager(made.last.parent).describe(made.last, "model")
    assert all("lora_" in name or name == "optim.steps_done" for name in stored) and len(stored) > 50


def test_export_folds_the_adapters_of_any_checkpoint_in_or_writes_them_alone(made, tmp_path, capsys):
    ours = logits(made.module)
    assert not torch.allclose(ours, logits(plain(made.base)), atol=1e-3)
    for step in (1, 2):
        folder = made.last.with_name(f"global_step_{step}")
        assert not (folder / "huggingface").exists()
        assert cli.main(["export", str(folder), str(tmp_path / f"merged{step}")]) == 0
        assert cli.main(["export", str(folder), str(tmp_path / f"adapter{step}"), "--adapter"]) == 0
        merged = logits(plain(tmp_path / f"merged{step}"))
        beside = logits(PeftModel.from_pretrained(plain(made.base), str(tmp_path / f"adapter{step}")))
        torch.testing.assert_close(merged, beside, rtol=0, atol=1e-5)
        assert torch.allclose(merged, ours, rtol=0, atol=1e-5) is (step == 2)
        assert (tmp_path / f"merged{step}" / "tokenizer.json").is_file()
    assert capsys.readouterr().out.count("written: ") == 4


def test_export_wants_the_base_that_the_adapters_were_trained_beside(made, tmp_path):
    shutil.copytree(made.base, tmp_path / "other")
    spoil(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"fingerprint .* but .*other has .*--base"):
        export_checkpoint(made.last, tmp_path / "a", base=str(tmp_path / "other"))


def test_a_merged_folder_in_the_checkpoint_is_copied_even_where_the_base_is_gone(made, tmp_path):
    shutil.copytree(made.base, tmp_path / "base")
    more = {**LORA, "trainer__export_hf": "last", "trainer__total_training_steps": 1}
    run, module = watched(sft, tmp_path / "base", tmp_path / "out", **more)
    shutil.rmtree(tmp_path / "base")
    folder = export_checkpoint(run.path / "checkpoints" / "global_step_1", tmp_path / "model")
    torch.testing.assert_close(logits(plain(folder)), logits(module), rtol=0, atol=1e-5)


def test_export_lora_writes_the_adapter_into_the_checkpoint(made, tmp_path, capsys):
    more = {**LORA, "trainer__export_hf": "last", "trainer__export_lora": "adapter"}
    run, module = watched(sft, made.base, tmp_path, **more)
    folder = run.path / "checkpoints" / "global_step_2" / "huggingface"
    assert f"The trained adapter is in {folder}" in capsys.readouterr().out
    assert not (folder / "model.safetensors").exists()
    theirs = logits(PeftModel.from_pretrained(plain(made.base), str(folder)))
    torch.testing.assert_close(theirs, logits(module), rtol=0, atol=1e-5)


def test_another_sft_run_starts_from_the_exported_adapter(made, adapter, tmp_path, capsys):
    shutil.copytree(made.base, tmp_path / "copy")
    start = {"model__lora_adapter_path": str(adapter)}
    module = started(sft, tmp_path / "copy", tmp_path, **start)
    torch.testing.assert_close(logits(module), logits(made.module), rtol=0, atol=1e-6)
    said = capsys.readouterr().out
    assert f"was made beside {made.base}; here its base is {tmp_path / 'copy'}" in said
    run = sft(made.base, tmp_path / "out", **start, trainer__total_training_steps=1)
    assert (
        json.loads((run.path / "checkpoints/global_step_1/state.json").read_text())["lora"]["model"]["adapter"]["r"]
        == 4
    )


def test_an_RL_run_starts_from_the_exported_adapter(made, adapter):
    from posttrain.config import load_config
    from posttrain.workers.roles import actor_engine

    keys = {"model.path": str(made.base), "model.lora_adapter_path": str(adapter), "data.train_files": "x.json"}
    config = load_config({**keys, "algorithm.adv_estimator": "grpo"}).config
    assert config.actor_rollout_ref.model.lora_alpha == 8
    module = actor_engine(config, torch.device("cpu"), 1).module
    torch.testing.assert_close(logits(module), logits(made.module), rtol=0, atol=1e-6)


def test_settings_that_the_adapter_decides_are_refused_beside_it(made, adapter, tmp_path):
    from posttrain.config import ConfigError

    with pytest.raises(ConfigError, match=r"model\.lora_rank=7`, but the adapter in .* has r=4"):
        sft(made.base, tmp_path, model__lora_adapter_path=str(adapter), model__lora_rank=7)


def test_a_resume_beside_another_base_is_refused_and_beside_a_copy_it_goes_on(made, tmp_path):
    shutil.copytree(made.path, tmp_path / "out" / "test" / "run")
    shutil.copytree(made.base, tmp_path / "copy")
    assert sft(tmp_path / "copy", tmp_path / "out", **LORA, trainer__total_training_steps=3).steps == 3
    spoil(tmp_path / "copy")
    with pytest.raises(CheckpointError, match=r"adapters were trained beside the base .*has other weights"):
        sft(tmp_path / "copy", tmp_path / "out", **LORA, trainer__total_training_steps=4)
    with pytest.raises(CheckpointError, match=r"trains all weights: set model\.lora_rank"):
        sft(made.base, tmp_path / "out", trainer__total_training_steps=4)


def test_a_reward_models_checkpoint_is_exported_whole_and_as_an_adapter_with_its_head(judge, judge_adapter, tmp_path):
    ours = scores(judge.module)
    assert float(ours[0] - ours[1]) != 0.0
    merged = export_checkpoint(judge.last, tmp_path / "merged")
    whole = AutoModelForSequenceClassification.from_pretrained(merged, dtype=torch.float32)
    assert whole.config.num_labels == 1 and whole.config.pad_token_id is not None
    torch.testing.assert_close(scores(whole), ours, rtol=0, atol=1e-5)
    stored = json.loads((judge_adapter / "adapter_config.json").read_text())
    assert (stored["task_type"], stored["modules_to_save"]) == ("SEQ_CLS", ["score"])
    base = stored["base_model_name_or_path"]
    theirs = PeftModel.from_pretrained(classifier(base), str(judge_adapter))
    torch.testing.assert_close(logits(theirs)[0, 0], ours[0], rtol=0, atol=1e-5)


def test_reward_models_start_from_their_own_adapters_and_from_those_of_sft(
    made, adapter, judge, judge_adapter, tmp_path
):
    again = started(reward_model, made.base, tmp_path, model__lora_adapter_path=str(judge_adapter))
    torch.testing.assert_close(scores(again), scores(judge.module), rtol=0, atol=1e-6)
    more = {"model__lora_adapter_path": str(adapter), "trainer__total_training_steps": 1}
    fresh = started(reward_model, made.base, tmp_path, **more)
    assert float(scores(fresh).abs().max()) == 0.0  # a new head
    expected = dict(made.module.named_parameters())
    lora = {name: weight for name, weight in fresh.named_parameters() if ".lora_" in name}
    assert lora and all(torch.equal(weight, expected[name]) for name, weight in lora.items())
    run = reward_model(made.base, tmp_path / "out", val_data=PREFERENCES, **more)
    assert metrics_of(run.path)[0]["val/margin"] == 0.0


def test_a_reward_models_adapter_is_no_start_for_sft(judge_adapter, made, tmp_path):
    from posttrain.config import ConfigError

    with pytest.raises(ConfigError, match=r"modules_to_save=\['score'\] is more than LoRA"):
        sft(made.base, tmp_path, model__lora_adapter_path=str(judge_adapter))


def test_a_reward_model_resumes_beside_its_base_alone(judge, made, tmp_path):
    shutil.copytree(judge.path, tmp_path / "out" / "test" / "run")
    shutil.copytree(made.base, tmp_path / "copy")
    spoil(tmp_path / "copy")
    with pytest.raises(CheckpointError, match="has other weights"):
        reward_model(tmp_path / "copy", tmp_path / "out", **LORA, trainer__total_training_steps=3)


def test_runs_say_that_stacked_experts_get_no_adapters(made, sums, tmp_path, capsys):
    from transformers import AutoTokenizer

    import posttrain
    from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer
    from tests.rollout.tiny import tiny

    tokenizer = AutoTokenizer.from_pretrained(made.base)
    model = tiny("qwen3-moe")
    model.resize_token_embeddings(len(tokenizer))
    for thing in (model, tokenizer):
        thing.save_pretrained(tmp_path / "moe")
    sft(tmp_path / "moe", tmp_path, model__lora_rank=2, trainer__total_training_steps=1)
    said = (
        "note: {}.target_modules=all-linear: experts that lie in one tensor are no linear modules and get no adapters"
    )
    assert said.format("model") in capsys.readouterr().out
    keys = {"algorithm.adv_estimator": "gae", "model.path": str(tmp_path / "moe"), "trainer.device": "cpu"}
    keys |= {"model.lora_rank": 2, "critic.model.lora_rank": 2, "data.train_files": str(sums["train"])}
    keys |= {"trainer.default_local_dir": str(tmp_path / "rl"), "trainer.experiment_name": "moe"}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(RayPPOTrainer, "fit", stop)
        posttrain.train(keys)
    heard = capsys.readouterr().out
    assert said.format("model") in heard and said.format("critic.model") in heard


def stop(self: Any) -> None:
    raise InterruptedError
