"""PromptSampler: chooses the rows of the next batch; its state can be saved and restored exactly.

An order is a function `order(dataset, config, seed, epoch)` that returns the row numbers of one epoch. It depends only
on its arguments, so epoch and position are the whole state of a sampler.
"""

from __future__ import annotations

import inspect
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from posttrain.config.trainer import DataConfig
from posttrain.data.dataset import PromptDataset
from posttrain.data.own_dataset import as_tree, load_named
from posttrain.data.rows import DataError
from posttrain.registry import Registry

EpochOrder = Callable[[int], Sequence[int] | np.ndarray]
DatasetOrder = Callable[[PromptDataset, DataConfig, int, int], Sequence[int] | np.ndarray]
SAMPLERS: Registry[DatasetOrder] = Registry("sampler")


def register_sampler(name: str) -> Callable[[DatasetOrder], DatasetOrder]:
    """Register an order as `data.sampler=NAME`. Example: `@register_sampler("mine")` above a function."""
    return SAMPLERS.register(name)


class PromptSampler:
    """Endless batches of row numbers, epoch after epoch.

    `order(epoch)` returns the rows of an epoch; by default they are `range(n)`, shuffled by (seed, epoch). Rows that do
    not fill the last batch of an epoch are skipped, or form a smaller batch with `drop_last=False`.
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        order: EpochOrder | None = None,
    ) -> None:
        self.n, self.batch_size, self.drop_last = n, batch_size, drop_last
        self._order_of = order or (lambda epoch: shuffled(n, seed, epoch) if shuffle else np.arange(n))
        # Epoch of the latest batch, from 0.
        self.epoch = 0
        self._position = 0
        self._repeated: list[int] = []
        self.is_repeating = False  # whether the latest batch consists of rows given to `repeat`
        self._order = self._checked_order(0)
        if batch_size < 1 or self.batches_per_epoch == 0:
            raise ValueError(f"a batch of {batch_size} rows cannot be drawn from an epoch of {len(self._order)}")

    @property
    def batches_per_epoch(self) -> int:
        full, rest = divmod(len(self._order), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def next_batch(self) -> list[int]:
        """Return the row numbers of the next batch; starts the next epoch when this one is used up."""
        self.is_repeating = bool(self._repeated)
        if self._repeated:
            batch, self._repeated = self._repeated, []
            return batch
        # With drop_last an epoch ends before a partial batch.
        least = self.batch_size if self.drop_last else 1
        if self._position + least > len(self._order):
            self.epoch, self._position = self.epoch + 1, 0
            self._order = self._checked_order(self.epoch)
        batch = self._order[self._position : self._position + self.batch_size]
        self._position += len(batch)
        return batch.tolist()

    def repeat(self, rows: Sequence[int]) -> None:
        """Make the next batch of these rows alone, in turn until it is full; the epoch continues after it."""
        self._repeated = [rows[place % len(rows)] for place in range(self.batch_size)]

    def state_dict(self) -> dict[str, Any]:
        # The order itself is not saved, because it follows from the epoch; its checksum shows whether it still does.
        state = {"epoch": self.epoch, "position": self._position, "order_crc": _crc(self._order)}
        return state | ({"repeated": self._repeated} if self._repeated else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; raises if the rows would come in another order than before."""
        order = self._checked_order(state["epoch"])
        if _crc(order) != state["order_crc"]:
            raise DataError(
                f"The data cannot be continued where the checkpoint stood: the rows of epoch {state['epoch']} come in "
                "another order. The data files, data.seed, data.shuffle, data.sampler or data.train_weights have "
                "changed since; restore them, or start a new run."
            )
        # Set only after the check: a sampler that refused a state is unchanged.
        self.epoch, self._position, self._order = state["epoch"], state["position"], order
        self._repeated = state.get("repeated", [])

    def _checked_order(self, epoch: int) -> np.ndarray:
        order = np.asarray(self._order_of(epoch), dtype=np.int64)
        if order.ndim != 1 or len(order) == 0 or order.min() < 0 or order.max() >= self.n:
            raise DataError(
                f"The sampler's order of epoch {epoch} must be a list of row numbers from 0 to {self.n - 1}."
            )
        # The number of steps of a run is planned from the first epoch.
        if hasattr(self, "_order") and len(order) != len(self._order):
            raise DataError(
                f"The sampler gave {len(order)} rows in epoch {epoch}, but {len(self._order)} in an earlier one."
            )
        return order


def make_sampler(
    dataset: PromptDataset, config: DataConfig, *, batch_size: int, seed: int, drop_last: bool = True
) -> PromptSampler:
    """Return the sampler that `data.sampler` names, for this data set; `seed` applies if `data.seed` is null."""
    if config.sampler not in SAMPLERS and ":" not in config.sampler:
        raise DataError(
            f"data.sampler is '{config.sampler}'; known are {', '.join(sorted(SAMPLERS))} (and those you register)."
        )
    order = SAMPLERS.get(config.sampler) or own_order(config.sampler)
    seed = seed if config.seed is None else config.seed
    return PromptSampler(
        len(dataset), batch_size, drop_last=drop_last, order=lambda epoch: order(dataset, config, seed, epoch)
    )


