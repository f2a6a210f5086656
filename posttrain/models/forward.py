"""Hidden states, log-probs and values of rows: the forward pass that training, reference and critic share."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from posttrain.kernels.logprob_head import CHUNK_ELEMENTS, logprob_head


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
    decoder = decoder_of(model)
    named = {"position_ids": position_ids, "attention_mask": attention_mask, "use_cache": False}
    return decoder(input_ids=input_ids, **_taken(decoder, named)).last_hidden_state


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
