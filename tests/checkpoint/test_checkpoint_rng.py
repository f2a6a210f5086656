"""The random number generators continue where they were."""

from __future__ import annotations

import random

import numpy as np
import torch

from posttrain.checkpoint import CheckpointManager, capture_rng, restore_rng


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.randn(1).item(),
    ]


def test_generators_continue_after_a_save_and_load(tmp_path):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    random.gauss(0, 1), np.random.randn()  # leaves half of a pair waiting in both
    manager = CheckpointManager(tmp_path)
    path = manager.save(1, tensors={}, state={}, rng=capture_rng())
    expected = [draw() for _ in range(3)]
    random.seed(2), np.random.seed(2), torch.manual_seed(2)
    assert draw() != expected[0]
    restore_rng(manager.load_rng(path))
    assert [draw() for _ in range(3)] == expected
