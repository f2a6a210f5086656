"""Weights between Hugging Face's names and this rank's part of a Megatron-Core model, in both directions.

Megatron-Core keeps queries, keys and values of a layer in one matrix, group by group, and gate and up projection in
one; tensor ranks hold rows or columns of these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from posttrain.engine.heads import Head
from posttrain.engine.megatron.groups import RankGroups
from posttrain.engine.megatron.model import experts_of

Kind = Literal["same", "rows", "columns", "qkv", "gate_up", "experts"]
CUT = ("rows", "columns", "qkv", "gate_up")  # kinds that tensor ranks hold parts of


@dataclass(frozen=True)
class Match:
    """Weights of this rank (`ours`), the Hugging Face weights that they are made of, and how."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    kind: Kind


def stage_matches(config: Any, groups: RankGroups, stage: int, head: Head, theirs: Collection[str]) -> list[Match]:
    """All weights of a stage of a model with this head; `theirs` are the names that the whole model has."""
    stages, root = groups.sizes.pipeline, head.decoder
    found = []
    if stage == 0:
        found.append(Match(("embedding.word_embeddings.weight",), (f"{root}.embed_tokens.weight",), "rows"))
    count = config.num_hidden_layers // stages
    for own in range(count):
        found += _layer(config, groups, f"decoder.layers.{own}", f"{root}.layers.{stage * count + own}")
    if stage == stages - 1:
        found.append(Match(("decoder.final_layernorm.weight",), (f"{root}.norm.weight",), "same"))
        if head.projection is not None:
            names = (f"{head.projection}.{end}" for end in ("weight", "bias"))
            found += [Match((name,), (name,), "same") for name in names if name in theirs]
        elif stages > 1 or not config.tie_word_embeddings:  # tied, the last of several stages has a copy
            found.append(Match(("output_layer.weight",), ("lm_head.weight",), "rows"))
    return found


def _layer(config: Any, groups: RankGroups, ours: str, theirs: str) -> list[Match]:
    attention, projections = f"{ours}.self_attention", ("q_proj", "k_proj", "v_proj")
    found = [
        Match((f"{ours}.input_layernorm.weight",), (f"{theirs}.input_layernorm.weight",), "same"),
        Match((f"{ours}.pre_mlp_layernorm.weight",), (f"{theirs}.post_attention_layernorm.weight",), "same"),
        Match((f"{attention}.linear_proj.weight",), (f"{theirs}.self_attn.o_proj.weight",), "columns"),
    ]
    for end in ("weight", "bias") if config.model_type == "qwen2" else ("weight",):
        names = tuple(f"{theirs}.self_attn.{name}.{end}" for name in projections)
        found.append(Match((f"{attention}.linear_qkv.{end}",), names, "qkv"))
    if config.model_type in ("qwen3", "qwen3_moe"):
        for name in ("q", "k"):
            own, other = (f"{attention}.{name}_layernorm.weight",), (f"{theirs}.self_attn.{name}_norm.weight",)
            found.append(Match(own, other, "same"))
    experts = experts_of(config)
    if experts is None:
        both = (f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight")
        found.append(Match((f"{ours}.mlp.linear_fc1.weight",), both, "gate_up"))
        found.append(Match((f"{ours}.mlp.linear_fc2.weight",), (f"{theirs}.mlp.down_proj.weight",), "columns"))
        return found
    found.append(Match((f"{ours}.mlp.router.weight",), (f"{theirs}.mlp.gate.weight",), "same"))
    for own, other in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
        numbers = range(experts // groups.sizes.expert)
        names = tuple(f"{ours}.mlp.experts.local_experts.{number}.{own}.weight" for number in numbers)
        found.append(Match(names, (f"{theirs}.mlp.experts.{other}",), "experts"))
    return found


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
    match: Match, ours: Sequence[torch.Tensor], shapes: Mapping[str, torch.Size], config: Any, groups: RankGroups
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
    return [torch.cat(parts)[: shapes[match.theirs[0]][0]]]


def _gathered(weight: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    if group.size() == 1:
        return [weight.clone()]
    parts = [torch.empty_like(weight) for _ in range(group.size())]
    dist.all_gather(parts, weight.contiguous(), group=group)
    return parts


@torch.no_grad()
def exported(
    weights: Mapping[str, torch.Tensor],
    shapes: Mapping[str, torch.Size],
    config: Any,
    groups: RankGroups,
    device: torch.device,
    head: Head,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies of all weights under their Hugging Face names, on every rank; all ranks must iterate to the end."""
    dtype = next(iter(weights.values())).dtype
    for stage in range(groups.sizes.pipeline):
        for match in stage_matches(config, groups, stage, head, shapes):
            if match.ours == ("output_layer.weight",) and config.tie_word_embeddings:
                continue  # the copy of the embedding on the last stage; it is sent with the first one's
            if groups.stage == stage:
                found = whole_weights(match, [weights[name].detach() for name in match.ours], shapes, config, groups)
            else:
                found = [torch.empty(shapes[name], dtype=dtype, device=device) for name in match.theirs]
            for name, weight in zip(match.theirs, found, strict=True):
                if groups.sizes.pipeline > 1:
                    weight = weight.contiguous()
                    dist.broadcast(weight, group=groups.pipeline, group_src=stage)
                yield name, weight
                if name == "model.embed_tokens.weight" and config.tie_word_embeddings and head.projection is None:
                    yield "lm_head.weight", weight
