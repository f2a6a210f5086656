"""Reading a batch without knowing its class: columns by name from a DataProto or a plain mapping, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


class Fields:
    """Columns of `batch`, tensors and object arrays alike; `batch` is a DataProto or one mapping with both."""

    def __init__(self, batch: Any) -> None:
        self._parts = [batch.batch, batch.non_tensor_batch] if hasattr(batch, "non_tensor_batch") else [batch]

    def raw(self, *names: str) -> Any:
        """The first present column of `names`, None if there is none."""
        for name in names:
            for part in self._parts:
                if part is not None and name in part:
                    return part[name]
        return None

    def numbers(self, *names: str) -> np.ndarray | None:
        """The column as float64 on the host: sums in it do not depend on the batch's dtype."""
        column = self.raw(*names)
        return None if column is None else as_numpy(column, np.float64)

    def objects(self, *names: str) -> list[Any] | None:
        column = self.raw(*names)
        return None if column is None else list(column.tolist() if hasattr(column, "tolist") else column)


def as_numpy(column: Any, dtype: Any) -> np.ndarray:
    """A torch tensor (of any device and dtype) or a sequence as a NumPy array of `dtype`."""
    if hasattr(column, "detach"):
        column = column.detach().cpu()
        column = (column.double() if column.is_floating_point() else column).numpy()
    return np.asarray(column).astype(dtype)


def groups_of(uids: Iterable[Any]) -> list[np.ndarray]:
    """Row numbers of each group of equal uid, groups in the order of their first row."""
    rows: dict[Any, list[int]] = {}
    for row, uid in enumerate(uids):
        rows.setdefault(uid, []).append(row)
    return [np.asarray(members) for members in rows.values()]
