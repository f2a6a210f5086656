"""`posttrain plan sft` and `plan reward-model`: the figures against real runs, and what the command prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posttrain import cli
from posttrain.config import load_config
from posttrain.config.trees import REWARD_MODEL, SFT
from posttrain.data.chat import TrainedRow
from posttrain.data.supervised import Pair
from posttrain.doctor.plan_command import report
from posttrain.planning import cuda_bytes
from posttrain.planning.counting import LiveBytes
from posttrain.planning.memory_plan import GIB, WORKSPACES, Device, Plan, find_remedies
from posttrain.planning.supervised import SupervisedPlanner
from posttrain.trainer.supervised.tasks import PairTask, SFTTask, pair_batch, sft_batch

CPU = Device("cpu", 16 * GIB, "the CPU")
GPU = Device("cuda", 80 * GIB, "a GPU of 80 GiB")
TREES = {"sft": SFT, "reward-model": REWARD_MODEL}
ROWS, LENGTH = 8, 64
CASES = {
    "float32": {"model.dtype": "float32"},
    "bfloat16": {"model.dtype": "bfloat16"},
    "lora": {"model.dtype": "bfloat16", "model.lora_rank": 4},
    "checkpointing": {"model.enable_gradient_checkpointing": True},
}


def config_of(kind: str, model: Path, **more: Any) -> Any:
    """A step of two passes of 8 rows (of 4 pairs); keyword arguments have __ for the dots."""
    batch = {"sft": 2 * ROWS, "reward-model": ROWS}[kind]
    base = {"model.path": str(model), "data.train_files": "x.json", "data.val_files": "x.json"}
    base |= {"data.train_batch_size": batch, "data.max_length": LENGTH, "data.max_token_len_per_gpu": ROWS * LENGTH}
    return load_config(base | {key.replace("__", "."): value for key, value in more.items()}, tree=TREES[kind]).config


def planned(kind: str, model: Path, device: Device = CPU, **more: Any) -> Plan:
    return SupervisedPlanner().plan(config_of(kind, model, **more), device)


class Data(list):
    """Rows of the full length, all of them trained."""


def real_task(kind: str, config: Any) -> tuple[Any, Any, Any]:
    """(task, batch of a whole step, its loss)."""
    rng = np.random.default_rng(0)
    tokenizer = type("Tokenizer", (), {"pad_token_id": 0})
    count = 2 * ROWS
    ids = rng.integers(1, 250, size=(count, LENGTH))
    ids[:, 0] = np.arange(count) + 1  # no two rows begin alike, so that nothing is shared
    rows = ids.tolist()
    make = {"sft": SFTTask, "reward-model": PairTask}[kind]
    task = make(config, tokenizer=tokenizer, train=Data(rows), val=None, device=torch.device("cpu"), total_steps=2)
    if kind == "sft":
        batch = sft_batch([TrainedRow(row, [False] + [True] * (LENGTH - 1)) for row in rows], 0)
        return task, batch, lambda micro, out: -(micro.batch["loss_weights"] * out["log_probs"]).sum()
    pairs = [Pair(chosen, rejected, 0.0) for chosen, rejected in zip(rows[::2], rows[1::2], strict=True)]
    return task, pair_batch(pairs, 0), lambda micro, out: (out["scores"][::2] - out["scores"][1::2]).sum()


def size(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors if tensor is not None)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", TREES)
def test_the_plan_is_what_a_real_step_takes(tiny_model, kind, case):
    """Weights, gradients and optimizer state to the byte, the peak of update within 5%, of validation within 10%."""
    config = config_of(kind, tiny_model, **CASES[case])
    plan = SupervisedPlanner().plan(config, CPU)
    task, batch, loss = real_task(kind, config)
    engine = task.group.worker.engine
    optimizer = engine.optimizer
    assert len(engine.runner.plan(batch)) == 2  # passes, each as large as the plan's
    engine.runner.gradients(batch, loss, 1.0)
    gradients = size(master.grad for master in optimizer.masters)
    with LiveBytes(engine.module) as live:
        engine.runner.gradients(batch, loss, 1.0)
    update = plan.stages["update"]
    passing = sum(update[part] for part in ("model gradients", "model activations", "temporary tensors"))
    assert passing == pytest.approx(live.peak, rel=0.05)  # the second pass adds to the sums that the first left
    optimizer.step(grad_clip=1.0, total_steps=2)
    masters = [m for m, w in zip(optimizer.masters, optimizer.weights, strict=True) if m is not w]
    moments = [optimizer.adam.state[m][name] for m in optimizer.masters for name in ("exp_avg", "exp_avg_sq")]
    assert update["model weights"] == size(engine.module.parameters()) > 0
    assert update["model gradients"] == plan.stages["step"]["model gradients"] == gradients > 0
    assert update["model optimizer"] == size([*masters, *moments]) > 0
    with LiveBytes(engine.module) as live:
        engine.log_probs(batch) if kind == "sft" else engine.scores(batch)
    assert plan.stages["validation"]["temporary tensors"] == pytest.approx(live.peak, rel=0.1)


@pytest.mark.parametrize("kind", TREES)
def test_every_setting_that_memory_depends_on_has_its_effect(tiny_model, kind):
    whole = planned(kind, tiny_model, GPU)
    assert list(whole.stages) == ["load", "validation", "update", "step"]
    assert list(planned(kind, tiny_model, GPU, data__val_files=None).stages) == ["load", "update", "step"]
    activations = whole.largest("model activations")
    half = planned(kind, tiny_model, GPU, data__max_token_len_per_gpu=ROWS * LENGTH // 2)
    assert half.largest("model activations") == pytest.approx(activations / 2, rel=0.02)
    rows = {"sft": 2, "reward-model": 1}[kind]  # a pair is two rows
    few = planned(kind, tiny_model, GPU, data__micro_batch_size_per_gpu=rows)
    assert few.largest("model activations") == pytest.approx(activations / 4, rel=0.05)
    light = planned(kind, tiny_model, GPU, model__enable_gradient_checkpointing=True)
    assert light.largest("model activations") < 0.2 * activations
    assert light.peak("update") - WORKSPACES < 0.8 * (whole.peak("update") - WORKSPACES)
    lora = planned(kind, tiny_model, GPU, model__lora_rank=2)
    assert lora.largest("model optimizer") < 0.3 * whole.largest("model optimizer")
    four_workers = {"trainer__n_gpus_per_node": 4}
    four = planned(kind, tiny_model, GPU, **four_workers)
    assert four.largest("model optimizer") == pytest.approx(whole.largest("model optimizer") / 4, abs=4)
    single = planned(kind, tiny_model, GPU, data__train_batch_size=4, data__max_token_len_per_gpu=10**6)
    assert single.stages["update"]["model gradients"] > 0  # sums are opened before the first pass
    ranks = planned(kind, tiny_model, GPU, data__train_batch_size=16, data__max_token_len_per_gpu=10**6, **four_workers)
    assert ranks.stages["update"]["model gradients"] == 0  # bfloat16 and one pass: they go to the masters after it


@pytest.mark.parametrize("kind", TREES)
def test_a_base_of_4_bits_takes_a_quarter_of_bfloat16_and_room_for_one_matrix(tiny_model, kind, monkeypatch):
    """Both counted by transformers' layers, which a base of 4 bits takes."""
    monkeypatch.setattr(cuda_bytes, "sizes_of", lambda model: None)
    lora = planned(kind, tiny_model, GPU, model__lora_rank=2)
    qlora = planned(kind, tiny_model, GPU, model__lora_rank=2, model__quantization="nf4")
    layers = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64)  # numbers in the linear layers of two blocks
    saved = lora.largest("model weights") - qlora.largest("model weights")
    assert 2 * layers * 0.74 < saved < 2 * layers * 0.75
    assert qlora.largest("model optimizer") == lora.largest("model optimizer")
    for stage, more in (("validation", 2 * 32 * 64), ("update", 2 * 32 * 64), ("step", 0)):
        assert qlora.stages[stage]["temporary tensors"] - lora.stages[stage]["temporary tensors"] == more, stage


