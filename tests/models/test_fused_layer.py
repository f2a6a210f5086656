"""The fused training layer against transformers' own, in value and gradient, and where it must not be used."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from posttrain.config.model import ModelConfig
from posttrain.engine import torch_engine
from posttrain.engine.base import EngineSettings
from posttrain.engine.torch_engine import TorchEngine
from posttrain.kernels import compiled, gradient_sums, packed_attention, train
from posttrain.kernels.packed_attention import PackedLayout, packed_rows
from posttrain.models import fused_layer, layer_weights
from posttrain.models.forward import hidden_states
from posttrain.models.fused_layer import fuse_layers, join_weights, weights_unchanged
from posttrain.models.lora import add_adapters, base_only
from tests.machine import has_compiler
from tests.rollout.tiny import tiny

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler on this machine")

# Three units: a prompt of 7 with responses of 5, 3 and 20; a plain row of 11; a prompt of 4 with responses of 1 and 17.
UNITS = [(7, [5, 3, 20]), (11, []), (4, [1, 17])]
LENGTHS = [prompt + sum(responses) for prompt, responses in UNITS]
LONG = [(150, [3, 140, 1]), (290, [])]  # more keys than are gone through at a time


def layout(shared=True, units=UNITS):
    segments, positions = [], []
    for prompt, responses in units:
        segments += [torch.zeros(prompt, dtype=torch.long)]
        positions += [torch.arange(prompt)]
        for number, length in enumerate(responses, start=1):
            segments.append(torch.full((length,), number if shared else 0))
            positions.append(torch.arange(prompt, prompt + length))
    lengths = [prompt + sum(responses) for prompt, responses in units]
    end_T = torch.from_numpy(train.ends_of_responses(lengths, torch.cat(segments).numpy()))
    return PackedLayout(lengths, end_T=end_T if shared else None, position_T=torch.cat(positions))


def tree_layout():
    """A row of 60 tokens; behind 40 of them one of 30, which two others branch off; one more behind 10. A plain row."""
    ends = [*[139] * 10, *[119] * 30, *[60] * 20, *[119] * 5, *[109] * 15, *[90] * 10, *[109] * 19, *[119] * 10]
    ends = torch.tensor([*ends, *[139] * 20, *[150] * 11])
    return PackedLayout([139, 11], end_T=ends)


def rows_of(place):
    """Positions by token: responses to one prompt all start behind it."""
    found = []
    for prompt, responses in UNITS:
        found += [*range(prompt)]
        for length in responses:
            found += range(prompt, prompt + length)
    return torch.tensor(found)[None]


def passes(model, place, *, fused, monkeypatch):
    """(hidden states, gradients by name, how many layers were fused)."""
    calls = []
    with monkeypatch.context() as patch:
        if not fused:
            patch.setattr(compiled, "_functions", lambda: None)
        apply = fused_layer._FusedLayer.apply
        patch.setattr(fused_layer._FusedLayer, "apply", lambda *args: calls.append(1) or apply(*args))
        model.zero_grad()
        ids = torch.randint(0, 97, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
        with packed_rows(place):
            hidden = hidden_states(model, ids, rows_of(place))
            (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return hidden.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, len(calls)


@needs_compiler
@pytest.mark.parametrize("end_to_end", [False, True], ids=["apart", "fused weights"])
@pytest.mark.parametrize("shared", [False, True], ids=["rows", "shared prompts"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "llama3-rope"])
def test_equals_transformers_in_value_and_gradient(kind, shared, end_to_end, monkeypatch):
    model = tiny(kind)
    fuse_layers(model)
    if end_to_end:
        join_weights(model)
    place = layout(shared)
    ours, grads, fused = passes(model, place, fused=True, monkeypatch=monkeypatch)
    theirs, plain_grads, not_fused = passes(model, place, fused=False, monkeypatch=monkeypatch)
    assert (fused, not_fused) == (3, 0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    assert grads.keys() == plain_grads.keys()
    for name, grad in plain_grads.items():
        assert (grads[name] - grad).norm() <= 1e-5 * grad.norm(), name


@needs_compiler
@pytest.mark.parametrize("order", [1, -1], ids=["end to end", "in pieces"])
def test_gradients_of_matrices_are_added_to_sums_that_wait_for_them(order, monkeypatch):
    model = tiny("qwen3")
    fuse_layers(model)
    place = layout()
    _, plain, _ = passes(model, place, fused=True, monkeypatch=monkeypatch)
    taken = {name: weight for name, weight in model.named_parameters() if "proj.weight" in name}
    sums = gradient_sums.open_sums(list(taken.values())[::order])
    for _ in range(2):
        _, left, _ = passes(model, place, fused=True, monkeypatch=monkeypatch)
        assert not taken.keys() & left.keys() and plain.keys() == taken.keys() | left.keys()
    for name, total in zip(list(taken)[::order], sums, strict=True):
        torch.testing.assert_close(total, 2 * plain[name], rtol=1e-5, atol=1e-6)
    gradient_sums.close_sums(list(taken.values()))
    _, again, _ = passes(model, place, fused=True, monkeypatch=monkeypatch)
    assert again.keys() == plain.keys()


def test_weights_of_one_product_lie_end_to_end_without_an_engine_that_wants_them_so(monkeypatch):
    model = tiny("qwen2")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    TorchEngine(model, EngineSettings(device=torch.device("cpu")))
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    joined = []
    monkeypatch.setattr(layer_weights.torch, "cat", lambda *args: joined.append(1))
    layer = model.model.layers[0]
    x = torch.ones(1, model.config.hidden_size)
    parts = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
    y = layer_weights.LayerWeights.of(layer).qkv.product(x)
    assert y.shape[1] == sum(part.out_features for part in parts) and not joined


def test_weights_that_are_cut_over_ranks_stay_where_they_were_mapped(monkeypatch):
    model = tiny("qwen2")
    places = [weight.data_ptr() for weight in model.parameters()]
    monkeypatch.setattr(torch_engine, "shard", lambda *args: None)
    TorchEngine(model, EngineSettings(device=torch.device("cpu"), ranks=SimpleNamespace(sequence_size=1)))
    assert [weight.data_ptr() for weight in model.parameters()] == places


@needs_compiler
@pytest.mark.parametrize("units", [UNITS, LONG, "tree"], ids=["short", "long", "tree"])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 4, 32), (4, 2, 16), (6, 2, 24), (3, 1, 8), (5, 1, 7)])
def test_attention_equals_the_written_out_formula(heads, key_heads, size, units):
    """Against float64 over all pairs with a mask, for groups that do not fill the lanes and odd head sizes."""
    place = tree_layout() if units == "tree" else layout(units=units)
    lengths = place.lengths.tolist()
    generator = torch.Generator().manual_seed(heads)
    tokens = sum(lengths)
    shapes = [(tokens, count, size) for count in (heads, key_heads, key_heads)]
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    weights = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    order = torch.arange(tokens)
    seen = (order[:, None] >= order) & (order[:, None] < place.end_T)

    def plain(query, key, value):
        key, value = (x.repeat_interleave(heads // key_heads, 1) for x in (key, value))
        scores = torch.einsum("thd,shd->hts", query, key) * 0.3
        return torch.einsum("hts,shd->thd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)

    def gradients(function, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in (query, key, value)]
        out = function(*inputs)
        return [out, *torch.autograd.grad((out * weights.to(dtype)).sum(), inputs)]

    ours = gradients(lambda *x: train.PackedAttention.apply(*x, place.sight, 0.3), torch.float32)
    for found, expected in zip(ours, gradients(plain, torch.float64), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_a_token_that_is_not_seen_has_no_weight_however_large_it_is():
    place, generator = layout(), torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(sum(LENGTHS), 2, 16, generator=generator) for _ in range(3))
    plain, _ = train.attention_forward(query, key, value, place.sight, 0.3)
    value[LENGTHS[0] - 1] = 3e38  # the last of the first unit: nobody else sees it
    found, _ = train.attention_forward(query, key, value, place.sight, 0.3)
    others = torch.arange(sum(LENGTHS)) != LENGTHS[0] - 1
    assert torch.equal(found[others], plain[others])


def test_a_token_is_seen_up_to_the_end_of_what_continues_it():
    sight = layout().sight
    assert sight.unit_starts.tolist() == [0, 35, 46, 68]
    places = [0, 6, 7, 11, 12, 15, 35, 45, 46, 50, 51, 67]
    assert sight.end[places].tolist() == [35, 35, 12, 12, 15, 35, 46, 46, 68, 51, 68, 68]
    assert np.array_equal(layout(shared=False).sight.end, np.repeat([35, 46, 68], LENGTHS))


@needs_compiler
@pytest.mark.parametrize("why", ["window", "dropout", "two adapters", "float64", "padded"])
def test_transformers_layer_serves_where_the_fused_one_cannot(why, monkeypatch):
    model = tiny("mistral" if why == "window" else "qwen2", dtype=torch.float64 if why == "float64" else torch.float32)
    fuse_layers(model)
    if why in ("dropout", "two adapters"):
        model = add_adapters(model, ModelConfig(lora_rank=2, lora_alpha=2))
    if why == "dropout":
        for layer in adapted_parts(model):
            layer.lora_dropout["default"] = torch.nn.Dropout(0.1)
    if why == "two adapters":
        model.add_adapter("other", model.peft_config["default"])
        model.base_model.set_adapter(["default", "other"])
    monkeypatch.setattr(fused_layer._FusedLayer, "apply", lambda *args: pytest.fail("the fused layer was used"))
    ids = torch.randint(0, 97, (1, sum(LENGTHS)))
    if why == "padded":
        hidden_states(model, ids, torch.arange(ids.shape[1])[None], torch.ones_like(ids)).sum().backward()
    else:
        with packed_rows(layout()):
            hidden_states(model, ids, rows_of(layout())).sum().backward()


def adapted_parts(model):
    return [part for part in model.modules() if hasattr(part, "lora_A")]


def with_drawn_adapters(kind, targets):
    """Adapters whose B is not zero: otherwise A has no gradient."""
    model = tiny(kind)
    fuse_layers(model)
    model = add_adapters(model, ModelConfig(lora_rank=3, lora_alpha=6, target_modules=targets))
    generator = torch.Generator().manual_seed(4)
    for part in adapted_parts(model):
        weight = part.lora_B["default"].weight
        weight.data = torch.randn(weight.shape, generator=generator) * 0.1
    return model


@needs_compiler
@pytest.mark.parametrize("wanted", [None, torch.tensor([0, 6, 7, 8, 15, 34, 35, 50, 67])], ids=["all", "some tokens"])
@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("qwen2", "all-linear"),
        ("qwen3", "all-linear"),
        ("llama", ["q_proj", "v_proj"]),
        ("qwen2", ["down_proj", "k_proj"]),
        ("qwen2", ["o_proj", "gate_proj"]),
    ],
)
def test_adapters_equal_pefts_in_value_and_gradient_and_the_base_has_none(kind, targets, wanted, monkeypatch):
    """Both are float32: by 1e-6, or as far as peft's own rounding goes, they are the same computed in float64."""
    model = with_drawn_adapters(kind, targets)
    ids = torch.randint(0, 97, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))

    def passes(model, fused):
        place = layout()
        place.wanted_T = wanted if fused else None
        with packed_rows(place):
            hidden = hidden_states(model, ids, rows_of(place))[0]
            hidden = hidden if fused or wanted is None else hidden[wanted]
            (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        return hidden.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, place.answered

    ours, grads, answered = passes(copy.deepcopy(model), fused=True)
    with monkeypatch.context() as patch:
        patch.setattr(fused_layer, "_can_fuse", lambda *args: False)
        theirs, plain, _ = passes(copy.deepcopy(model), fused=False)
        _, truth, _ = passes(copy.deepcopy(model).double(), fused=False)
    assert answered == 3, "the layers that were fused are counted"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)
    assert grads.keys() == plain.keys() and all("lora_" in name for name in grads)
    for name, exact in truth.items():
        rounding = (plain[name] - exact).norm()
        assert (grads[name] - exact).norm() <= 1e-6 * exact.norm() + 2 * rounding, name
        assert rounding < 1e-5 * exact.norm(), name


