"""Tensors of a batch that are also read by the names that guides to verl use: `log_probs`, `ref_log_probs`."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict

from posttrain.batch.fields import OTHER_SPELLINGS


class BatchTensors(TensorDict):
    """A TensorDict. A tensor that is stored under the other name itself is found under that name."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(self._stored(index))

    def get(self, key: Any, *args: Any, **named: Any) -> Any:
        return super().get(self._stored(key), *args, **named)

    def _stored(self, index: Any) -> Any:
        other = OTHER_SPELLINGS.get(index) if isinstance(index, str) else None
        return other if other is not None and index not in self.keys() and other in self.keys() else index
