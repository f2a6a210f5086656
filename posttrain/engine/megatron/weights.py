"""Weights between Hugging Face's names and this rank's part of a Megatron-Core model, in both directions.

Megatron-Core keeps queries, keys and values of a layer in one matrix, group by group, and gate and up projection in
one; tensor ranks hold rows or columns of these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from posttrain.checkpoint.dcp import describe, listed_metadata, read_checked
from posttrain.engine.heads import Head
from posttrain.engine.megatron.groups import ParallelSizes, RankGroups
from posttrain.engine.megatron.model import (
    experts_of,
    has_query_biases,
    has_query_norms,
    is_latent,
    is_mixture,
    shared_width,
    stage_layers,
)
from posttrain.engine.megatron.router import SIGMOID
from posttrain.engine.optim import EngineState

Kind = Literal["same", "rows", "columns", "qkv", "gate_up", "experts"]
CUT = ("rows", "columns", "qkv", "gate_up")  # kinds that tensor ranks hold parts of


@dataclass(frozen=True)
class Match:
    """Weights of this rank (`ours`), the Hugging Face weights that they are made of, and how."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    kind: Kind


def stage_matches(config: Any, sizes: ParallelSizes, stage: int, head: Head, theirs: Collection[str]) -> list[Match]:
    """All weights of a stage of a model with this head; `theirs` are the names that the whole model has."""
    stages, root = sizes.pipeline, head.decoder
    found = []
    if stage == 0:
        found.append(Match(("embedding.word_embeddings.weight",), (f"{root}.embed_tokens.weight",), "rows"))
    for own, layer in enumerate(stage_layers(config, sizes, stage)):
        found += _attention(config, f"decoder.layers.{own}", f"{root}.layers.{layer}")
        mlp = f"decoder.layers.{own}.mlp", f"{root}.layers.{layer}.mlp"
        found += _mixture(config, sizes, *mlp) if is_mixture(config, layer) else _gated(*mlp)
    if stage == stages - 1:
        found.append(Match(("decoder.final_layernorm.weight",), (f"{root}.norm.weight",), "same"))
        if head.projection is not None:
            names = (f"{head.projection}.{end}" for end in ("weight", "bias"))
            found += [Match((name,), (name,), "same") for name in names if name in theirs]
        elif stages > 1 or not config.tie_word_embeddings:  # tied, the last of several stages has a copy
            found.append(Match(("output_layer.weight",), ("lm_head.weight",), "rows"))
    return found


def _attention(config: Any, ours: str, theirs: str) -> list[Match]:
    """The attention of a layer, and the norms before and after it."""
    own, other = f"{ours}.self_attention", f"{theirs}.self_attn"
    found = [
        Match((f"{ours}.input_layernorm.weight",), (f"{theirs}.input_layernorm.weight",), "same"),
        Match((f"{ours}.pre_mlp_layernorm.weight",), (f"{theirs}.post_attention_layernorm.weight",), "same"),
        Match((f"{own}.linear_proj.weight",), (f"{other}.o_proj.weight",), "columns"),
    ]
    if is_latent(config):
        names: dict[str, tuple[str, Kind]] = {
            "latent_down": ("kv_a_proj_with_mqa", "same"),
            "latent_norm": ("kv_a_layernorm", "same"),
            "latent_up": ("kv_b_proj", "rows"),  # by heads, which the tensor ranks divide
        }
        if config.q_lora_rank is None:
            names["query_up"] = "q_proj", "rows"
        else:
            names |= {"query_down": ("q_a_proj", "same"), "query_norm": ("q_a_layernorm", "same")}
            names["query_up"] = "q_b_proj", "rows"
        return [
            *found,
            *(
                Match((f"{own}.{name}.weight",), (f"{other}.{theirs}.weight",), kind)
                for name, (theirs, kind) in names.items()
            ),
        ]
    for end in ("weight", "bias") if has_query_biases(config) else ("weight",):
        qkv = tuple(f"{other}.{name}.{end}" for name in ("q_proj", "k_proj", "v_proj"))
        found.append(Match((f"{own}.linear_qkv.{end}",), qkv, "qkv"))
    if has_query_norms(config):
        for name in ("q", "k"):
            found.append(Match((f"{own}.{name}_layernorm.weight",), (f"{other}.{name}_norm.weight",), "same"))
    return found


def _gated(ours: str, theirs: str) -> list[Match]:
    """A feed-forward part that all tokens go through."""
    both = f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight"
    return [
        Match((f"{ours}.linear_fc1.weight",), both, "gate_up"),
        Match((f"{ours}.linear_fc2.weight",), (f"{theirs}.down_proj.weight",), "columns"),
    ]


