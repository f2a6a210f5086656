"""Small supervised runs in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from posttrain.checkpoint.manager import CheckpointManager
from posttrain.trainer.fsdp_sft_trainer import run_sft
from posttrain.trainer.reward_model_trainer import run_reward_model

TIMES = ("time", "timing_", "perf/time", "perf/throughput")
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
PAIRS = [{"prompt": f"{a} + {b}", "response": str(a + b)} for a in range(4) for b in range(5)]
TALKS = [
    {
        "messages": [
            {"role": "user", "content": f"{a}?"},
            {"role": "assistant", "content": WORDS[a]},
            {"role": "user", "content": "and then?"},
            {"role": "assistant", "content": WORDS[a + 1]},
        ]
    }
    for a in range(9)
]
PREFERENCES = [
    {"prompt": f"{a} + {b}", "chosen": str(a + b), "rejected": str(a + b + 1 + b)} for a in range(4) for b in range(4)
]


def settings(model: Path, out: Path, **more: Any) -> dict[str, Any]:
    """Two steps of 8 rows; `more` holds dotted keys with __ for the dots."""
    base: dict[str, Any] = {
        "model.path": str(model),
        "data.train_batch_size": 8,
        "data.max_length": 64,
        "optim.lr": 1e-3,
        "trainer.total_training_steps": 2,
        "trainer.device": "cpu",
        "trainer.default_local_dir": str(out),
        "trainer.project_name": "test",
        "trainer.experiment_name": "run",
        "trainer.export_hf": "none",
    }
    return base | {key.replace("__", "."): value for key, value in more.items()}


def sft(model: Path, out: Path, data: Any = PAIRS, val_data: Any = None, **more: Any) -> Any:
    return run_sft(settings(model, out, **more), data=data, val_data=val_data)


def reward_model(model: Path, out: Path, data: Any = PREFERENCES, val_data: Any = None, **more: Any) -> Any:
    return run_reward_model(settings(model, out, **more), data=data, val_data=val_data)


def metrics_of(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock decides."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines]


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of the newest checkpoint."""
    manager = CheckpointManager(path / "checkpoints")
    newest = manager.newest()
    assert newest is not None
    found = manager.describe(newest, "model")
    into = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in found.items()}
    manager.load_tensors(newest, "model", into)
    return into
