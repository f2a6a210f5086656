"""Samplers of one's own: `data.sampler.class_path=FILE.py data.sampler.class_name=CLASS`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sized
from typing import Any

from torch.utils.data import Sampler


class AbstractSampler(Sampler[int]):
    """Gives the numbers of an epoch's rows. It is made anew in each epoch, with random numbers that follow from the
    run's seed; `set_epoch(epoch)` is called if there is one."""

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Any) -> None:
        """`data_source` has the rows."""