@needs_compiler
@pytest.mark.parametrize("order", [".lora_A.", ".lora_"], ids=["end to end", "in pieces"])
def test_gradients_of_adapters_are_added_to_sums_that_wait_for_them(order, monkeypatch):
    model = with_drawn_adapters("qwen2", "all-linear")
    place = layout()
    _, plain, _ = passes(model, place, fused=True, monkeypatch=monkeypatch)
    taken = dict(sorted(((n, w) for n, w in model.named_parameters() if n in plain), key=lambda x: order not in x[0]))
    sums = gradient_sums.open_sums(list(taken.values()))
    for _ in range(2):
        assert not passes(model, place, fused=True, monkeypatch=monkeypatch)[1]
    for name, total in zip(taken, sums, strict=True):
        torch.testing.assert_close(total, 2 * plain[name], rtol=1e-5, atol=1e-6)
    gradient_sums.close_sums(list(taken.values()))


@needs_compiler
def test_copies_of_adapters_are_made_once_while_weights_stay_and_anew_when_they_may_have_changed(monkeypatch):
    model = with_drawn_adapters("qwen2", "all-linear")
    filled, fill = [], layer_weights.fill
    monkeypatch.setattr(layer_weights, "fill", lambda products: filled.append(1) or fill(products))
    found = []
    for passes_made in (1, 3):
        with weights_unchanged():
            for _ in range(passes_made):
                found.append(passes(model, layout(), fused=True, monkeypatch=monkeypatch)[0])
        assert len(filled) == 3, "once a layer"
        filled.clear()
        adapted_parts(model)[0].lora_B["default"].weight.data.add_(1)
    found.append(passes(model, layout(), fused=True, monkeypatch=monkeypatch)[0])
    assert [torch.equal(found[0], other) for other in found[1:]] == [False] * 4
    assert torch.equal(found[1], found[3]) and not torch.equal(found[3], found[4])


