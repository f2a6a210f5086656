"""Gradients that products add up themselves reach the optimizer; weights that no pass used are left alone."""

from __future__ import annotations

import torch

from posttrain.config.root import OptimConfig
from posttrain.engine.optim import Optimizer
from posttrain.kernels.gradient_sums import add_product, added_sum, close_sums, open_sums


def named() -> list[tuple[str, torch.nn.Parameter]]:
    torch.manual_seed(0)
    return [(f"{part}.lora_A.weight", torch.nn.Parameter(torch.randn(3, 4))) for part in ("used", "unused", "both")]


def test_sums_are_the_gradients_of_the_passes_and_a_weight_that_nobody_used_has_none():
    given, plain = named(), named()
    optimizers = [Optimizer(weights, OptimConfig(lr=0.1, weight_decay=0.5)) for weights in (given, plain)]
    optimizers[0].open_sums()
    used, unused, both = (weight for _, weight in given)
    before = unused.detach().clone()
    for seed in range(2):
        torch.manual_seed(seed)
        grad, x = torch.randn(5, 3), torch.randn(5, 4)
        for weight in (used, both):
            assert add_product([weight], grad, x, 2.0)
        (both * 3).sum().backward()
        optimizers[0].gather_gradients()
        ((plain[0][1] + plain[2][1]) * (2 * grad.T @ x)).sum().backward()
        (plain[2][1] * 3).sum().backward()
    for optimizer in optimizers:
        optimizer.step(grad_clip=1.0, total_steps=10)
    torch.testing.assert_close(used, plain[0][1])
    torch.testing.assert_close(both, plain[2][1])
    assert torch.equal(unused, before) and not optimizers[0].adam.state.get(unused), "not even decayed"
    assert not add_product([used], grad, x), "sums end with the step"


def test_sums_of_an_update_that_failed_are_not_those_of_the_next():
    """Weights side by side, alone, and in another order: each product goes to the sums that are open now."""
    weights = [torch.nn.Parameter(torch.zeros(rows, 4)) for rows in (3, 2)]
    grad, x = torch.randn(5, 5), torch.randn(5, 4)
    open_sums(weights)
    assert add_product(weights, grad, x)
    first, second = open_sums(weights)
    assert added_sum(weights[0]) is None
    assert (
        add_product(weights, grad, x)
        and add_product(weights[::-1], grad, x)
        and add_product(weights[:1], grad[:, :3], x)
    )
    torch.testing.assert_close(first, 2 * grad[:, :3].T @ x + grad[:, 2:].T @ x)
    torch.testing.assert_close(second, grad[:, 3:].T @ x + grad[:, :2].T @ x)
    assert added_sum(weights[0]) is first
    close_sums(weights)
    assert not add_product(weights, grad, x)
