"""The forward pass that training, reference and critic share: hidden states, log-probs and values.

`TokenPass` is the whole pass as one module. Sharding hooks into modules (it gathers weights before a `forward` and
frees them after it), so decoder and head must run inside one.

Shapes: T tokens, U positions whose next token is scored, E hidden size, V vocabulary; R ranks that share a sequence, S
tokens of one rank's part, M most positions of one rank.

`recompute_layers` is gradient checkpointing: the inside of a layer is computed again in the backward pass instead of
being stored. transformers does so only in training mode, which also switches on dropout that models call as a function
or read from their configuration. Here the model stays in evaluation mode, so that both passes are equal and nothing is
random.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from posttrain.kernels.logprob_head import CHUNK_ELEMENTS, logprob_head
from posttrain.kernels.packed_attention import active_layout
from posttrain.kernels.sequence_parallel import gathered, own_stretch, sequence_group
from posttrain.models.routing import active_routes


@dataclass(frozen=True)
class ForwardMode:
    """Which forward passes of a model are proved to equal transformers' own (`proof.py`).

    `packed`: sequences end to end, with shared prompts. `padded`: several sequences in one pass, padded on the right;
    otherwise one at a time. `split_head`: hidden states first, then logits only where needed; otherwise the model
    computes all logits itself. `note` tells the user what is not used, and why.
    """

    packed: bool = False
    padded: bool = False
    split_head: bool = True
    note: str | None = None


def forward_mode_of(model: Any) -> ForwardMode:
    """Return the mode of a loaded model; without a proof, one sequence at a time."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(base, "forward_mode", ForwardMode())


