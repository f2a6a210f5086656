"""No pass has more tokens than its budget, and plans of memory know the largest one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from posttrain.engine.micro_batches import plan_micro_batches, plan_units
from posttrain.planning.rl import Shape
from posttrain.rollout.base import Output
from posttrain.rollout.generate import to_batch

N, PROMPT, RESPONSE, GROUPS = 8, 20, 40, 3


@pytest.fixture(scope="module")
def batch():
    """Three prompts with eight responses each, all of full length."""
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 99, (PROMPT,), generator=draw).tolist() for _ in range(GROUPS)]
    answers = torch.randint(0, 99, (GROUPS * N, RESPONSE), generator=draw).tolist()
    outputs = [Output(row, ids, [0.0] * RESPONSE, "length") for row, ids in enumerate(answers)]
    return to_batch([prompts[row // N] for row in range(GROUPS * N)], outputs, 0)


@pytest.mark.parametrize("micro", [None, 3])
@pytest.mark.parametrize("joining", [0.0, 0.16, 1.0])
@pytest.mark.parametrize("budget", [30, 60, 150, 340, 700, 10**6])
def test_a_group_larger_than_the_budget_is_cut_and_the_plan_knows_the_largest_pass(batch, budget, joining, micro):
    how = {"share": True, "width": 8, "all_pairs": False, "joining": joining, "max_rows": micro}
    units = plan_units(batch, **how, token_budget=budget)  # pyright: ignore
    assert sorted(row for unit in units for row in unit.rows) == list(range(GROUPS * N))
    passes = plan_micro_batches(units, token_budget=budget, max_rows=micro)
    sizes = [sum(unit.tokens for unit in units) for units in passes]
    row = PROMPT + RESPONSE - 1
    assert max(sizes) <= max(budget, row)
    role = SimpleNamespace(ppo_max_token_len_per_gpu=budget, ppo_micro_batch_size_per_gpu=micro)
    shape = Shape(1, PROMPT + RESPONSE, PROMPT, GROUPS * N, GROUPS * N, GROUPS * N, GROUPS)
    tokens, predicted = shape.packed_pass(role, N, joining)
    largest = max(range(len(passes)), key=lambda number: sizes[number])
    assert tokens == sizes[largest] and predicted == RESPONSE * sum(len(unit.rows) for unit in passes[largest])
