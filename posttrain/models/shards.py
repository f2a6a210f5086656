"""A rank's shard of a decoder's weights (tensor parallelism): heads, feed-forward columns, vocabulary; norms are whole.

Column-parallel products (queries, keys, values, gate, up, the head) are split by output, row-parallel ones (out, down)
by input; their partial sums are added over ranks. If there are fewer key heads than ranks, several ranks hold the same
head.
"""

from __future__ import annotations

from typing import Any

import torch

from posttrain.errors import UserError
from posttrain.kernels.tensor_parallel import Team

KEY = "actor_rollout_ref.rollout.tensor_model_parallel_size"


class WeightShards:
    """Which part of each weight a rank holds; `heads` and `key_heads` are this rank's own."""

    def __init__(self, team: Team, config: Any, head_size: int) -> None:
        check_heads(config, team.size)
        self.team = team
        heads, keys = config.num_attention_heads, config.num_key_value_heads
        self.heads, self.key_heads = heads // team.size, own_key_heads(keys, team.size)
        queries = team.span(heads)
        first = keys * team.rank // team.size
        wide, hidden = _times(queries, head_size), team.span(config.intermediate_size)
        narrow = _times(slice(first, first + self.key_heads), head_size)
        self.vocabulary = team.span(config.vocab_size)
        self.rows = {"q_proj": wide, "k_proj": narrow, "v_proj": narrow, "gate_proj": hidden, "up_proj": hidden}
        self.rows |= dict.fromkeys(("embed_tokens", "lm_head"), self.vocabulary)
        self.columns = {"o_proj": wide, "down_proj": hidden}

    def part(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return a view of this rank's part of a weight."""
        module, _, kind = name.rpartition(".")
        module = module.rpartition(".")[2]
        if module in self.rows:
            return weight[self.rows[module]]
        if module not in self.columns:
            return weight
        if kind == "bias":  # the ranks' products are summed, so only one adds it
            return weight if self.team.rank == 0 else torch.zeros_like(weight)
        return weight[:, self.columns[module]]


def check_heads(config: Any, size: int) -> None:
    """Reject models whose heads cannot be divided among the ranks."""
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    if heads % size or (keys % size and size % keys):
        fitting = [one for one in range(1, heads + 1) if not (heads % one or (keys % one and one % keys))]
        raise UserError(
            f"{KEY}={size}: the workers of an engine share out the model's heads, but this one has {heads} of queries "
            f"and {keys} of keys; set one of {', '.join(map(str, fitting))}"
        )


def own_key_heads(keys: int, size: int) -> int:
    """Return the number of key heads that each of `size` ranks holds."""
    return max(1, keys // size)


def _times(heads: slice, size: int) -> slice:
    return slice(heads.start * size, heads.stop * size)
