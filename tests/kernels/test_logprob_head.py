"""The chunked log-prob head equals the plain one, in value and gradient, whatever the chunk size."""

import pytest
import torch
from references import plain_logprob_head

from posttrain.kernels import logprob_head as module
from posttrain.kernels.logprob_head import kept_chunks, logprob_head


def inputs(tokens=23, hidden=6, vocabulary=11):
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)  # noqa: E731
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return make(tokens, hidden), make(vocabulary, hidden), make(vocabulary), labels


@pytest.mark.parametrize("chunk_tokens", [1, 4, 23, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_equal_the_twin_to_1e_12(monkeypatch, chunk_tokens, with_bias):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_tokens * 11)
    hidden, weight, bias, labels = inputs()
    bias = bias if with_bias else None
    ours = logprob_head(hidden, weight, labels, temperature=0.7, bias_V=bias)
    twin = plain_logprob_head(hidden, weight, labels, temperature=0.7, bias_V=bias)
    c, d = torch.randn(2, 23, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    wanted = [hidden, weight] + ([bias] if with_bias else [])
    ours_grad = torch.autograd.grad((ours[0] * c + ours[1] * d).sum(), wanted)
    twin_grad = torch.autograd.grad((twin[0] * c + twin[1] * d).sum(), wanted)
    for a, b in zip([*ours, *ours_grad], [*twin, *twin_grad], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_never_holds_more_logits_than_one_chunk(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 44)
    seen = []
    plain = module._logits
    monkeypatch.setattr(module, "_logits", lambda h, *rest: seen.append(h.shape[0]) or plain(h, *rest))
    hidden, weight, _, labels = inputs()
    logprob_head(hidden, weight, labels)[0].sum().backward()
    assert max(seen) == 4 and sum(seen) == 2 * 23


def test_no_token_gives_empty_results_that_can_be_differentiated():
    hidden, weight, _, _ = inputs(tokens=0)
    log_probs, entropy = logprob_head(hidden, weight, torch.zeros(0, dtype=torch.long))
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()


def test_float32_results_from_bfloat16_weights():
    hidden, weight, _, labels = inputs()
    ours = logprob_head(hidden.detach().bfloat16(), weight.detach().bfloat16(), labels)[0]
    assert ours.dtype == torch.float32
    twin = plain_logprob_head(hidden.detach(), weight.detach(), labels)[0]
    assert (ours - twin).abs().max() < 0.1


@pytest.mark.parametrize(
    ("sizes", "most", "kept"),
    [
        ([4, 4, 2], 10, 3),  # all
        ([4, 4, 4, 2], 13, 2),  # two wait while a third is made: 12
        ([4, 4], 7, 0),
        ([5], 4, 0),
    ],
)
def test_as_many_logits_wait_for_the_way_back_as_there_is_room_for(sizes, most, kept):
    assert kept_chunks(sizes, most) == kept
