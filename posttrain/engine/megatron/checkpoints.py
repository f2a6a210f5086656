"""Checkpoints that another number of tensor ranks can continue: parts of weights are saved as parts of whole tensors.

Queries, keys and values lie group by group in one matrix, of which a rank has a stretch. Gate and up projection of a
rank lie one after the other, and are saved as two halves, each with a stretch of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from posttrain.checkpoint.dcp import describe, listed_metadata, read_checked
from posttrain.engine.megatron.groups import RankGroups
from posttrain.engine.megatron.weights import Kind
from posttrain.engine.optim import EngineState

HALVES = ".halves"


@dataclass(frozen=True)
class Cut:
    """How tensor ranks cut a weight; `length` is that of the whole one's first dimension."""

    kind: Kind
    length: int

    def whole(self, part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """The whole tensor of which this rank has `part`, whose memory it shares."""
        ranks, rank = mesh.size(), mesh.get_local_rank()
        if self.kind == "gate_up":
            part = part.unflatten(0, (2, -1))
        dim = {"columns": 1, "gate_up": 1}.get(self.kind, 0)
        shape = [size * ranks if place == dim else size for place, size in enumerate(part.shape)]
        if self.kind == "rows":  # what fills up the last part is no part of the vocabulary
            part = part[: max(0, min(len(part), self.length - rank * len(part)))]
            shape[0] = self.length
        if ranks == 1:
            return part
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(part, mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=stride)


class PartState(EngineState):
    """Saves and loads tensors of which this rank may hold parts. `cuts` are those by their names in a checkpoint;
    stages and expert ranks have weights under names of their own."""

    def __init__(self, *given: Any, cuts: Mapping[str, Cut], groups: RankGroups, **more: Any) -> None:
        super().__init__(*given, parts=True, **more)
        self.cuts, self.groups = cuts, groups
        self._mesh: DeviceMesh | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        if self._mesh is None:
            self._mesh = DeviceMesh.from_group(self.groups.tensor, self.settings.device.type)
        found = {}
        for key, tensor in self._held().items():
            cut = self.cuts.get(_weight(key)) if tensor.ndim else None  # steps are counted alike on all ranks
            halves = HALVES if cut is not None and cut.kind == "gate_up" else ""
            found[key + halves] = tensor if cut is None else cut.whole(tensor, self._mesh)
        return found

    def load(self, folder: Path) -> None:
        tensors, older = self.tensors(), self._older_tensors()
        stored = describe(listed_metadata(folder))
        if any(key in stored for key in older.keys() - tensors.keys()):
            tensors = older
        read_checked(folder, tensors, partial=True)
        if self.optimizer:
            self.optimizer.loaded(tensors)

    def _older_tensors(self) -> dict[str, torch.Tensor]:
        """Under the names of earlier versions, which only the same number of tensor ranks could continue."""
        rank, ranks = self.groups.tensor.rank(), self.groups.tensor.size()
        part = f".part_{rank}_of_{ranks}" if ranks > 1 else ""
        return {key + (part if _weight(key) in self.cuts else ""): x for key, x in self._held().items()}

    def _held(self) -> dict[str, torch.Tensor]:
        """All but weights that another rank steps: it saves them, and sends them after loading."""
        others = set()
        if self.optimizer is not None:
            others = {
                f"model.{name}" for name, own in zip(self.optimizer.names, self.optimizer.held, strict=True) if not own
            }
        return {key: tensor for key, tensor in super().tensors().items() if key not in others}


def _weight(key: str) -> str:
    """The weight of an entry `model.NAME` or `optim.MOMENT.NAME`."""
    kind, _, rest = key.partition(".")
    return rest if kind == "model" else rest.partition(".")[2]
