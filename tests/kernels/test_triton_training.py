"""Every Triton kernel of training against its formula in torch, at small shapes.

On a CUDA device in float32 and bfloat16. Without one in Triton's interpreter, in float32, if Triton is installed:
`TRITON_INTERPRET=1 pytest tests/kernels/test_triton_training.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from references import plain_logprob_head, plain_sums
from triton_tools import DEVICE, ON_CUDA, D, H, K, draw, each_dtype, near

from posttrain.kernels.train import Sight, ends_of_responses

pytestmark = pytest.mark.gpu(interpreter=True)


@each_dtype
def test_silu_mul_and_its_gradient(dtype):
    from posttrain.kernels.cuda.elementwise import silu_mul
    from posttrain.kernels.cuda.layers import gate_backward

    both, grad = draw(9, 40, dtype=dtype, seed=1), draw(9, 20, dtype=dtype)
    leaf = both.float().requires_grad_()
    product = F.silu(leaf[:, :20]) * leaf[:, 20:]
    near(silu_mul(both), product.detach())
    product.backward(grad.float())
    again, grad_both = gate_backward(grad, both)
    near(again, product.detach())
    near(grad_both, leaf.grad)


@each_dtype
@pytest.mark.parametrize("ranks", [(3, 3, 3), (40, 0, 5), (0, 8, 0), (0, 0, 70)], ids=str)
def test_the_gate_with_adapters_and_its_gradient(dtype, ranks, monkeypatch):
    """Against the plain formula; blocks of tokens, columns and ranks that are not full."""
    from posttrain.kernels.cuda import adapted_gate

    monkeypatch.setattr(adapted_gate, "TOKENS", 16)
    monkeypatch.setattr(adapted_gate, "COLUMNS", 16)
    tokens, size = 37, 44
    both, grad = draw(tokens, 2 * size, dtype=dtype, seed=6), draw(tokens, size, dtype=dtype)
    stacked = draw(tokens, 210, dtype=dtype) / 8
    factors = [  # left ones are columns of a wider tensor, right ones are transposed but for the last, as in a layer
        (stacked[:, place * 70 : place * 70 + rank], right) if rank else None
        for place, rank in enumerate(ranks)
        for right in [draw(size, rank, dtype=dtype).T if place < 2 else draw(rank, size, dtype=dtype)]
    ]
    sums = [x[0].double() @ x[1].double() if x else 0.0 for x in factors]
    leaf = both.double().requires_grad_()
    product = F.silu(leaf[:, :size] + sums[0]) * (leaf[:, size:] + sums[1])
    near(adapted_gate.forward(both, factors[0], factors[1]), product.detach(), at=2)
    product.backward(grad.double() + sums[2])
    again, grad_both = adapted_gate.backward(grad, both, *factors)
    near(again, product.detach(), at=2)
    near(grad_both, leaf.grad, at=4)


@each_dtype
def test_norm_of_training_and_its_gradient(dtype):
    from posttrain.kernels.cuda.layers import norm_backward, norm_forward

    x, weight = draw(37, 48, dtype=dtype, seed=2), draw(48, dtype=dtype)
    grad, added = draw(37, 48, dtype=dtype), draw(37, 48, dtype=dtype)
    leaf, scale = x.float().requires_grad_(), weight.float().requires_grad_()
    wanted = F.rms_norm(leaf, (48,), scale, 1e-6)
    wanted.backward(grad.float())
    copy = torch.full_like(x, float("nan"))
    found, inverse = norm_forward(x, weight, 1e-6, copy)
    near(found, wanted.detach())
    assert torch.equal(copy, x) and torch.equal(norm_forward(x, weight, 1e-6)[0], found)
    grad_x, grad_weight = norm_backward(grad, x, weight, inverse, added)
    near(grad_x, leaf.grad + added.float())
    near(grad_weight, scale.grad, at=4)
    near(norm_backward(grad, x, weight, inverse)[0], leaf.grad)
    frozen, nothing = norm_backward(grad, x, weight, inverse, added, trained=False)
    assert torch.equal(frozen, grad_x) and nothing is None


@each_dtype
@pytest.mark.parametrize("rows", [1, 37, 1100])
def test_columns_are_summed_up_whatever_the_number_of_rows(dtype, rows, monkeypatch):
    from posttrain.kernels.cuda import layers

    monkeypatch.setattr(layers, "MOST_PARTS", 20)
    x = draw(rows, 150, dtype=dtype, seed=7)
    near(layers.column_sums(x, dtype), x.double().sum(0), at=4)


@each_dtype
def test_heads_are_rotated_and_their_gradients_turned_back(dtype):
    from posttrain.kernels.cuda.layers import join_heads, split_heads

    qkv, cosine, sine = draw(9, (H + 2 * K) * D, dtype=dtype, seed=3), draw(9, D, dtype=dtype), draw(9, D, dtype=dtype)
    leaf = qkv.float().requires_grad_()
    heads = leaf.view(9, -1, D)
    half = torch.cat([-heads[..., D // 2 :], heads[..., : D // 2]], -1)
    turned = heads * cosine.float()[:, None] + half * sine.float()[:, None]
    wanted = (turned[:, :H], turned[:, H : H + K], heads[:, H + K :])
    for found, part in zip(split_heads(qkv.clone(), H, K, cosine, sine), wanted, strict=True):
        near(found, part.detach())
    grads = [draw(9, count, D, dtype=dtype) for count in (H, K, K)]
    torch.autograd.backward(wanted, [grad.float() for grad in grads])
    near(join_heads(*grads, cosine, sine), leaf.grad)


@each_dtype
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_statistics_of_logits_and_their_gradient(dtype, temperature):
    from posttrain.kernels.cuda.logprob import gradient, statistics

    logits = (3 * draw(6, 5000, seed=4)).requires_grad_()
    labels = torch.randint(0, 5000, (6,)).to(DEVICE)
    log_p = torch.log_softmax(logits / temperature, -1)
    wanted = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    log_prob, entropy, logsum = statistics(logits.detach(), labels, temperature)
    near(log_prob, wanted[0].detach(), at=5)
    near(entropy, wanted[1].detach(), at=5)
    grads = draw(6), draw(6)
    torch.autograd.backward(wanted, grads)
    near(gradient(logits.detach(), [labels, logsum, entropy, *grads], temperature, dtype), logits.grad)


@pytest.mark.parametrize("keep", [0, 2, 3], ids=["none kept", "some kept", "all kept"])
def test_the_head_gives_the_same_whether_logits_wait_or_are_computed_again(keep):
    from posttrain.kernels import logprob_head as head

    hidden, weight = draw(17, 24, seed=5).requires_grad_(), draw(300, 24).requires_grad_()
    labels = torch.randint(0, 300, (17,)).to(DEVICE)
    chunks = [slice(0, 7), slice(7, 14), slice(14, 17)]
    results = []
    for found in (
        head._CudaHead.apply(hidden, weight, labels, 0.7, chunks, keep),
        plain_logprob_head(hidden, weight, labels, temperature=0.7),
    ):
        results.append([*found, *torch.autograd.grad((found[0] - 0.3 * found[1]).sum(), [hidden, weight])])
    for ours, wanted in zip(*results, strict=True):
        near(ours.detach(), wanted.detach(), at=4)


def test_pieces_of_shared_prompts_for_flash_attention():
    from posttrain.kernels.cuda.flash import Pieces

    segment = np.array([0, 0, 0, 1, 1, 2, 2, 2, 0, 0, 1, 1, 0, 0, 1, 2])
    found = Pieces.of(*shared_prompts([8, 4, 4], segment), torch.device(DEVICE))
    assert found.own.tolist() == [0, 3, 5, 8, 12, 14, 15, 16], "a prompt with a single response is one plain row"
    assert found.response_R.tolist() == [3, 4, 5, 6, 7, 14, 15]
    assert found.prompt_P.tolist() == [0, 1, 2, 0, 1, 2, 12, 13, 12, 13], "a copy for each response"
    queries, keys, longest_query, longest_key = found.over
    assert queries.tolist() == [0, 2, 5, 6, 7] and keys.tolist() == [0, 3, 6, 8, 10]
    assert (longest_query, longest_key) == (3, 3)
    wanted = [[0, 0, 2], [1, 2, 2], [2, 4, 2], [12, 6, 2], [13, 8, 2]]
    assert found.copies_N3.tolist() == wanted, "place, where its copies are listed, how many"
    assert found.copy_P.tolist() == [0, 3, 1, 4, 2, 5, 6, 8, 7, 9]
    found = Pieces.of(*shared_prompts([9], np.array([0] * 6 + [1, 1, 2])), torch.device(DEVICE))
    assert found.prompt_P.tolist() == [*range(6)], "copies of 12 tokens would be more than the pass of 9"
    assert found.copies_N3.tolist() == [[place, place, 1] for place in range(6)]
    plain = Sight.of([3, 4])
    assert Pieces.of(plain.unit_starts, plain.end, torch.device(DEVICE)).over is None


def test_pieces_of_a_tree_for_flash_attention():
    """A row of 9 tokens; behind 6 of them a branch of 2, with a branch of its own behind its first; one behind 3."""
    from posttrain.kernels.cuda.flash import Pieces

    ends = np.array([14, 14, 14, 12, 12, 12, 9, 9, 9, 12, 11, 12, 14, 14])
    found = Pieces.of(np.array([0, 14]), ends, torch.device(DEVICE))
    assert found.own.tolist() == [0, 9, 11, 12, 14], "a row that others branch off is one causal sequence"
    assert found.response_R.tolist() == [9, 10, 11, 12, 13]
    # More copies than tokens: pieces that see the same would be one sequence, and here no two do.
    assert found.prompt_P.tolist() == [*range(6), *range(6), 9, *range(3)]
    assert found.copies_N3.tolist()[:4] == [[0, 0, 3], [1, 3, 3], [2, 6, 3], [3, 9, 2]]
    assert found.copy_P.tolist()[:3] == [0, 6, 13]


def shared_prompts(lengths, segment):
    """Unit starts and ends of prompts with their responses."""
    sight = Sight.of(lengths, ends_of_responses(lengths, np.asarray(segment)))
    return sight.unit_starts, sight.end


@each_dtype
def test_parts_of_an_attention_are_joined_by_their_sums(dtype):
    from posttrain.kernels.cuda.flash import join_parts

    out, over = draw(9, 3, 40, dtype=dtype, seed=6), draw(4, 3, 40, dtype=dtype)
    logsum, over_logsum, places = draw(3, 9), 2 * draw(3, 4), torch.tensor([1, 2, 5, 8]).to(DEVICE)
    both = torch.logaddexp(logsum[:, places], over_logsum)
    wanted, sums = out.float().clone(), logsum.clone()
    shares = [(x - both).exp().T[..., None] for x in (logsum[:, places], over_logsum)]
    wanted[places], sums[:, places] = out[places].float() * shares[0] + over.float() * shares[1], both
    join_parts(out, logsum, over, over_logsum, places)
    near(out, wanted)
    near(logsum, sums)


@pytest.mark.skipif(not ON_CUDA, reason="the interpreter has no warps that could overtake each other")
def test_a_warp_that_comes_late_joins_the_same_parts():
    """Sums are replaced where they stand: a warp must not read one that another has replaced. Some of a million did."""
    from posttrain.kernels.cuda.flash import join_parts

    given, over = (draw(1 << 16, 9, 64, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    sums, over_sums, places = draw(9, 1 << 16), draw(9, 1 << 16), torch.arange(1 << 16, device=DEVICE)
    found = [given.clone() for _ in range(24)]
    for out in found:
        join_parts(out, sums.clone(), over, over_sums, places)
    assert all(torch.equal(out, found[0]) for out in found[1:])


@each_dtype
@pytest.mark.parametrize("shape", [(2, 64), (4, 128), (14, 64), (28, 128), (3, 40), (33, 128), (1, 8)], ids=str)
def test_gradients_of_tokens_in_two_parts_are_added_where_they_stand(dtype, shape):
    """Against the plain formula, and to the bit against the twin: ragged prompts, of one response and of twelve."""
    from posttrain.kernels.cuda.flash import Pieces, add_copies, add_rows

    units = [(5, [3, 1, 4]), (1, [2] * 12), (4, []), (3, [2]), (2, [1, 6])]  # a prompt, its responses
    lengths = [prompt + sum(responses) for prompt, responses in units]
    segment = [np.repeat(range(len(responses) + 1), [prompt, *responses]) for prompt, responses in units]
    pieces = Pieces.of(*shared_prompts(lengths, np.concatenate(segment)), torch.device(DEVICE))
    tokens, rows = sum(lengths), len(pieces.prompt_P)
    own, more = ([draw(n, *shape, dtype=dtype, seed=n + k) for k in range(2)] for n in (tokens, rows))
    sums = [x.double().index_add(0, pieces.prompt_P, y.double()) for x, y in zip(own, more, strict=True)]
    copies = pieces.copies_N3, pieces.copy_P
    twins = [plain_sums(x, y, *copies) for x, y in zip(own, more, strict=True)]
    for found, twin, wanted in zip(add_copies(own, more, *copies), twins, sums, strict=True):
        assert torch.equal(found, twin)
        near(found, wanted)
    own, more = (draw(n, *shape, dtype=dtype, seed=n) for n in (tokens, len(pieces.response_R)))
    number = torch.arange(len(more), device=DEVICE)
    single = torch.stack([pieces.response_R, number, number * 0 + 1], 1)
    wanted = own.double().index_add(0, pieces.response_R, more.double())
    twin, found = plain_sums(own, more, single, number), add_rows(own, more, pieces.response_R)
    assert torch.equal(found, twin) and found.data_ptr() == own.data_ptr(), "in place"
    near(found, wanted)


@pytest.mark.skipif(not ON_CUDA, reason="torch's flash attention needs a CUDA device")
def test_flash_attention_over_shared_prompts_equals_plain_rows():
    from posttrain.kernels.train import PackedAttention

    segment = np.array([0] * 20 + [1] * 9 + [2] * 13 + [0] * 6 + [1] * 4)
    sight = Sight.of([42, 10], ends_of_responses([42, 10], segment))
    tensors = [draw(52, count, 64, dtype=torch.bfloat16, seed=8 + count).requires_grad_() for count in (H, K, K)]
    found = PackedAttention.apply(*tensors, sight, 0.125)
    grad = draw(52, H, 64, dtype=torch.bfloat16)
    found.backward(grad)
    wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
    seen = torch.zeros(52, 52, dtype=torch.bool, device=DEVICE)
    for start, prompt, ends in ((0, 20, [29, 42]), (42, 6, [52])):
        begin = start + prompt
        seen[start:begin, start:begin] = True
        for end in ends:
            seen[begin:end, start : start + prompt] = True
            seen[begin:end, begin:end] = True
            begin = end
    seen &= torch.ones_like(seen).tril()
    query, key, value = (x.transpose(0, 1) for x in wide)
    key, value = (x.repeat_interleave(H // K, 0) for x in (key, value))
    wanted = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.125).transpose(0, 1)
    near(found.detach(), wanted.detach())
    wanted.backward(grad.float())
    for ours, theirs in zip(tensors, wide, strict=True):
        near(ours.grad, theirs.grad, at=2)


@pytest.mark.skipif(not ON_CUDA, reason="torch's flash attention needs a CUDA device")
def test_flash_attention_over_a_tree_equals_a_mask():
    """A row of 90 tokens; behind 60 of them one of 20, with one of 10 behind its first 5; one of 30 behind 30."""
    from posttrain.kernels.train import PackedAttention

    ends = np.array([*[150] * 30, *[120] * 30, *[90] * 30, *[120] * 5, *[110] * 15, *[120] * 10, *[150] * 30])
    sight = Sight.of([150], ends)
    tensors = [draw(150, count, 64, dtype=torch.bfloat16, seed=8 + count).requires_grad_() for count in (H, K, K)]
    found, grad = PackedAttention.apply(*tensors, sight, 0.125), draw(150, H, 64, dtype=torch.bfloat16)
    found.backward(grad)
    wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
    place = torch.arange(150, device=DEVICE)
    seen = (place[:, None] >= place) & (place[:, None] < torch.from_numpy(ends).to(DEVICE))
    query, key, value = (x.transpose(0, 1) for x in wide)
    key, value = (x.repeat_interleave(H // K, 0) for x in (key, value))
    wanted = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.125).transpose(0, 1)
    near(found.detach(), wanted.detach())
    wanted.backward(grad.float())
    for ours, theirs in zip(tensors, wide, strict=True):
        near(ours.grad, theirs.grad, at=2)


@pytest.mark.skipif(not ON_CUDA, reason="cuDNN's attention needs a CUDA device")
@pytest.mark.parametrize("size", [64, 128])
def test_long_rows_are_attended_to_by_cudnn_and_equal_the_plain_formula(size, monkeypatch):
    from posttrain.kernels.cuda import long_rows
    from posttrain.kernels.train import PackedAttention

    monkeypatch.setattr(long_rows, "LONG", 500)
    calls, backward = [], long_rows.attention_backward
    monkeypatch.setattr(long_rows, "attention_backward", lambda *args: calls.append(1) or backward(*args))
    lengths = [512, 700]
    sight = Sight.of(lengths)
    joined = draw(sum(lengths), H + 2 * K, size, dtype=torch.bfloat16, seed=3)  # heads are views into one tensor
    tensors = [part.detach().requires_grad_() for part in joined.split([H, K, K], 1)]
    scale = size**-0.5
    found = PackedAttention.apply(*tensors, sight, scale)
    grad = draw(sum(lengths), H, size, dtype=torch.bfloat16)
    found.backward(grad)
    wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
    rows = []
    for row in zip(*(x.split(lengths) for x in wide), strict=True):
        query, key, value = (x.transpose(0, 1) for x in row)
        key, value = (x.repeat_interleave(H // K, 0) for x in (key, value))
        rows.append(F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale).transpose(0, 1))
    wanted = torch.cat(rows)
    near(found.detach(), wanted.detach())
    wanted.backward(grad.float())
    for ours, theirs in zip(tensors, wide, strict=True):
        near(ours.grad, theirs.grad, at=2)
    assert calls
    monkeypatch.setattr(long_rows, "LONG", 4096)
    near(PackedAttention.apply(*tensors, sight, scale).detach(), found.detach(), at=2)
    assert len(calls) == 1