def test_the_remedies_are_tried_and_named_with_their_values(tiny_model):
    config, planner = config_of("sft", tiny_model), SupervisedPlanner()
    plan = planner.plan(config, GPU)
    text = report(config, plan, find_remedies(config, plan, planner))
    for words in (
        "model.enable_gradient_checkpointing=False: with True, update takes",
        "data.max_token_len_per_gpu=512: ",
    ):
        assert words in text
    assert f"Memory plan of {tiny_model} with sft, for a GPU of 80 GiB." in text
    assert f"Largest micro-batch: 8 rows x {LENGTH} tokens, of 16 rows of a step." in text


@pytest.mark.slow
def test_the_command_prints_the_plan_of_both_trainers(tiny_model, capsys):
    args = [f"model.path={tiny_model}", "data.train_files=x.json", "data.max_length=64", "data.train_batch_size=8"]
    assert cli.main(["plan", "--gpu_gb", "80", "sft", *args]) == 0
    shown = capsys.readouterr().out
    assert "with sft, for a GPU of 80 GiB" in shown and "model activations" in shown and "It fits" in shown
    assert cli.main(["plan", "reward-model", *args, "--gpu_gb", "0.001"]) == 0
    assert "data.max_token_len_per_gpu was not set: by the memory plan" in capsys.readouterr().out
    args.append("data.max_token_len_per_gpu=16384")
    assert cli.main(["plan", "reward-model", *args, "--gpu_gb", "0.001"]) == 1
    shown = capsys.readouterr().out
    assert "with pairs (reward model)" in shown and "16 rows x 64 tokens" in shown and "It does not fit" in shown
    assert cli.main(["plan", "sft", "model.lora_rnak=4"]) == 2
    assert "did you mean `model.lora_rank`" in capsys.readouterr().err
    assert cli.main(["plan", "reward_model", "--gpu_gb", "8"]) == 0  # of the embedded model
    assert "Memory plan of embedded" in capsys.readouterr().out