@needs_compiler
def test_adapters_that_are_off_change_nothing_and_no_base_gradient_is_computed(monkeypatch):
    model = with_drawn_adapters("qwen2", "all-linear")
    ids = torch.randint(0, 97, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))

    def hidden():
        with packed_rows(layout()):
            return hidden_states(model, ids, rows_of(layout()))

    with base_only(model), torch.no_grad():
        off = hidden()
    plain = model.get_base_model()
    for part in adapted_parts(model):
        part.lora_B["default"].weight.data.zero_()
    with torch.no_grad():
        torch.testing.assert_close(hidden(), off, rtol=0, atol=0)
    products = []
    multiply = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: products.append((a.shape, b.shape)) or multiply(a, b))
    out = hidden().sum()
    products.clear()
    out.backward()
    shapes = {tuple(weight.shape) for name, weight in plain.named_parameters() if "lora_" not in name}
    made = [(a[0], b[1]) for a, b in products if a[1] == sum(LENGTHS)]
    assert made and not shapes.intersection(made), "a gradient of a base weight was computed"


@needs_compiler
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_the_last_layer_may_leave_out_what_nobody_asks_for(kind, monkeypatch):
    model = tiny(kind)
    fuse_layers(model)
    whole, part = layout(), layout()
    part.wanted_T = torch.tensor([0, 6, 7, 8, 15, 34, 35, 50, 67])
    found = {}
    for name, place in (("whole", whole), ("part", part)):
        model.zero_grad()
        ids = torch.randint(0, 97, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
        with packed_rows(place):
            hidden = hidden_states(model, ids, rows_of(place))[0]
            hidden = hidden if name == "part" else hidden[part.wanted_T]
            hidden.square().sum().backward()
        found[name] = (hidden.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(found["part"][0], found["whole"][0], rtol=0, atol=2e-6)
    for name, grad in found["whole"][1].items():
        assert (found["part"][1][name] - grad).norm() <= 1e-5 * grad.norm(), name


@needs_compiler
def test_frozen_weights_get_no_gradient_and_pass_it_on():
    model = tiny("qwen2")
    fuse_layers(model)
    model.requires_grad_(False)
    embedding = model.get_input_embeddings().weight.requires_grad_()
    with packed_rows(layout()):
        hidden_states(model, torch.randint(0, 97, (1, sum(LENGTHS))), rows_of(layout())).square().sum().backward()
    assert embedding.grad is not None and all(p.grad is None for p in model.parameters() if p is not embedding)


def test_packed_attention_takes_the_kernel_only_where_it_can(monkeypatch):
    tensor = torch.zeros(1, dtype=torch.float64)
    assert not packed_attention.can_attend(8, tensor)
    monkeypatch.setattr(compiled, "_functions", lambda: None)
    assert not packed_attention.can_attend(8, tensor.float())
