"""A model cut over ranks: the parts are all of it, and what they give adds up to what the whole gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from posttrain.errors import UserError
from posttrain.kernels.tensor_parallel import Team
from posttrain.models.shards import WeightShards, check_heads, own_key_heads

WIDTH, HIDDEN, TOKENS, HEAD = 8, 13, 11, 4


def config(heads: int, keys: int) -> Any:
    return SimpleNamespace(
        num_attention_heads=heads, num_key_value_heads=keys, intermediate_size=HIDDEN, vocab_size=TOKENS
    )


def cuts(size: int, heads: int, keys: int) -> list[WeightShards]:
    groups = [SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: size) for rank in range(size)]
    cpu = torch.device("cpu")
    return [WeightShards(Team(group, cpu), config(heads, keys), HEAD) for group in groups]  # pyright: ignore


@pytest.mark.parametrize("size, keys", [(2, 4), (2, 2), (4, 2), (4, 1)])
def test_ranks_have_all_rows_once_but_heads_of_keys_that_are_fewer(size, keys):
    generator = torch.Generator().manual_seed(0)
    rows = {"self_attn.q_proj": 4 * HEAD, "mlp.up_proj": HIDDEN, "embed_tokens": TOKENS}
    for name, count in rows.items():
        weight = torch.randn(count, WIDTH, generator=generator)
        parts = [cut.part(f"model.layers.0.{name}.weight", weight) for cut in cuts(size, 4, keys)]
        assert torch.equal(torch.cat(parts), weight) and len({len(part) for part in parts}) <= 2
    weight = torch.arange(keys * HEAD)
    held = [cut.part("model.layers.0.self_attn.k_proj.bias", weight) for cut in cuts(size, 4, keys)]
    queries = [cut.part("model.layers.0.self_attn.q_proj.bias", torch.arange(4 * HEAD)) for cut in cuts(size, 4, keys)]
    for own, asking in zip(held, queries, strict=True):
        assert len(own) == own_key_heads(keys, size) * HEAD
        read = {int(query) // HEAD // (4 // keys) for query in asking}  # heads of keys that these queries read
        assert {int(key) // HEAD for key in own} == read


def test_parts_of_a_layer_add_up_to_the_whole():
    weight, bias = torch.randn(WIDTH, HIDDEN, dtype=torch.float64), torch.randn(WIDTH, dtype=torch.float64)
    x = torch.randn(3, HIDDEN, dtype=torch.float64)
    found = torch.zeros(3, WIDTH, dtype=torch.float64)
    for cut in cuts(2, 4, 2):
        own = cut.part("model.layers.1.mlp.down_proj.weight", weight)
        found += F.linear(x[:, cut.columns["down_proj"]], own, cut.part("model.layers.1.mlp.down_proj.bias", bias))
    assert torch.allclose(found, F.linear(x, weight, bias), atol=1e-12)
    assert cuts(2, 4, 2)[1].part("model.norm.weight", bias) is bias


def test_sizes_that_share_out_no_heads_are_refused_with_those_that_do():
    for size in (1, 3, 6, 12):
        check_heads(config(12, 3), size)
    words = r"tensor_model_parallel_size=2: .* 12 of queries and 3 of keys; set one of 1, 3, 6, 12"
    with pytest.raises(UserError, match=words):
        check_heads(config(12, 3), 2)
    with pytest.raises(UserError, match="7 of queries"):
        check_heads(config(7, 7), 2)
