"""Hidden states, log-probs and values of rows: the forward pass that training, reference and critic share."""

from __future__ import annotations

from typing import Any

import torch

from posttrain.kernels.logprob_head import logprob_head


def decoder_of(model: Any) -> torch.nn.Module:
    """The stack below the language-model head, adapters included."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft keeps its layers inside
    return inner.base_model


def head_of(model: Any) -> torch.nn.Module:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner.get_output_embeddings()


def hidden_states(model: torch.nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor, attention_mask=None):
    """Last hidden states of packed rows (inside `packed_rows`) or of a padded batch."""
    output = decoder_of(model)(
        input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=False
    )
    return output.last_hidden_state


def token_log_probs(model: torch.nn.Module, hidden_NE: torch.Tensor, labels_N: torch.Tensor, temperature: float):
    """(log-probs, entropies) of `labels_N` at the given hidden states."""
    head = head_of(model)
    cap, scale = (getattr(model.config, name, None) for name in ("final_logit_softcapping", "logit_scale"))
    if cap or scale or type(head) is not torch.nn.Linear:
        return _capped_log_probs(head, hidden_NE, labels_N, temperature, cap, scale)
    return logprob_head(hidden_NE, head.weight, labels_N, temperature=temperature, bias_V=head.bias)


def _capped_log_probs(head, hidden_NE, labels_N, temperature, cap, scale):
    """Heads that do more than one matrix product (score caps, scaled logits, adapters on the head)."""
    logits = head(hidden_NE)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * (scale or 1.0)
    if cap:
        logits = torch.tanh(logits / cap) * cap
    logp_NV = torch.log_softmax(logits / temperature, -1)
    return logp_NV.gather(1, labels_N[:, None]).squeeze(1), -(logp_NV.exp() * logp_NV).sum(-1)
