"""Runs of the SFT trainer: its keys, its records, exact resuming, export, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked
from sft_runs import PAIRS, TALKS, metrics_of, settings, sft, tensors

from posttrain.checkpoint.folders import verify
from posttrain.config import ConfigError
from posttrain.trainer import fsdp_sft_trainer

SIX = {"trainer__total_training_steps": 6, "trainer__save_freq": 3, "trainer__test_freq": 2}
KILLED = """
    import os, signal, sys
    sys.path.insert(0, {folder!r})
    from posttrain.trainer.supervised.loop import SupervisedTrainer
    from posttrain.trainer.fsdp_sft_trainer import run_sft
    from sft_runs import PAIRS

    plain = SupervisedTrainer._train_step

    def step(self):
        if self.step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(self)

    SupervisedTrainer._train_step = step
    run_sft({settings!r}, data=PAIRS, val_data=PAIRS[:3])
"""


def killed_after_four(wanted: dict[str, Any], forked: Forked) -> None:
    code = textwrap.dedent(KILLED).format(folder=str(Path(__file__).parent), settings=wanted)
    done = forked.run(code)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]


def same_to_the_bit(path: Path, straight: Path) -> None:
    assert metrics_of(path) == metrics_of(straight)
    ours, theirs = tensors(path), tensors(straight)
    assert ours.keys() == theirs.keys() and len(ours) > 10
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not verify(path / "checkpoints" / "global_step_6")


def test_six_steps_equal_three_plus_killed_plus_three_to_the_bit(tiny_model, tmp_path, forked):
    straight = sft(tiny_model, tmp_path / "straight", val_data=PAIRS[:3], **SIX)
    killed_after_four(settings(tiny_model, tmp_path / "killed", **SIX), forked)
    path = tmp_path / "killed" / "test" / "run"
    assert [line["step"] for line in metrics_of(path)] == [0, 1, 2, 3, 4]
    sft(tiny_model, tmp_path / "killed", val_data=PAIRS[:3], **SIX)
    same_to_the_bit(path, straight.path)


@pytest.mark.slow
def test_a_run_with_adapters_that_failed_goes_on_to_the_bit(tiny_model, tmp_path, monkeypatch):
    from posttrain.trainer.supervised.tasks import SFTTask

    more = {**SIX, "model__lora_rank": 4, "trainer__val_before_train": False}
    straight = sft(tiny_model, tmp_path / "straight", **more)
    plain, left = SFTTask.train_step, [4]

    def failing(self, rows):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("the power went")
        return plain(self, rows)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power"):
        patch.setattr(SFTTask, "train_step", failing)
        sft(tiny_model, tmp_path / "failed", **more)
    path = tmp_path / "failed" / "test" / "run"
    assert any((path / "crash").iterdir()) and json.loads((path / "status.json").read_text())["status"] == "failed"
    sft(tiny_model, tmp_path / "failed", **more)
    same_to_the_bit(path, straight.path)


def test_the_keys_of_document_4(tiny_model, tmp_path):
    """20 rows, 3 epochs, 2 rows per pass x 4 passes = 8 rows per step: 3 x 3 steps."""
    more = {
        "model__enable_gradient_checkpointing": True,
        "training__learning_rate": 2e-3,
        "training__num_train_epochs": 3,
        "training__per_device_train_batch_size": 2,
        "training__gradient_accumulation_steps": 4,
        "fsdp__strategy": "fsdp2",
        "optim__lr_warmup_steps": 2,
        "optim__lr_scheduler_type": "constant",
        "trainer__total_training_steps": None,
    }
    wanted = settings(tiny_model, tmp_path, **more)
    for key in ("data.train_batch_size", "optim.lr"):
        del wanted[key]
    result = fsdp_sft_trainer.run_sft(wanted, data=PAIRS)
    lines = metrics_of(result.path)
    assert [line["train/rows"] for line in lines] == [8, 8, 4] * 3
    assert [line["train/lr"] for line in lines] == [1e-3, *[2e-3] * 8]
    assert lines[-1]["train/epoch"] == 3.0
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]


def test_results_do_not_depend_on_passes_and_packing(tiny_model, tmp_path):
    layouts = [
        {},
        {"data__micro_batch_size_per_gpu": 1},
        {"data__max_token_len_per_gpu": 40},
        {"model__use_remove_padding": False},
        {"model__enable_gradient_checkpointing": True},
    ]
    found = []
    for number, layout in enumerate(layouts):
        run = sft(tiny_model, tmp_path / str(number), val_data=PAIRS[:5], model__dtype="float64", **layout)
        found.append([value for line in metrics_of(run.path) for value in line.values()])
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-9)


def test_validation_gives_the_loss_and_perplexity_of_held_out_rows_every_test_freq(tiny_model, tmp_path):
    run = sft(tiny_model, tmp_path, val_data=TALKS, data=TALKS, **{**SIX, "trainer__test_freq": 4})
    with_val = {line["step"]: line for line in metrics_of(run.path) if "val/loss" in line}
    assert list(with_val) == [0, 4, 6]
    for line in with_val.values():
        assert line["val/perplexity"] == pytest.approx(float(torch.tensor(line["val/loss"]).exp()), rel=1e-5)
    assert with_val[6]["val/loss"] < with_val[0]["val/loss"]
    trained = sum(len(TALKS[a]["messages"][i]["content"]) + 1 for a in range(len(TALKS)) for i in (1, 3))
    assert with_val[0]["val/trained_tokens"] == trained  # bytes, and one token that ends each turn


def test_the_exported_folder_is_the_trained_model_with_its_chat_template(tiny_model, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = sft(tiny_model, tmp_path, trainer__export_hf="last", model__lora_rank=2)
    folder = run.path / "checkpoints" / "global_step_2" / "huggingface"
    said = capsys.readouterr().out
    assert f"The trained model is in {folder}" in said and "of them trained" in said
    model, before = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, tiny_model))
    changed = [n for n, w in model.named_parameters() if not torch.equal(w, before.get_parameter(n))]
    assert changed and all("proj" in name for name in changed)
    templates = [AutoTokenizer.from_pretrained(path).chat_template for path in (folder, tiny_model)]
    assert templates[0] == templates[1]


def test_adapters_on_modules_that_do_not_exist_are_refused_with_those_that_do(tiny_model, tmp_path):
    from posttrain.errors import UserError

    with pytest.raises(UserError, match=r"model\.target_modules=\['nothing'\][\s\S]*Linear modules.*q_proj"):
        sft(tiny_model, tmp_path, model__lora_rank=2, model__target_modules=["nothing"])


def test_start_and_end_are_said_in_plain_words(tiny_model, tmp_path, capsys):
    run = sft(tiny_model, tmp_path, val_data=PAIRS[:2], trainer__profile_steps=[2])
    assert [path.name for path in (run.path / "traces").iterdir()] == ["step_2.json.gz"]
    said = capsys.readouterr().out
    assert "SFT: 2 optimizer steps on 20 rows (prompts with responses)" in said
    assert "2 rows are held out" in said and "step 2/2: loss" in said
    assert "validation before: loss" in said and f"The run is in {run.path}" in said
    assert (run.path / "logs" / "run.log").read_text().count("step 2/2") == 1
    assert json.loads((run.path / "status.json").read_text())["status"] == "finished"


def test_a_signal_saves_and_the_same_command_goes_on(tiny_model, tmp_path, monkeypatch):
    from posttrain.trainer.supervised.tasks import SFTTask

    plain = SFTTask.train_step

    def interrupted(self, rows):
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(SFTTask, "train_step", interrupted)
        stopped = sft(tiny_model, tmp_path)
    assert (stopped.status, stopped.steps, stopped.exit_status) == ("stopped", 1, 128 + signal.SIGTERM)
    assert sft(tiny_model, tmp_path).steps == 2


def test_updates_that_are_not_finite_stop_the_run(tiny_model, tmp_path, monkeypatch):
    from posttrain.trainer.run.result import TrainingStopped
    from posttrain.workers import supervised as worker

    bad = {"loss": float("nan"), "grad_norm": 0.0, "lr": 0.0, "skipped": 1.0}
    monkeypatch.setattr(worker, "sft_step", lambda *_: bad)
    with pytest.raises(TrainingStopped, match=r"2 steps in a row.*max_bad_steps.*optim\.lr"):
        sft(tiny_model, tmp_path, trainer__max_bad_steps=2)


WRONG = {
    "unknown key": (["model.pth=x"], "Unknown key `model.pth`.*did you mean `model.path`"),
    "RL's key": (["actor_rollout_ref.actor.optim.lr=1"], "settings of RL"),
    "a key of RL": (
        ["algorithm.adv_estimator=grpo"],
        r"it is a key of `posttrain\.trainer\.main_ppo` \(RL\), not of this",
    ),
    "a key of reward models": (["data.chosen_key=x"], "it is a key of `posttrain reward-model`"),
    "nothing near": (["zzz.qqq=1"], "sections are `data`, .*`posttrain config sft` lists every key"),
    "no arguments": ([], r"nothing to train.*model\.path=embedded"),
    "missing file": (["data.train_files=no.parquet"], "no.parquet does not exist"),
    "missing model": (["model.path=./nowhere"], "nowhere does not exist"),
    "choice": (["data.truncation=middle"], "error, drop, left, right"),
    "range": (["optim.lr=-1"], r"optim\.lr=-1.* out of range"),
    "both sizes": (
        ["data.train_batch_size=7", "training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=2"],
        r"means `data\.train_batch_size=4`, but `data\.train_batch_size=7`",
    ),
    "accumulation alone": (["training.gradient_accumulation_steps=2"], "per_device_train_batch_size"),
    "workers": (["trainer.n_gpus_per_node=999"], "asks for 999 workers"),
    "no such adapter": (["model.lora_adapter_path=x"], r"`model\.lora_adapter_path`: the folder .*x does not exist"),
    "4 bits of all weights": (["model.quantization=nf4"], "weights of 4 bits cannot be trained"),
    "4 bits in float64": (
        ["model.quantization=nf4", "model.lora_rank=4", "model.dtype=float64"],
        "in float32 or bfloat",
    ),
    "other bits": (["model.quantization=int3", "model.lora_rank=4"], "known: nf4"),
    "sequence parallel": (["ulysses_sequence_parallel_size=2"], "does not divide the 1 worker"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_commands_are_explained_before_a_model_is_loaded(case, capsys, monkeypatch, tmp_path):
    import re

    monkeypatch.chdir(tmp_path)
    args, message = WRONG[case]
    assert fsdp_sft_trainer.main(args) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
    assert not list(tmp_path.iterdir())


def test_torchruns_uneven_machines_are_refused_and_one_process_is_a_plain_start(tiny_model, tmp_path, monkeypatch):
    for name, value in {"WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"torchrun started 5 processes in all and 2 on this"):
        sft(tiny_model, tmp_path)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert sft(tiny_model, tmp_path, trainer__total_training_steps=1).steps == 1


def test_the_command_prints_its_settings(capsys):
    from posttrain.cli import main

    assert main(["sft", "training.learning_rate=2e-5", "--cfg", "job"]) == 0
    assert "lr: 2.0e-05" in capsys.readouterr().out
    assert main(["sft", "data.multiturn=true", "data.messages_key=chat", "--help"]) == 0
    said = capsys.readouterr().out
    assert "usage: posttrain sft" in said and "data.multiturn.messages_key: chat" in said
    assert "data.multiturn.enable: true    # command line, written `data.multiturn`" in said


def test_rows_longer_than_learned_positions_are_refused(tiny_model, tmp_path):
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    from posttrain.models.loading import ModelError

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    shape = GPT2Config(vocab_size=len(tokenizer), n_positions=8, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(shape).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ModelError, match=r"longest row has \d+ tokens, but .* positions for 8 only; lower data\.max_l"):
        sft(tmp_path / "gpt2", tmp_path)