class ValueModel(torch.nn.Module):
    """The decoder of a causal LM and a linear value head, for the critic. The head starts at zero, so all values do."""

    def __init__(self, language_model: Any) -> None:
        super().__init__()
        self.base_model = language_model.base_model
        self.config, self.forward_mode = language_model.config, forward_mode_of(language_model)
        weight = next(self.base_model.parameters())
        self.value_head = torch.nn.Linear(self.config.hidden_size, 1, device=weight.device, dtype=weight.dtype)
        torch.nn.init.zeros_(self.value_head.weight)
        torch.nn.init.zeros_(self.value_head.bias)

    def token_values(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        values = self.value_head(_as_weight(hidden_NE, self.value_head))[
            :, 0
        ].clone()  # not a view: sharding hooks into the output
        return values.to(torch.promote_types(values.dtype, torch.float32))


LAYERS = {"Qwen2DecoderLayer", "Qwen3DecoderLayer", "LlamaDecoderLayer", "MistralDecoderLayer"}


def without_adapters(model: Any) -> Any:
    """Return the causal LM itself; peft wraps it and keeps its adapters inside."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_of(model: Any) -> torch.nn.Module:
    """Return the stack below the language-model head, adapters included."""
    return without_adapters(model).base_model


def head_of(model: Any) -> torch.nn.Module:
    return without_adapters(model).get_output_embeddings()


def hidden_states(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return last hidden states, packed (inside `packed_rows`, with positions) or padded on the right."""
    stack: Any = decoder_of(model)
    if active_layout() is not None and position_ids is not None and _is_plain(stack):
        return _through_layers(stack, input_ids, position_ids)
    named = {"position_ids": position_ids, "attention_mask": attention_mask, "use_cache": False}
    return stack(input_ids=input_ids, **accepted_arguments(stack, named)).last_hidden_state


def own_logits(model: torch.nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Return all logits of sequences padded on the right, by the model's own forward pass."""
    named = {"attention_mask": attention_mask, "use_cache": False}
    return model(input_ids=input_ids, **accepted_arguments(without_adapters(model), named)).logits


def accepted_arguments(module: torch.nn.Module, named: dict[str, Any]) -> dict[str, Any]:
    """Only arguments that this module's forward pass accepts: recurrent models take no positions."""
    known = _names(type(module))
    return {name: value for name, value in named.items() if value is not None and (name in known or "" in known)}


@lru_cache
def _names(kind: type[torch.nn.Module]) -> frozenset[str]:
    # With an empty name if it accepts any keyword.
    known = inspect.signature(kind.forward).parameters
    return frozenset("" if each.kind is each.VAR_KEYWORD else name for name, each in known.items())


def _is_plain(stack: Any) -> bool:
    # Only embedding, layers of a known kind and a norm.
    names = (type(layer).__name__.removeprefix("FSDP") for layer in getattr(stack, "layers", [None]))
    return all(name in LAYERS for name in names)


def _through_layers(stack: Any, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    # Does what the stack's `forward` does, except for finding sequence borders in the positions: that would wait for
    # the device, and the layout already knows them.
    hidden = stack.embed_tokens(input_ids)
    rotation = stack.rotary_emb(hidden, position_ids)
    for layer in stack.layers:
        hidden = layer(hidden, attention_mask=None, position_ids=position_ids, position_embeddings=rotation)
    return stack.norm(hidden)


def states_at(hidden: torch.Tensor, places_U: torch.Tensor) -> torch.Tensor:
    """Return (U, E) hidden states at these (flattened) positions; a packed pass may hold only the wanted ones."""
    flat, layout = hidden.flatten(0, 1), active_layout()
    if layout is not None and layout.wanted_T is not None and len(flat) < layout.total:
        places_U = torch.searchsorted(layout.wanted_T, places_U)
    return flat.index_select(0, places_U)


# Maps hidden states, and the indices of their positions (None: all, in order), to numbers per position.
Head = Callable[[torch.Tensor, torch.Tensor | None], dict[str, torch.Tensor]]


def at_places(
    model: torch.nn.Module,
    ids: torch.Tensor,
    position_ids: torch.Tensor | None,
    mask: Any,
    places_U: torch.Tensor,
    head: Head,
) -> dict[str, torch.Tensor]:
    """Return what `head` computes from the hidden states at these (flattened) positions of a pass."""
    group = sequence_group()
    if group is None or position_ids is None:
        return head(states_at(hidden_states(model, ids, position_ids, mask), places_U), None)
    fill = -ids.shape[1] % group.size()
    stretches = (own_stretch(torch.nn.functional.pad(x[0], (0, fill)), group)[None] for x in (ids, position_ids))
    return at_places_of_ranks(hidden_states(model, *stretches)[0], places_U, head, group)


def at_places_of_ranks(
    hidden_SE: torch.Tensor, places_U: torch.Tensor, head: Head, group: dist.ProcessGroup
) -> dict[str, torch.Tensor]:
    """Return what `head` computes at these positions of all ranks, on each of them; `hidden_SE` is a rank's stretch."""
    index_RM, source_U = _split_places_by_rank(places_U, len(hidden_SE), group.size())
    mine_M = index_RM[group.rank()]
    local_M = (places_U[mine_M] - group.rank() * len(hidden_SE)).clamp(0, len(hidden_SE) - 1)
    found = head(hidden_SE.index_select(0, local_M), mine_M)
    return {name: gathered(values_M, group).index_select(0, source_U) for name, values_M in found.items()}


def _split_places_by_rank(places_U: torch.Tensor, stretch: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    # Returns the position indices of each rank, padded to the largest count, and for each position its place in the
    # concatenated results of all ranks.
    rank_U = places_U // stretch
    counts = torch.bincount(rank_U, minlength=ranks)
    most = max(1, int(counts.max()))
    order_U = torch.argsort(rank_U, stable=True)
    within_U = torch.arange(len(places_U), device=places_U.device) - (counts.cumsum(0) - counts)[rank_U[order_U]]
    slots_U = rank_U[order_U] * most + within_U
    index = torch.zeros(ranks * most, dtype=torch.long, device=places_U.device)
    index[slots_U] = order_U
    source_U = torch.empty_like(order_U)
    source_U[order_U] = slots_U
    return index.view(ranks, most), source_U


class TokenPass(torch.nn.Module):
    """Computes `log_probs` and `entropy` of given tokens, or the `values` of a value model."""

    def __init__(self, model: torch.nn.Module, *, split_head: bool = True) -> None:
        # Without `split_head`, the model computes all logits itself.
        super().__init__()
        self.model, self.split_head = model, split_head

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        places_U: torch.Tensor,
        labels_U: torch.Tensor,
        temperature: float,
    ) -> dict[str, torch.Tensor]:
        """Return (U,) numbers for the tokens `labels_U` that follow the (flattened) positions `places_U`."""
        if not self.split_head and not isinstance(self.model, ValueModel):
            logits = states_at(own_logits(self.model, input_ids, attention_mask), places_U)
            log_probs_U, entropy_U = log_probs_of(logits, labels_U, temperature)
            found, routes = {"log_probs": log_probs_U, "entropy": entropy_U}, active_routes()
            return found if routes is None else found | routes.means_at(places_U)

        def head(hidden_NE: torch.Tensor, numbers_N: torch.Tensor | None) -> dict[str, torch.Tensor]:
            if isinstance(self.model, ValueModel):
                return {"values": self.model.token_values(hidden_NE)}
            labels_N = labels_U if numbers_N is None else labels_U[numbers_N]
            log_probs_N, entropy_N = token_log_probs(self.model, hidden_NE, labels_N, temperature)
            return {"log_probs": log_probs_N, "entropy": entropy_N}

        found = at_places(self.model, input_ids, position_ids, attention_mask, places_U, head)
        routes = active_routes()
        return found if routes is None else found | routes.means_at(places_U)


def token_log_probs(model: Any, hidden_NE: torch.Tensor, labels_N: torch.Tensor, temperature: float):
    """Return (log-probs, entropies) of `labels_N` at the given hidden states."""
    head = head_of(model)
    hidden_NE = _as_weight(hidden_NE, head)
    if type(head) is torch.nn.Linear and _logit_changes(model) == (None, 1.0):
        layout = active_layout()
        exact = layout is not None and layout.exact
        return logprob_head(hidden_NE, head.weight, labels_N, temperature=temperature, bias_V=head.bias, exact=exact)
    size = max(1, CHUNK_ELEMENTS // model.config.get_text_config().vocab_size)
    parts = [
        checkpoint(_through_own_head, model, *part, temperature, use_reentrant=False, preserve_rng_state=False)
        for part in zip(hidden_NE.split(size), labels_N.split(size), strict=True)
    ]
    log_probs, entropies = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(entropies)


def _through_own_head(model: torch.nn.Module, hidden_NE: torch.Tensor, labels_N: torch.Tensor, temperature: float):
    # For heads with adapters or logit caps: computes all logits of these tokens at once.
    return log_probs_of(logits_of(model, hidden_NE), labels_N, temperature)


def log_probs_of(logits: torch.Tensor, labels_N: torch.Tensor, temperature: float):
    """Return (log-probs, entropies) of `labels_N` from all logits (N, V), in float32 or better."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logp_NV = torch.log_softmax(logits / temperature, -1)
    return logp_NV.gather(1, labels_N[:, None]).squeeze(1), -(logp_NV.exp() * logp_NV).sum(-1)


def logits_of(model: torch.nn.Module, hidden_NE: torch.Tensor) -> torch.Tensor:
    """Return logits as the model itself does, including caps and scales."""
    head = head_of(model)
    logits = head(_as_weight(hidden_NE, head))
    cap, scale = _logit_changes(model)
    logits = logits if scale == 1.0 else logits * scale
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _as_weight(hidden_NE: torch.Tensor, head: Any) -> torch.Tensor:
    # Mamba sums its layers in float32, and rounds for a head in half precision.
    weight = getattr(head, "weight", None)
    if hidden_NE.dtype != torch.float32 or weight is None or weight.dtype not in (torch.bfloat16, torch.float16):
        return hidden_NE
    return hidden_NE.to(weight.dtype)


def _logit_changes(model: Any) -> tuple[float | None, float]:
    # (cap, factor): Gemma-2 caps its logits, Cohere multiplies and Granite divides them.
    config = model.config
    factor = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return getattr(config, "final_logit_softcapping", None), factor


def padding(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (ids, mask) of sequences padded on the right with an arbitrary token; no mask if none is padded."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[row[0]] * (width - len(row))] for row in rows], device=device)
    if all(len(row) == width for row in rows):
        return ids, None
    return ids, torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)


def _parts(model: torch.nn.Module, rows: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
    if forward_mode_of(model).padded:
        yield rows
    else:
        yield from ([row] for row in rows)


def next_logits(model: torch.nn.Module, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return (B, V) logits of the token that follows each sequence."""
    device, found = next(model.parameters()).device, []
    for part in _parts(model, rows):
        ids, mask = padding(part, device)
        ends = [len(row) - 1 for row in part]
        if forward_mode_of(model).split_head:
            found.append(logits_of(model, hidden_states(model, ids, None, mask)[range(len(part)), ends]))
        else:
            found.append(own_logits(model, ids, mask)[range(len(part)), ends])
    return torch.cat(found)


def row_log_probs(
    model: torch.nn.Module, rows: Sequence[Sequence[int]], temperature: float = 1.0
) -> list[torch.Tensor]:
    """Return log-probs of each sequence's tokens except the first, by the model's own forward pass."""
    device, found = next(model.parameters()).device, []
    for part in _parts(model, rows):
        ids, mask = padding(part, device)
        logits = own_logits(model, ids, mask)[:, :-1]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_p = torch.log_softmax(wide / temperature, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        found += [log_p[place, : len(row) - 1] for place, row in enumerate(part)]
    return found


def recompute_layers(model: torch.nn.Module, on: bool = True) -> None:
    """From now on, let layers store only their input when gradients are needed; `on=False` reverts that."""
    for layer in _layers(model):
        if not hasattr(layer, "recomputes"):
            layer.forward = partial(_recompute, layer, layer.forward)
        layer.recomputes = on  # pyright: ignore


def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    # The layers that transformers would recompute; if a model marks none, the parts of its largest list.
    from transformers.modeling_layers import GradientCheckpointingLayer

    marked = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inner = {id(part) for layer in marked for part in layer.modules() if part is not layer}
    if marked:
        return [layer for layer in marked if id(layer) not in inner]
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=_size)) if lists else []


def _size(parts: torch.nn.ModuleList) -> int:
    return sum(weight.numel() for weight in parts.parameters())


def _recompute(layer: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not layer.recomputes or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
