"""One-step-off training: the next step's responses are generated while this one trains.

    step 1: generate 1 | train on 1, generate 2 | sync
    step 2:              train on 2, generate 3 | sync         (2 was sampled before step 1's update)

Weights go to the rollout only when the batch under way is whole. So each batch is sampled by one policy, which is one
update older than the one that learns from it, and what is sampled depends on no clock: a run is the same every time,
and continues bit-for-bit from a checkpoint, which holds the batch.

The old policy of such a batch is the one that begins to learn from it, not the one that sampled it: clipping then holds
the policy near where it stands. Clipped around where it was, what the last update moved has no gradient any more, and a
run learns less (docs/layouts.md). The difference from the sampling policy is corrected by importance weights
(`algorithm.rollout_correction.rollout_is`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from posttrain.controller.group import WorkerGroup
from posttrain.protocol import DataProto
from posttrain.tracking.metrics import GENERATED_S
from posttrain.trainer.ppo.experience import Experience

FOLDER, AGE = "ahead", "rollout/age"


def staleness(batch: DataProto, version: int) -> dict[str, float]:
    """By how many updates the weights are newer that learn from these tokens than those that sampled them."""
    spans = [span for row in batch.non_tensor_batch["policy_versions"] for span in row]
    tokens = sum(count for _, count in spans)
    return {AGE: sum((version - sampled) * count for sampled, count in spans) / tokens if tokens else 0.0}


Stage = Callable[[str], AbstractContextManager[None]]  # names a stage of the step, and takes its time


class OneStepOff:
    """Holds the batch that is generated ahead of its step. Calls to `training` move it on while they are waited for;
    these workers must be others than those that generate."""

    def __init__(self, experience: Experience, stage: Stage, training: Iterable[WorkerGroup] = ()) -> None:
        self.experience, self._stage = experience, stage
        self.rows: DataProto | None = None
        self._asked: float | None = None  # when the responses were asked for; None where they are there
        for group in training:
            # One thread drives everything: while it waits for the trainer it polls the rollout, so that finished
            # responses go to the reward workers and the ranks that generate never stand idle.
            group.meanwhile = experience.poll_until

    @property
    def is_empty(self) -> bool:
        return self.rows is None

    def start(self, prompts: DataProto, n: int) -> None:
        """Begin to generate the responses of the next step, without waiting for them."""
        self.rows, self._asked = self.experience.ask(prompts, n), time.perf_counter()
        self.experience.begin()

    def finish(self) -> None:
        """Wait for the responses that are under way. New weights may go to the rollout from here on."""
        # Called before every sync, also in synchronous runs: weights must not change under a batch that is generated.
        if self._asked is None or self.rows is None:
            return
        with self._stage("gen"):
            self.rows = self.experience.wait_for_responses(self.rows)
        self.rows.meta_info[GENERATED_S] = self.experience.last_ended - self._asked
        self._asked = None

    def take(self) -> DataProto | None:
        """The batch with its responses, which `finish` has waited for, if one was asked for."""
        rows, self.rows = self.rows, None
        return rows

    # -- checkpoints ----------------------------------------------------------------------------------------------
    def save(self, folder: Path) -> None:
        """Write the batch into a checkpoint's folder, with its scores: the reward workers end with the run."""
        if self.rows is not None:
            if "reward_score" not in self.rows.non_tensor_batch:
                self.experience.wait_for_scores(self.rows)
            self.rows.save_to_disk(folder / FOLDER)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote into a checkpoint that was verified."""
        self.rows = DataProto.load_from_disk(folder / FOLDER).set_decoder(self.experience.decode)