def own_order(place: str) -> DatasetOrder:
    """The order of `FILE.py:NAME`: a function like those that are registered, or a class of torch's samplers."""
    make: Any = load_named(place, "data.sampler")
    if inspect.isfunction(make):
        return make
    if callable(getattr(make, "update", None)):
        raise DataError(
            f"data.sampler={place}: its `update` would change the order by what was trained, and a resumed run could "
            "not repeat that. Give an order that depends on the rows, the seed and the epoch."
        )

    def order(dataset: PromptDataset, config: DataConfig, seed: int, epoch: int) -> list[int]:
        # Made anew in each epoch, with random numbers of its own: a resumed run has the same order.
        with seeded(zlib.crc32(f"{seed} {epoch}".encode())):
            sampler = make(data_source=dataset, data_config=as_tree(config))
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            return [int(row) for row in sampler]

    return order


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of Python, numpy and torch follow from the seed here, and continue as before behind it."""
    kept, kept_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(kept)
            np.random.set_state(kept_numpy)


def sequential_batches(n: int, batch_size: int | None = None) -> Iterator[list[int]]:
    """Yield all rows once, in order, for validation; in one batch without `batch_size`."""
    size = batch_size or n
    for start in range(0, n, size):
        yield list(range(start, min(start + size, n)))


def shuffled(n: int, *seeds: int) -> np.ndarray:
    """Return a permutation of `range(n)` that depends only on the seeds."""
    # RandomState, because numpy promises never to change its streams: runs resume across versions.
    return np.random.RandomState([seed % 2**32 for seed in seeds]).permutation(n)


@register_sampler("default")
def default_order(dataset: PromptDataset, config: DataConfig, seed: int, epoch: int) -> np.ndarray:
    """Every row once per epoch, or as often as `data.train_weights` says; shuffled unless `data.shuffle=false`."""
    if config.train_weights is not None and dataset.split == "train":
        rows = weighted_rows(dataset.file_of, file_weights(dataset, config.train_weights), seed, epoch)
    else:
        rows = np.arange(len(dataset))
    return rows[shuffled(len(rows), seed, epoch)] if config.shuffle else rows


@register_sampler("curriculum")
def curriculum_order(dataset: PromptDataset, config: DataConfig, seed: int, epoch: int) -> np.ndarray:
    """Easy rows first, by the column `data.curriculum_key`; ties keep the order of the files, in every epoch."""
    if config.train_weights is not None:
        raise DataError("data.train_weights has no effect with data.sampler=curriculum; remove one of the two.")
    key = config.curriculum_key
    values = dataset.column(key)
    for item, value in zip(dataset, values, strict=True):
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise DataError(
                f"data.sampler=curriculum sorts by the column '{key}' (data.curriculum_key), which must hold a number "
                f"in every row; row {item['index'] + 1} of the data has {value!r}."
            )
    return np.argsort(np.asarray(values), kind="stable")


def file_weights(dataset: PromptDataset, weights: Sequence[float]) -> list[float]:
    """Return `data.train_weights`, checked against the files of the data set."""
    if len(weights) != len(dataset.files):
        raise DataError(
            f"data.train_weights has {len(weights)} weights for {len(dataset.files)} files; give one per file."
        )
    if not all(0 <= weight < float("inf") for weight in weights) or not any(weights[file] for file in dataset.file_of):
        raise DataError(f"data.train_weights is {list(weights)}; weights are 0 or more, and not all of them 0.")
    return [float(weight) for weight in weights]


def weighted_rows(file_of: Sequence[int], weights: Sequence[float], seed: int, epoch: int) -> np.ndarray:
    """Return as many rows as there are, each drawn in proportion to its file's weight, in the order of the files.

    A row's expected number of draws w / mean(w) is split: every row of the file gets the integer part, and rows chosen
    by (seed, epoch, file) get the rest. So equal weights give every row once.
    """
    files = np.asarray(file_of)
    members = [np.flatnonzero(files == file) for file in range(len(weights))]
    shares = np.array([weight * len(rows) for weight, rows in zip(weights, members, strict=True)])
    exact = shares / shares.sum() * len(files)
    counts = np.floor(exact + 1e-9).astype(int)
    # Rows lost to rounding down go to the files with the largest remainders, so that the epoch keeps its length.
    for file in np.argsort(counts - exact, kind="stable")[: len(files) - counts.sum()]:
        counts[file] += 1
    drawn = []
    for file, (rows, count) in enumerate(zip(members, counts.tolist(), strict=True)):
        if count:
            whole, rest = divmod(count, len(rows))
            chosen = rows[shuffled(len(rows), seed, epoch, file)[:rest]]
            drawn.append(np.sort(np.concatenate([np.repeat(rows, whole), chosen])))
    return np.concatenate(drawn)


def _crc(order: np.ndarray) -> int:
    return zlib.crc32(order.astype("<i8").tobytes())
