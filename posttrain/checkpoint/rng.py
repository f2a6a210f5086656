"""The process's random number generators as tensors, so that a resumed run draws what the straight run would have."""

from __future__ import annotations

import random

import numpy as np
import torch


def capture_rng() -> dict[str, torch.Tensor]:
    """The states of Python's, NumPy's and torch's global generators, for `CheckpointManager.save(rng=...)`."""
    _, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict) and numpy_state["bit_generator"] == "MT19937"
    state = {
        "python.words": torch.tensor(words, dtype=torch.int64),
        "python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy.key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy.pos": torch.tensor([numpy_state["state"]["pos"], numpy_state["has_gauss"]], dtype=torch.int64),
        "numpy.gauss": torch.tensor([numpy_state["gauss"]], dtype=torch.float64),
        "torch.cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state |= {f"torch.cuda.{i}": one for i, one in enumerate(torch.cuda.get_rng_state_all())}
    return state


def restore_rng(state: dict[str, torch.Tensor]) -> None:
    """Put the generators back; states of CUDA devices that this machine does not have are left out."""
    gauss = state["python.gauss"].tolist()
    random.setstate((3, tuple(state["python.words"].tolist()), gauss[0] if gauss else None))
    position, has_gauss = state["numpy.pos"].tolist()
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": state["numpy.key"].numpy().astype(np.uint32), "pos": position},
            "has_gauss": has_gauss,
            "gauss": state["numpy.gauss"].item(),
        }
    )
    torch.set_rng_state(state["torch.cpu"])
    for index in range(torch.cuda.device_count()):
        if f"torch.cuda.{index}" in state:
            torch.cuda.set_rng_state(state[f"torch.cuda.{index}"], index)
