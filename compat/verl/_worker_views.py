"""posttrain's worker groups as verl's loops call them: batches in and out are verl's DataProto."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from posttrain.batch.fields import object_array
from posttrain.data.dataset import collate
from posttrain.protocol import DataProto as Batch
from posttrain.rollout.sampling import sample_seeds
from verl._managed_rewards import uid_counts
from verl._rows import to_posttrain, to_verl
from verl.protocol import DataProto


class WorkerView:
    """The base: what a group of posttrain has under the same name is called as it is."""

    def __init__(self, trainer: Any, group: Any) -> None:
        self._trainer, self._group = trainer, group
        self.world_size = group.world_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def _asked(self, name: str, data: Any) -> Batch:
        return getattr(self._group, name)(to_posttrain(data))


class ActorView(WorkerView):
    """Actor, rollout and reference."""

    def generate_sequences(self, prompts: Any) -> DataProto:
        """One response per row. `meta_info`: `do_sample: False` takes the likeliest tokens, `validate: True` the
        validation's settings."""
        fields = prompts.non_tensor_batch
        ids = fields["raw_prompt_ids"] if "raw_prompt_ids" in fields else _real_ids(prompts)
        serials = [int(serial) for serial in fields["serial"]] if "serial" in fields else self._serials(len(prompts))
        seeds = sample_seeds(serials, uid_counts(serials), self._trainer.config.trainer.seed)
        asked = {
            "raw_prompt_ids": object_array([list(row) for row in ids]),
            "seed": object_array(seeds),
            "uid": object_array([str(serial) for serial in serials]),
        }
        how = {"validate": prompts.meta_info.get("validate"), "greedy": prompts.meta_info.get("do_sample") is False}
        made = to_verl(self._group.generate_sequences(Batch({}, asked, how)))
        return DataProto(made.batch, made.non_tensor_batch, {"timing": {}})

    def _serials(self, rows: int) -> list[int]:
        start = self._trainer.experience.serial
        self._trainer.experience.serial += rows
        return list(range(start, start + rows))

    def compute_log_prob(self, data: Any) -> DataProto:
        """`old_log_probs` and `entropys`."""
        made = self._asked("compute_log_prob", data).batch
        return DataProto.from_dict({"old_log_probs": made["old_log_probs"], "entropys": made["entropy"]})

    def compute_ref_log_prob(self, data: Any) -> DataProto:
        """`ref_log_prob`."""
        return DataProto.from_dict({"ref_log_prob": self._asked("compute_ref_log_prob", data).batch["ref_log_prob"]})

    def update_actor(self, data: Any) -> DataProto:
        """All optimizer steps on the batch, after which the rollout has the new weights; `meta_info["metrics"]`."""
        step = self._trainer.step + 1
        metrics = dict(self._group.update_actor(_planned(data, step)))
        metrics |= self._group.sync_weights(step)
        return DataProto(meta_info={"metrics": metrics})


class CriticView(WorkerView):
    """The critic."""

    def compute_values(self, data: Any) -> DataProto:
        return DataProto.from_dict({"values": self._asked("compute_values", data).batch["values"]})

    def update_critic(self, data: Any) -> DataProto:
        return DataProto(meta_info={"metrics": dict(self._group.update_critic(_planned(data, self._trainer.step + 1)))})


def _real_ids(prompts: Any) -> list[list[int]]:
    tensors = prompts.batch
    return [
        ids[mask.bool()].tolist() for ids, mask in zip(tensors["input_ids"], tensors["attention_mask"], strict=True)
    ]


def _planned(data: Any, step: int) -> Batch:
    """The batch with the rows of a prompt side by side, as mini-batches are made of whole groups."""
    batch = to_posttrain(data)
    first: dict[Any, int] = {}
    uids = batch.non_tensor_batch["uid"] if "uid" in batch.non_tensor_batch else np.arange(len(batch))
    order = sorted(range(len(batch)), key=lambda row: first.setdefault(uids[row], row))
    batch = batch[order]
    batch.non_tensor_batch["uid"] = object_array([uids[row] for row in order])
    batch.meta_info = {"step": step}
    return batch


class Prompts:
    """`train_dataloader`: the batches of one pass over the data, each a dict of tensors and arrays."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __len__(self) -> int:
        return max(1, len(self._trainer.train_dataset) // self._trainer.sizes.prompts)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(len(self)):
            yield prompt_dict(self._trainer, self._trainer.sampler.next_batch())


def prompt_dict(trainer: Any, rows: list[int]) -> dict[str, Any]:
    """Rows of the data as verl's loops read them."""
    batch = collate([trainer.train_dataset[row] for row in rows], pad_token_id=trainer.tokenizer.pad_token_id)
    made = to_verl(trainer.experience.number(batch))
    made.batch.rename_key_("prompts", "input_ids")
    return {**made.tensors(), **made.non_tensor_batch}