def _mixture(config: Any, sizes: ParallelSizes, ours: str, theirs: str) -> list[Match]:
    experts = experts_of(config)
    assert experts is not None
    found = [Match((f"{ours}.router.weight",), (f"{theirs}.gate.weight",), "same")]
    if config.model_type in SIGMOID:
        found.append(Match((f"{ours}.router.correction",), (f"{theirs}.gate.e_score_correction_bias",), "same"))
    for own, other in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
        numbers = range(experts // sizes.expert)
        names = tuple(f"{ours}.experts.local_experts.{number}.{own}.weight" for number in numbers)
        found.append(Match(names, (f"{theirs}.experts.{other}",), "experts"))
    if shared_width(config):
        found += _gated(f"{ours}.shared_experts", f"{theirs}.shared_experts")
    return found


def named_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All numbers of this rank's modules: trained weights, and the corrections of routers, which are buffers."""
    buffers = {name: buffer for name, buffer in module.named_buffers() if name.endswith(".router.correction")}
    return {**dict(module.named_parameters()), **buffers}


def own_part(match: Match, theirs: Sequence[torch.Tensor], config: Any, groups: RankGroups) -> list[torch.Tensor]:
    """This rank's part of whole weights."""
    rank, size = groups.tensor.rank(), groups.tensor.size()
    if match.kind == "same":
        return list(theirs)
    if match.kind == "experts":
        return list(theirs[0].chunk(groups.expert.size())[groups.expert.rank()])
    if match.kind == "columns":
        return [theirs[0].chunk(size, 1)[rank]]
    if match.kind == "gate_up":  # a rank's part of the gate, then its part of the up projection
        return [torch.cat([weight.chunk(size)[rank] for weight in theirs])]
    if match.kind == "qkv":
        # One group: the queries that share a key head, then that key head, then its value head. A rank holds whole
        # groups, so that its attention needs nothing from other ranks.
        by_group = [weight.unflatten(0, (config.num_key_value_heads, -1)) for weight in theirs]
        return [torch.cat([weight.chunk(size)[rank] for weight in by_group], 1).flatten(0, 1)]
    # The vocabulary need not be a multiple of the ranks: the last part is filled up with zeros, which no token reads.
    rows = -(-len(theirs[0]) // size)
    part = theirs[0][rank * rows : (rank + 1) * rows]
    return [torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])]


def whole_weights(
    match: Match, ours: Sequence[torch.Tensor], shapes: Mapping[str, torch.Tensor], config: Any, groups: RankGroups
) -> list[torch.Tensor]:
    """Whole weights from the parts of all ranks, which must all call this."""
    if match.kind == "same":
        return [weight.clone() for weight in ours]
    if match.kind == "experts":
        return [torch.cat(_gathered(torch.stack(list(ours)), groups.expert))]
    parts = _gathered(ours[0], groups.tensor)
    if match.kind == "columns":
        return [torch.cat(parts, 1)]
    if match.kind == "gate_up":
        halves = [part.chunk(2) for part in parts]
        return [torch.cat([half[number] for half in halves]) for number in (0, 1)]
    if match.kind == "qkv":
        heads, keys = config.num_attention_heads // config.num_key_value_heads, config.num_key_value_heads
        by_group = torch.cat([part.unflatten(0, (keys // groups.tensor.size(), -1)) for part in parts])
        size = by_group.shape[1] // (heads + 2)
        return [weight.flatten(0, 1) for weight in by_group.split([heads * size, size, size], 1)]
    return [torch.cat(parts)[: len(shapes[match.theirs[0]])]]


def _gathered(weight: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    if group.size() == 1:
        return [weight.clone()]
    parts = [torch.empty_like(weight) for _ in range(group.size())]
    dist.all_gather(parts, weight.contiguous(), group=group)
    return parts


@torch.no_grad()
def exported(
    weights: Mapping[str, torch.Tensor],
    shapes: Mapping[str, torch.Tensor],
    config: Any,
    groups: RankGroups,
    device: torch.device,
    matches: Callable[[int], list[Match]],
    change: Callable[[Match, list[torch.Tensor]], list[torch.Tensor]] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies of weights under their Hugging Face names, on every rank; all ranks must iterate to the end. `shapes` are
    all weights of the model, without their numbers, `matches` gives those of a stage that are wanted. `change` is
    called with the whole weights of a match on its stage."""
    for stage in range(groups.sizes.pipeline):
        for match in matches(stage):
            if groups.stage == stage:
                found = whole_weights(match, [weights[name].detach() for name in match.ours], shapes, config, groups)
                found = found if change is None else change(match, found)
            else:
                found = [torch.empty_like(shapes[name], device=device) for name in match.theirs]
            for name, weight in zip(match.theirs, found, strict=True):
                if groups.sizes.pipeline > 1:
                    weight = weight.contiguous()
                    dist.broadcast(weight, group=groups.pipeline, group_src=stage)
                yield name, weight


# Checkpoints that another number of tensor ranks can continue: parts of weights are saved as parts of whole tensors.
#
# Queries, keys and values lie group by group in one matrix, of which a rank has a stretch. Gate and up projection of a
# rank lie one after the other, and are saved as two halves, each with a stretch of its own.


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
        self.copies.wait()
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
