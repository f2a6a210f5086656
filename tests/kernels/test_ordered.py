"""A row of an ordered product, or its log-prob, has the same bits whatever rows and threads there are beside it."""

import pytest
import torch

from posttrain.kernels.ordered import ordered_product, token_log_probs
from posttrain.kernels.whole_step import pack, packed_size
from tests.machine import has_compiler

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler on this machine")
SIZES = [(1, 3, 5), (7, 33, 40), (70, 128, 96), (1030, 64, 32)]


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_product_is_right_and_its_rows_do_not_depend_on_each_other(size):
    rows, inner, outer = size
    x, weight, bias = draw(rows, inner), draw(outer, inner), draw(outer)
    found = ordered_product(x, weight, bias)
    torch.testing.assert_close(found, (x.double() @ weight.double().T + bias.double()).float(), rtol=1e-5, atol=1e-4)
    for first, last in ((0, 1), (rows // 2, rows // 2 + 9), (rows - 3, rows)):
        first = max(first, 0)
        assert torch.equal(ordered_product(x[first:last], weight, bias), found[first:last])
    torch.set_num_threads(1)
    assert torch.equal(ordered_product(x, weight, bias), found)
    torch.set_num_threads(2)


def test_a_product_can_be_added_and_written_into_columns_of_a_wider_matrix():
    x, weight, wide = draw(19, 24), draw(40, 24), torch.ones(19, 100)
    ordered_product(x, weight, into_TC=wide[:, 30:70])
    assert torch.equal(wide[:, 30:70], ordered_product(x, weight))
    ordered_product(x, weight, into_TC=wide[:, 30:70], adds=True)
    assert torch.equal(wide[:, 30:70], 2 * ordered_product(x, weight))
    assert bool((wide[:, :30] == 1).all() and (wide[:, 70:] == 1).all())


def test_packing_a_weight_puts_it_into_tiles_of_columns():
    weight = draw(40, 24)
    tiles = pack(weight, torch.zeros(packed_size(weight))).view(2, 24, 32)
    assert torch.equal(tiles[0], weight[:32].T)
    assert torch.equal(tiles[1, :, :8], weight[32:].T) and not tiles[1, :, 8:].any()


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_log_probs_entropies_and_sums_are_right_and_each_row_stands_alone(temperature):
    logits, labels = 5 * draw(33, 1500), torch.arange(33) * 45
    log_probs, entropies, sums = token_log_probs(logits, labels, temperature)
    scores = logits.double() / temperature
    wanted = scores.log_softmax(-1)
    torch.testing.assert_close(log_probs.double(), wanted.gather(1, labels[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies.double(), -(wanted.exp() * wanted).sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(token_log_probs(logits[7:9], labels[7:9], temperature)[0], log_probs[7:9])
