"""Data sets of prompts."""

from verl._missing import not_given
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

__all__ = ["RLHFDataset", "collate_fn"]
__getattr__ = not_given(__name__)
