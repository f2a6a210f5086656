"""Dynamic sampling: prompts are drawn and answered until a batch of groups whose responses differ is full.

A group whose rewards are all equal has advantages of 0 and teaches nothing. What is generated beyond the batch is kept
for the next step (and saved with the checkpoint), so that no signal is thrown away.

Source: DAPO, arXiv 2503.14476.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.algorithms.reward_terms import finite_number
from posttrain.batch.compact import row_sums
from posttrain.batch.samples import BRANCH_FIELDS, last_rows
from posttrain.config.root import FilterGroupsConfig
from posttrain.errors import UserError
from posttrain.protocol import DataProto
from posttrain.tracking.metrics import groups_of, right_answers

FOLDER = "surplus"


class FilterError(UserError):
    """The groups cannot be filtered by the metric that was named."""


class GroupFilter:
    """Fills batches with groups that have a signal; `surplus` waits for the next step."""

    def __init__(self, config: FilterGroupsConfig, failure_score: float = 0.0) -> None:
        self.config, self.failure_score = config, failure_score
        self.surplus: DataProto | None = None

    def fill(self, sample: Callable[[int], DataProto], prompts: int) -> tuple[DataProto, dict[str, float]]:
        """(a batch of `prompts` groups, metrics). `sample(k)` gives the step's k-th batch, scored, whole groups."""
        kept = [] if self.surplus is None else [self.surplus]
        spare: list[DataProto] = []
        made = seen = good = 0
        limit = self.config.max_num_gen_batches
        while _groups(kept) < prompts and (limit == 0 or made < limit):
            batch = sample(made)
            made += 1
            with_signal, without = self._divide(batch)
            seen, good = seen + len(with_signal) + len(without), good + len(with_signal)
            kept += _rows(batch, with_signal)
            spare += _rows(batch, without)
        missing = max(0, prompts - _groups(kept))
        if missing:  # the batch keeps its size: these have no gradient, as they would have without the filter
            kept += [_take(DataProto.concat(spare), 0, missing)]
        # Surplus of earlier steps comes first, so that it never grows stale.
        pool = DataProto.concat(with_same_fields(kept))
        metrics = {
            "filter_groups/gen_batches": float(made),
            "filter_groups/kept": good / seen if seen else 1.0,
            "filter_groups/missing": float(missing),
            "filter_groups/surplus": float(_groups([pool]) - prompts),
        }
        self.surplus = _take(pool, prompts, None) if _groups([pool]) > prompts else None
        return _take(pool, 0, prompts), metrics

    @property
    def groups(self) -> int:
        """In the surplus."""
        return 0 if self.surplus is None else _groups([self.surplus])

    def take_out(self, is_unwanted: Callable[[DataProto], bool]) -> DataProto | None:
        """The groups of the surplus that are not to be trained any more; None where there are none."""
        if self.surplus is None:
            return None
        groups = [list(rows) for rows in groups_of(self.surplus.non_tensor_batch["uid"])]
        out = [rows for rows in groups if is_unwanted(self.surplus[rows])]
        if not out:
            return None
        taken = self.surplus[[row for rows in out for row in rows]]
        kept = [row for rows in groups if rows not in out for row in rows]
        self.surplus = self.surplus[kept] if kept else None
        return taken

    def _divide(self, batch: DataProto) -> tuple[list[list[int]], list[list[int]]]:
        values_B = self._values(batch)[last_rows(batch)]  # the last row of a sample has its score
        groups = [list(rows) for rows in groups_of(batch.non_tensor_batch["uid"])]
        with_signal = [rows for rows in groups if np.ptp(values_B[rows]) > 0]
        return with_signal, [rows for rows in groups if not np.ptp(values_B[rows]) > 0]

    def _values(self, batch: DataProto) -> np.ndarray:
        """(B,) the metric of each response; one that has no number of that name counts as one that failed."""
        metric, fields = self.config.metric, batch.non_tensor_batch
        if metric in ("score", "seq_reward", "seq_final_reward"):
            return row_sums(batch, "token_level_scores")
        if metric == "acc":
            return right_answers(fields["reward_score"].astype(float), list(fields["reward_parts"])).astype(float)
        values = [finite_number(part.get(metric)) for part in fields["reward_parts"]]
        if all(value is None for value in values) and not _all_failed(batch):
            names = sorted({name for part in fields["reward_parts"] for name in part})
            raise FilterError(
                f"algorithm.filter_groups.metric={metric}: the reward gives no number of that name "
                f"(its parts: {', '.join(names) or 'none'}). Take score, acc, or one of them."
            )
        return np.array([self.failure_score if value is None else value for value in values])

    # -- checkpoints ----------------------------------------------------------------------------------------------
    @property
    def is_empty(self) -> bool:
        return self.surplus is None

    def save(self, folder: Path) -> None:
        """Write the surplus into a checkpoint's folder."""
        if self.surplus is not None:
            self.surplus.save_to_disk(folder / FOLDER)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote into a checkpoint that was verified."""
        self.surplus = DataProto.load_from_disk(folder / FOLDER)


def _rows(batch: DataProto, groups: list[list[int]]) -> list[DataProto]:
    # The rows of these groups as one part, without what belongs to the step they were sampled in.
    rows = [row for group in groups for row in group]
    if not rows:
        return []
    part = batch[rows]
    part.meta_info = {}
    return [part]


def with_same_fields(parts: list[DataProto]) -> list[DataProto]:
    """The parts, fit to be joined: those of a checkpoint may lack fields that the settings or the version of this run
    give."""
    if any("sampling_log_probs" in part.batch for part in parts):
        for part in parts:
            part.batch.setdefault("sampling_log_probs", part.batch["rollout_log_probs"])
    if any("seed" in part.non_tensor_batch for part in parts):
        for part in parts:  # checkpoints of earlier versions have no seeds
            part.non_tensor_batch.setdefault("seed", np.full(len(part), None))
    if any("dataset_row" in part.non_tensor_batch for part in parts):
        for part in parts:  # only asynchronous training numbers them
            part.non_tensor_batch.setdefault("dataset_row", np.full(len(part), None))
    if any("branch" in part.non_tensor_batch for part in parts):
        for part in parts:  # nor have they branches: their conversations have one row each
            for name in BRANCH_FIELDS:
                part.non_tensor_batch.setdefault(name, _objects(len(part), BRANCH_FIELDS[name]))
    return parts


def _objects(rows: int, value: Any) -> np.ndarray:
    made = np.empty(rows, dtype=object)
    made[:] = [value] * rows
    return made


def _all_failed(batch: DataProto) -> bool:
    # Whether no reward of the batch could be computed, so that nothing is known of its parts.
    errors = batch.non_tensor_batch.get("reward_error")
    return errors is not None and all(error is not None for error in errors)


def _groups(parts: list[DataProto]) -> int:
    return sum(len(groups_of(part.non_tensor_batch["uid"])) for part in parts)


def _take(data: DataProto, start: int, end: int | None) -> DataProto:
    groups = [list(rows) for rows in groups_of(data.non_tensor_batch["uid"])][start:end]
    return data[[row for rows in groups for row in rows]]
