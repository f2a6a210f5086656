"""Supervised workers by torch's engine and by Megatron's, run once for all tests of `test_supervised_megatron.py`:

    python megatron_supervised_runs.py FOLDER MODEL

Ranks are forked after everything is imported. Each case writes what three optimizer steps left.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from forked_ranks import run_ranks
from sft_runs import PAIRS, PREFERENCES, metrics_of, reward_model, settings, sft, tensors

from posttrain.config import load_config
from posttrain.config.trees import REWARD_MODEL, SFT
from posttrain.controller.group import Calls
from posttrain.data.supervised import PairDataset, SFTDataset
from posttrain.engine.megatron.groups import leave_groups
from posttrain.engine.megatron.package import part
from posttrain.engine.ranks import this_rank, world_size
from posttrain.models.loading import load_tokenizer
from posttrain.trainer.supervised.tasks import pair_batch, sft_batch
from posttrain.workers.supervised import PairWorker, SFTWorker, join_steps, planned_step

CUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "torch": (1, {}),
    "one": (1, {"fsdp.strategy": "megatron"}),
    "tensor": (2, {"fsdp.strategy": "megatron", "fsdp.megatron_config.tensor_parallel_size": 2}),
    "pipeline": (2, {"fsdp.strategy": "megatron", "fsdp.megatron_config.pipeline_parallel_size": 2}),
    "data": (2, {"fsdp.strategy": "megatron"}),
}
"""Name -> (ranks, settings)."""
KINDS = {"sft": (SFT, SFTWorker, SFTDataset, PAIRS), "pairs": (REWARD_MODEL, PairWorker, PairDataset, PREFERENCES)}


def steps(kind: str, cut: str, folder: Path, model: Path) -> dict[str, Any]:
    """Three optimizer steps of a worker, as the group of its ranks plans and joins them."""
    tree, worker_class, dataset, rows = KINDS[kind]
    given = {**settings(model, folder), "model.dtype": "float64", "data.max_token_len_per_gpu": 60, **CUTS[cut][1]}
    given["trainer.n_gpus_per_node"] = world_size()
    config = load_config(given, provided=["data.train_files"], tree=tree).config
    tokenizer = load_tokenizer(config.model)
    worker = worker_class(config, tokenizer, torch.device("cpu"), total_steps=3)
    worker.init_model()
    group: Any = SimpleNamespace(world_size=world_size(), once=lambda name: getattr(worker, name)())
    data, losses, norms = dataset(rows, tokenizer, config.data, split="train"), [], []
    for step in range(3):
        chosen = [data[(5 * step + row) % len(data)] for row in range(8)]
        if kind == "sft":
            batch = sft_batch(chosen, int(tokenizer.pad_token_id))
        else:
            batch = pair_batch(chosen, worker.pad_token_id())
        calls: Calls = planned_step(group, batch)
        own = worker.update(*calls.arguments[this_rank()])
        results = [own]
        if world_size() > 1:
            results = [None] * world_size()
            torch.distributed.all_gather_object(results, own)
        joined = join_steps(results, calls)
        losses.append(joined["loss"])
        norms.append(joined["grad_norm"])
    weights = {name: weight.detach().clone() for name, weight in worker.engine.export_weights()}
    worker.export_hf(folder / f"exported {kind} {cut}")
    return {"losses": losses, "norms": norms, "weights": weights}


def whole_runs(kind: str, folder: Path, model: Path) -> dict[str, Any]:
    """Whole runs of the trainers: torch's engine, Megatron's, and Megatron's that was stopped and resumed."""
    run, rows = (sft, PAIRS) if kind == "sft" else (reward_model, PREFERENCES)
    more = {"trainer__total_training_steps": 4, "model__dtype": "float64", "val_data": rows[:4]}
    mega = {**more, "fsdp__strategy": "megatron"}
    found = {name: run(model, folder / f"{kind} {name}", **how) for name, how in (("torch", more), ("megatron", mega))}
    run(model, folder / f"{kind} again", **{**mega, "trainer__save_freq": 2, "trainer__max_ckpt_to_keep": 9})
    again = folder / f"{kind} again" / "test" / "run"
    resumed = run(
        model,
        folder / f"{kind} resumed",
        **mega,
        trainer__resume_mode="resume_path",
        trainer__resume_from_path=str(again / "checkpoints" / "global_step_2"),
    )
    ends = [tensors(path) for path in (found["megatron"].path, resumed.path)]
    same = ends[0].keys() == ends[1].keys() and all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    lines = {name: metrics_of(one.path) for name, one in found.items()}
    losses = {name: [line["train/loss"] for line in one if "train/loss" in line] for name, one in lines.items()}
    held_out = {name: [line["val/loss"] for line in one if "val/loss" in line] for name, one in lines.items()}
    named = "Train engine: megatron-core" in (found["megatron"].path / "logs" / "run.log").read_text()
    return {"losses": losses, "held_out": held_out, "resumed": same, "named": named}


def run_rank(rank: int, ranks: int, folder: Path, model: Path) -> None:
    for kind in KINDS:
        for cut, (count, _) in CUTS.items():
            if count == ranks:
                found = steps(kind, cut, folder, model)
                if rank == 0:
                    torch.save(found, folder / f"{kind} {cut}.pt")
                leave_groups()
        if ranks == 1:
            torch.save(whole_runs(kind, folder, model), folder / f"{kind} runs.pt")
            leave_groups()


if __name__ == "__main__":
    target, source = Path(sys.argv[1]), Path(sys.argv[2])
    for name in ("models.gpt", "models.gpt.gpt_layer_specs", "parallel_state", "transformer"):
        part(name)
    sys.exit(not all(run_ranks(ranks, run_rank, target, source) for ranks in (1, 2)))
