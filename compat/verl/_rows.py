"""Batches between the two worlds: posttrain's DataProto and verl's, sharing their tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from posttrain.batch.fields import object_array
from posttrain.protocol import DataProto as Batch
from verl._tensors import BatchTensors


def to_verl(data: Batch) -> Any:
    """verl's view of a batch: the same tensors, and the columns under the names that verl's code reads."""
    from verl.protocol import DataProto

    fields = {name: data.non_tensor_batch[name] for name in data.non_tensor_batch}
    if "ground_truth" in fields and "reward_model" not in fields:
        truths = [{"style": "rule", "ground_truth": truth} for truth in fields["ground_truth"]]
        fields["reward_model"] = object_array(truths)
    tensors = BatchTensors(dict(data.batch), batch_size=[len(data)])
    return DataProto(batch=tensors, non_tensor_batch=fields, meta_info=dict(data.meta_info))


def to_posttrain(data: Any) -> Batch:
    """posttrain's batch from verl's: the same tensors."""
    if isinstance(data, Batch):
        return data
    fields = {name: np.asarray(values) for name, values in data.non_tensor_batch.items()}
    return Batch(data.tensors(), fields, dict(data.meta_info))
