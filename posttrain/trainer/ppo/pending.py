"""Asynchronous training: responses of later steps are generated while a step trains (`trainer.max_staleness`).

With a bound of 1, which is one-step-off training:

    step 1: generate 1 | train on 1, generate 2 | sync
    step 2:              train on 2, generate 3 | sync         (2 was sampled before step 1's update)

With a bound of K, K batches are under way or wait, beside the one that trains. Prompts are asked for at the beginning
of a step, K steps before they are trained: so no token is more than K updates older than the policy that learns from
it. Groups are trained in the order in which they were asked for. A batch of the first responses that happen to be whole
would gain no time (every response has K steps either way), and would prefer short ones; `rollout.oversample` makes such
batches, for workloads with long tails.

Without partial rollout, weights go to the rollout only when all responses under way are whole: each response is sampled
by one policy, and what is sampled depends on no clock. With it, weights go there between two decode steps, and a
response may have tokens of several versions; the event log makes such a run repeatable (`events.py`).

The old policy of a batch is the one that begins to learn from it, not the one that sampled it: clipping then holds the
policy near where it stands. Clipped around where it was, what the last update moved has no gradient any more, and a run
learns less (docs/layouts.md). The difference from the sampling policy is corrected, token by token, by importance
weights (`algorithm.rollout_correction.rollout_is`).
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.config.root import PPOConfig
from posttrain.config.trainer import continues_responses
from posttrain.controller.group import WorkerGroup
from posttrain.errors import UserError
from posttrain.protocol import DataProto
from posttrain.tracking.metrics import GENERATED_S, groups_of
from posttrain.trainer.ppo.dynamic_sampling import with_same_fields
from posttrain.trainer.ppo.events import EngineClock, EventLog, Replay
from posttrain.trainer.ppo.experience import Experience
from posttrain.trainer.ppo.reward import keys_of

FOLDER, AGAIN = "ahead", "asked_again.json"
OVERSAMPLE = "actor_rollout_ref.rollout.oversample"
ROW = "dataset_row"  # the field with the number of a prompt's row in the data

Stage = Callable[[str], AbstractContextManager[None]]  # names a stage of the step, and takes its time


@dataclass
class Batch:
    """Rows that are under way, or that have their responses."""

    rows: DataProto
    asked: float | None = None  # when the responses were asked for; None where they are there


class PendingBatches:
    """Holds the batches that are generated before their steps, oldest first. Calls to `training` advance them while
    they are waited for; these workers must be others than those that generate.

    `bound` is the largest staleness; with 0 nothing is held, and there is no event log. A step takes the `prompts`
    groups that were asked for first, whatever the sizes of the batches: a checkpoint may come from a run with others.
    Groups that are too old are dropped, and their prompts are asked for `again`. With `rollout.oversample` there are
    `extra` groups under way, of which a step takes the first that are whole.
    """

    events: EventLog | None = None  # of an asynchronous run

    def __init__(
        self,
        config: PPOConfig,
        experience: Experience,
        stage: Stage,
        training: Iterable[WorkerGroup] = (),
        *,
        prompts: int = 1,
    ) -> None:
        self.config, self.experience, self._stage = config, experience, stage
        self.bound, self.prompts = config.trainer.max_staleness, prompts
        self.extra = math.ceil(config.actor_rollout_ref.rollout.oversample * prompts)
        self.batches: deque[Batch] = deque()
        self.again: list[int] = []  # rows of the data
        self.dropped = self.unrepeated = 0  # groups, since the last batch was trained
        for group in training:
            # One thread drives everything: while it waits for the trainer it polls the rollout, so that finished
            # responses go to the reward workers and the ranks that generate never stand idle.
            group.meanwhile = experience.poll_until

    def start(self, prompts: DataProto, n: int) -> None:
        """Begin to generate the responses of a later step, without waiting for them."""
        self.batches.append(Batch(self.experience.ask(prompts, n), time.perf_counter()))
        self.experience.begin()

    def finish(self) -> None:
        """Wait for the responses that are under way. Weights that change from here on change none of them."""
        for batch in self.batches:
            if batch.asked is not None:
                with self._stage("gen"):
                    self._wait(batch)

    def _wait(self, batch: Batch) -> None:
        if batch.asked is not None:
            batch.rows = self.experience.wait_for_responses(batch.rows)
            batch.rows.meta_info[GENERATED_S] = self.experience.last_ended - batch.asked
            batch.asked = None

    @property
    def groups(self) -> int:
        """Under way or waiting."""
        return sum(_count_groups(batch.rows) for batch in self.batches)

    def take(self, version: int) -> DataProto | None:
        """The groups of a step, with their responses, for the policy of this version to learn from: those that were
        asked for first. None where there are too few that may be trained."""
        parts = list[DataProto]()
        while (missing := self.prompts - sum(map(_count_groups, parts))) and self.groups >= missing:
            parts += self._take_out(set(self._choose(missing)), version)
        if not parts:
            return None
        rows = self._join(parts)
        if missing:
            self.batches.appendleft(Batch(rows))
            return None
        return rows

    def _choose(self, count: int) -> list[Any]:
        """The oldest groups; with over-sampling the oldest of those that are whole."""
        if not self.extra:
            return self._by_age(uid for batch in self.batches for uid in batch.rows.non_tensor_batch["uid"])[:count]
        clock = self.experience.clock
        assert clock is not None  # checked with the settings
        return clock.choose("whole", lambda: self._wait_for_whole(count))

    def _wait_for_whole(self, count: int) -> list[Any]:
        """So many groups that are whole, oldest first."""

        def whole() -> list[Any]:
            found = []
            for batch in self.batches:
                keys = keys_of(batch.rows)
                late = {key[0] for key in keys if batch.asked is not None and not self.experience.has_ended([key])}
                found += [uid for uid, _ in keys if uid not in late]
            return self._by_age(found)[:count]

        self.experience.wait_until(lambda: len(whole()) == count)
        return whole()

    @staticmethod
    def _by_age(uids: Iterable[Any]) -> list[Any]:
        # Groups that were put back lie before older ones that are under way.
        return sorted(set(uids), key=int)

    def _take_out(self, uids: set[Any], version: int) -> Iterator[DataProto]:
        """The rows of these groups, with their responses; those that are too old are dropped."""
        for batch in list(self.batches):
            own = [uid in uids for uid in batch.rows.non_tensor_batch["uid"]]
            taken, rest = ([row for row, is_own in enumerate(own) if is_own is kind] for kind in (True, False))
            if not taken:
                continue
            part = Batch(batch.rows[taken], batch.asked) if rest else batch
            self._wait(part)
            if rest:
                batch.rows = batch.rows[rest]
            else:
                self.batches.remove(batch)
            groups = [list(rows) for rows in groups_of(part.rows.non_tensor_batch["uid"])]
            old = [row for rows in groups if self.is_too_old(part.rows[rows], version) for row in rows]
            if not old:
                yield part.rows
                continue
            self.drop(part.rows[old])
            if young := [row for row in range(len(part.rows)) if row not in set(old)]:
                yield part.rows[young]

    def _join(self, parts: list[DataProto]) -> DataProto:
        """One batch of parts that were asked for at different times."""
        if len(parts) == 1:
            return parts[0]
        if any("reward_score" in part.non_tensor_batch for part in parts):
            for part in parts:
                if "reward_score" not in part.non_tensor_batch:  # those of a checkpoint have their scores
                    self.experience.wait_for_scores(part)
        seconds = [part.meta_info.pop(GENERATED_S) for part in parts if GENERATED_S in part.meta_info]
        rows = DataProto.concat(with_same_fields(parts)).set_decoder(self.experience.decode)
        rows.meta_info |= {GENERATED_S: max(seconds)} if seconds else {}
        return rows

    def is_too_old(self, rows: DataProto, version: int) -> bool:
        """Whether a token is older than the bound, for the policy of this version."""
        return min(versions_of(rows), default=version) < version - self.bound

    def drop(self, rows: DataProto | None) -> None:
        """Have the prompts of these groups asked for again, unless they called a tool that must not be called again."""
        if rows is None:
            return
        turns, fields = self.experience.turns, rows.non_tensor_batch
        barred = turns.unrepeatable if turns is not None else set()
        calls = zip(fields["uid"], fields.get("tool_calls", [()] * len(rows)), strict=True)
        final = {uid for uid, own in calls if any(call["name"] in barred for call in own)}
        numbers = rows.non_tensor_batch.get(ROW, [None] * len(rows))  # checkpoints of earlier versions have none
        groups = dict(zip(rows.non_tensor_batch["uid"], numbers, strict=True))
        self.experience.forget(groups)
        self.again += [int(row) for uid, row in groups.items() if row is not None and uid not in final]
        self.dropped, self.unrepeated = self.dropped + len(groups), self.unrepeated + len(final)

    def next_rows(self, draw: Callable[[], Sequence[int]], size: int) -> list[int]:
        """So many rows of the data to ask for: those that are asked for again come before what `draw` gives."""
        while len(self.again) < size:
            self.again += map(int, draw())
        rows, self.again = self.again[:size], self.again[size:]
        return rows

    # -- policy versions and events -------------------------------------------------------------------------------
    def log_events(self, folder: Path, say: Callable[[str], object]) -> None:
        """Write the event log of an asynchronous run into its folder, and load weights in flight where that is set and
        the engine can do so."""
        trainer, rollout = self.config.trainer, self.experience.rollout
        if self.bound == 0:
            return
        self.events = EventLog(folder, Replay(trainer.replay_events) if trainer.replay_events else None)
        if not continues_responses(trainer):
            return
        if rollout.updates_in_flight():
            self.experience.clock = EngineClock(rollout, self.events)
            return
        what = f"actor_rollout_ref.rollout.name={self.config.actor_rollout_ref.rollout.name} cannot load weights while"
        if self.extra:
            raise UserError(f"{OVERSAMPLE} needs weights loaded in flight, but {what} it generates. Set it to 0.")
        if trainer.partial_rollout:
            raise UserError(f"trainer.partial_rollout=True, but {what} it generates. Set it to False, or name=native.")
        say(f"note: {what} it generates: every weight sync waits for whole responses (trainer.partial_rollout=False).")

    def begin(self, step: int, total_steps: int) -> None:
        """Begin the event log, or continue it behind the checkpoint of this step."""
        if self.events is None:
            return
        trainer, clock = self.config.trainer, self.experience.clock
        names = ("max_staleness", "seed", "save_freq", "test_freq", "val_before_train")
        settings = {f"trainer.{name}": trainer[name] for name in names}
        settings |= {"trainer.total_training_steps": total_steps, "trainer.partial_rollout": clock is not None}
        settings[OVERSAMPLE] = self.config.actor_rollout_ref.rollout.oversample
        self.events.begin(step, settings | {"engines": self.experience.rollout.submit.world_size})
        if clock is not None:
            clock.restart(step)

    def begin_step(self, step: int) -> None:
        """Events from here on belong to this step."""
        if self.events is not None:
            self.events.step = step

    def note_asked(self, prompts: DataProto, rows: Sequence[int], version: int) -> DataProto:
        """The prompts with the numbers of their rows in the data, by which they can be asked for again."""
        if self.events is not None:
            prompts.non_tensor_batch[ROW] = np.array(rows, dtype=object)
            self.events.add(ask=list(prompts.non_tensor_batch["uid"]), version=version)
        return prompts

    def note_trained(self, rows: DataProto, version: int) -> dict[str, float]:
        """Metrics on the staleness of a batch that the policy of this version learns from."""
        if self.events is None:
            return {}
        self.events.add(take=list(dict.fromkeys(rows.non_tensor_batch["uid"])), versions=versions_of(rows))
        found = {**staleness(rows, version), "rollout/dropped_groups": float(self.dropped)}
        if self.unrepeated:
            found["rollout/unrepeated_groups"] = float(self.unrepeated)
        self.dropped = self.unrepeated = 0
        return found | ({"rollout/overtaken_groups": self._overtaken_by(rows)} if self.extra else {})

    def _overtaken_by(self, rows: DataProto) -> float:
        """Groups that were asked for before the newest of these, and are left for later."""
        newest = max(int(uid) for uid in rows.non_tensor_batch["uid"])
        left = {int(uid) for batch in self.batches for uid in batch.rows.non_tensor_batch["uid"]}
        return float(sum(uid < newest for uid in left))

    def reach_sync(self) -> None:
        """Come to where new weights may be loaded: between two decode steps, or behind whole responses."""
        if self.experience.clock is None:
            self.finish()
        else:
            self.experience.reach("weights")

    def note_weights(self, version: int, checksum: float | None) -> None:
        """The rollout has the weights of this version."""
        if self.experience.clock is not None:
            self.experience.clock.write_schedule()
        if self.events is not None:
            self.events.add_weights(version, checksum)

    def was_drained(self, step: int) -> bool:
        """Whether the replayed run had nothing under way behind this step."""
        return self.events is not None and self.events.replayed is not None and step in self.events.replayed.drains

    def drain(self, step: int) -> None:
        """Wait for all that is under way; engines count their steps from here on."""
        self.finish()
        clock = self.experience.clock
        if clock is not None:
            self.experience.settle()
            clock.write_schedule()
        if self.events is not None:
            self.events.add(drained=True)
        if clock is not None:
            clock.restart(step)

    # -- checkpoints ----------------------------------------------------------------------------------------------
    @property
    def is_empty(self) -> bool:
        return not self.batches and not self.again

    def save(self, folder: Path) -> None:
        """Write the batches into a checkpoint's folder, with their scores: the reward workers end with the run."""
        for number, batch in enumerate(self.batches):
            if "reward_score" not in batch.rows.non_tensor_batch:
                self.experience.wait_for_scores(batch.rows)
            batch.rows.save_to_disk(folder / _name(number))
        if self.again:
            (folder / AGAIN).write_text(json.dumps(self.again))

    def load(self, folder: Path) -> None:
        """Read what `save` wrote into a checkpoint that was verified."""
        while (saved := folder / _name(len(self.batches))).exists():
            rows = DataProto.load_from_disk(saved).set_decoder(self.experience.decode)
            self.batches.append(Batch(rows))
        self.again = json.loads((folder / AGAIN).read_text()) if (folder / AGAIN).exists() else []


def _count_groups(rows: DataProto) -> int:
    return len(set(rows.non_tensor_batch["uid"]))


def _name(number: int) -> str:
    # The first has the name that the one batch of earlier versions had.
    return FOLDER if number == 0 else f"{FOLDER}_{number}"


def versions_of(rows: DataProto) -> list[int]:
    """The policy versions that sampled tokens of these rows, in order."""
    return sorted({version for spans in rows.non_tensor_batch["policy_versions"] for version, _ in spans})


def staleness(rows: DataProto, version: int) -> dict[str, float]:
    """By how many updates the weights are newer that learn from these tokens than those that sampled them."""
    spans = [span for row in rows.non_tensor_batch["policy_versions"] for span in row]
    tokens = sum(count for _, count in spans)
    mean = sum((version - sampled) * count for sampled, count in spans) / tokens if tokens else 0.0
    mixed = sum(len(row) > 1 for row in rows.non_tensor_batch["policy_versions"])
    return {
        "rollout/age": mean,
        "rollout/age_max": float(max((version - sampled for sampled, _ in spans), default=0)),
        "rollout/partial": mixed / len(rows),
    }
