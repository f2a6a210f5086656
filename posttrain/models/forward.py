"""Hidden states, log-probs and values of rows: the forward pass that training, reference and critic share.

`TokenPass` is that pass as one module. Whatever hooks into modules (sharding gathers weights before a `forward` and
drops them after it) sees decoder and head at work inside it, and never beside it.

Shapes: T tokens, U places whose next token is asked for, E hidden size, V vocabulary; R ranks that share a sequence, S
tokens of one's stretch, M places of one at most.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from posttrain.kernels.logprob_head import CHUNK_ELEMENTS, logprob_head
from posttrain.kernels.packed_attention import active_layout
from posttrain.kernels.sequence_parallel import gathered, own_stretch, sequence_group
from posttrain.models.value import ValueModel

LAYERS = {"Qwen2DecoderLayer", "Qwen3DecoderLayer", "LlamaDecoderLayer", "MistralDecoderLayer"}


def without_adapters(model: Any) -> Any:
    """The causal LM itself; peft wraps it and keeps its own layers inside."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_of(model: Any) -> torch.nn.Module:
    """The stack below the language-model head, adapters included."""
    return without_adapters(model).base_model


def head_of(model: Any) -> torch.nn.Module:
    return without_adapters(model).get_output_embeddings()


def hidden_states(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Last hidden states of packed rows (inside `packed_rows`, with their positions) or of rows padded on the right."""
    stack: Any = decoder_of(model)
    if active_layout() is not None and position_ids is not None and _is_plain(stack):
        return _through_layers(stack, input_ids, position_ids)
    named = {"position_ids": position_ids, "attention_mask": attention_mask, "use_cache": False}
    return stack(input_ids=input_ids, **_taken(stack, named)).last_hidden_state


def own_logits(model: torch.nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """All logits of rows padded on the right, by the model's whole forward pass."""
    named = {"attention_mask": attention_mask, "use_cache": False}
    return model(input_ids=input_ids, **_taken(without_adapters(model), named)).logits


def _taken(module: torch.nn.Module, named: dict[str, Any]) -> dict[str, Any]:
    """What is given, and what this module's forward pass has a name for: recurrent models know no positions."""
    known = _names(type(module))
    return {name: value for name, value in named.items() if value is not None and (name in known or "" in known)}


@lru_cache
def _names(kind: type[torch.nn.Module]) -> frozenset[str]:
    """The arguments of a forward pass; an empty name if it takes others too."""
    known = inspect.signature(kind.forward).parameters
    return frozenset("" if each.kind is each.VAR_KEYWORD else name for name, each in known.items())


def _is_plain(stack: Any) -> bool:
    """Whether nothing but embedding, layers of a known kind and a norm make up the stack."""
    names = (type(layer).__name__.removeprefix("FSDP") for layer in getattr(stack, "layers", [None]))
    return all(name in LAYERS for name in names)


def _through_layers(stack: Any, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """What the stack's own `forward` does with packed rows, less the search for sequences in their positions: that
    waits for the device, and the layout knows them."""
    hidden = stack.embed_tokens(input_ids)
    rotation = stack.rotary_emb(hidden, position_ids)
    for layer in stack.layers:
        hidden = layer(hidden, attention_mask=None, position_ids=position_ids, position_embeddings=rotation)
    return stack.norm(hidden)


def states_at(hidden: torch.Tensor, places_U: torch.Tensor) -> torch.Tensor:
    """(U, E) hidden states at these (flattened) places, from a pass that gave those of all tokens or, of packed rows,
    of the wanted ones only."""
    flat, layout = hidden.flatten(0, 1), active_layout()
    if layout is not None and layout.wanted_T is not None and len(flat) < layout.total:
        places_U = torch.searchsorted(layout.wanted_T, places_U)
    return flat.index_select(0, places_U)


Head = Callable[[torch.Tensor, torch.Tensor | None], dict[str, torch.Tensor]]
"""From hidden states and the numbers of the places that they belong to (None: all, in order) to numbers per place."""


def at_places(
    model: torch.nn.Module,
    ids: torch.Tensor,
    position_ids: torch.Tensor | None,
    mask: Any,
    places_U: torch.Tensor,
    head: Head,
) -> dict[str, torch.Tensor]:
    """What `head` makes of the hidden states at these (flattened) places of a pass."""
    group = sequence_group()
    if group is None or position_ids is None:
        return head(states_at(hidden_states(model, ids, position_ids, mask), places_U), None)
    fill = -ids.shape[1] % group.size()
    stretches = (own_stretch(torch.nn.functional.pad(x[0], (0, fill)), group)[None] for x in (ids, position_ids))
    hidden_SE = hidden_states(model, *stretches)[0]
    index_RM, source_U = _dealt_places(places_U, len(hidden_SE), group.size())
    mine_M = index_RM[group.rank()]
    local_M = (places_U[mine_M] - group.rank() * len(hidden_SE)).clamp(0, len(hidden_SE) - 1)
    found = head(hidden_SE.index_select(0, local_M), mine_M)
    return {name: gathered(values_M, group).index_select(0, source_U) for name, values_M in found.items()}


def _dealt_places(places_U: torch.Tensor, stretch: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """By rank, the numbers of the places in its stretch, filled up to the most that one has; and where, in the results
    of all ranks end to end, each place's is."""
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
    """From token ids to `log_probs` and `entropy` of given tokens, or to the `values` of a value model."""

    def __init__(self, model: torch.nn.Module, *, split_head: bool = True) -> None:
        """Without `split_head` the model computes all logits itself."""
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
        """Each (U,): of the tokens `labels_U` that come after the (flattened) places `places_U`."""
        if not self.split_head and not isinstance(self.model, ValueModel):
            logits = states_at(own_logits(self.model, input_ids, attention_mask), places_U)
            log_probs_U, entropy_U = log_probs_of(logits, labels_U, temperature)
            return {"log_probs": log_probs_U, "entropy": entropy_U}

        def head(hidden_NE: torch.Tensor, numbers_N: torch.Tensor | None) -> dict[str, torch.Tensor]:
            if isinstance(self.model, ValueModel):
                return {"values": self.model.token_values(hidden_NE)}
            labels_N = labels_U if numbers_N is None else labels_U[numbers_N]
            log_probs_N, entropy_N = token_log_probs(self.model, hidden_NE, labels_N, temperature)
            return {"log_probs": log_probs_N, "entropy": entropy_N}

        return at_places(self.model, input_ids, position_ids, attention_mask, places_U, head)


def token_log_probs(model: torch.nn.Module, hidden_NE: torch.Tensor, labels_N: torch.Tensor, temperature: float):
    """(log-probs, entropies) of `labels_N` at the given hidden states."""
    head = head_of(model)
    if type(head) is torch.nn.Linear and _logit_changes(model) == (None, 1.0):
        return logprob_head(hidden_NE, head.weight, labels_N, temperature=temperature, bias_V=head.bias)
    size = max(1, CHUNK_ELEMENTS // model.config.get_text_config().vocab_size)  # pyright: ignore
    parts = [
        checkpoint(_by_its_own_head, model, *part, temperature, use_reentrant=False, preserve_rng_state=False)
        for part in zip(hidden_NE.split(size), labels_N.split(size), strict=True)
    ]
    log_probs, entropies = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(entropies)


def _by_its_own_head(model: torch.nn.Module, hidden_NE: torch.Tensor, labels_N: torch.Tensor, temperature: float):
    """The same through the head's own forward pass (adapters, caps): all logits of these tokens at once."""
    return log_probs_of(logits_of(model, hidden_NE), labels_N, temperature)


def log_probs_of(logits: torch.Tensor, labels_N: torch.Tensor, temperature: float):
    """(log-probs, entropies) of `labels_N` from all logits (N, V), in float32 or better."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logp_NV = torch.log_softmax(logits / temperature, -1)
    return logp_NV.gather(1, labels_N[:, None]).squeeze(1), -(logp_NV.exp() * logp_NV).sum(-1)


def logits_of(model: torch.nn.Module, hidden_NE: torch.Tensor) -> torch.Tensor:
    """Logits as the model itself gives them: heads that cap or scale theirs included."""
    logits = head_of(model)(hidden_NE)
    cap, scale = _logit_changes(model)
    logits = logits if scale == 1.0 else logits * scale
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _logit_changes(model: Any) -> tuple[float | None, float]:
    """(cap, factor): Gemma-2 caps its logits, Cohere multiplies and Granite divides them."""
    config = model.config
    factor = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return getattr(config, "final_logit_softcapping", None), factor
