"""Every layout gives the gradient of the textbook: micro-batch 1 = 2 = 8 = all, packed = padded, in every aggregation.

The textbook is `plain.py`: one row at a time through transformers' own forward pass, at a temperature other than 1.
"""

import functools

import pytest
import torch
from engine_tools import ENTROPY, KL, TEMPERATURE, gradient, objective, ragged_batch
from plain import flat_gradient, plain_loss, plain_model, plain_outputs

from posttrain.algorithms import AGGREGATION_MODES
from posttrain.engine.micro_batches import plan_units
from posttrain.engine.packing import packed_units
from posttrain.rollout.base import Output
from posttrain.rollout.generate import to_batch

LIMITS = {torch.float32: 1e-6, torch.float64: 1e-12}
EXACT = {torch.float32: 1e-5, torch.float64: 1e-7}  # of the textbook's; the weights of tokens are float32
LAYOUTS = [
    {"max_rows": 1},
    {"max_rows": 2},
    {"max_rows": 8},
    {"token_budget": 40},
    {"pack": False},
    {"pack": False, "max_rows": 1},
    {"gradient_checkpointing": True, "max_rows": 4},
    {},
    {"share_prompts": False, "max_rows": 3},
]
COARSE = [layout for index, layout in enumerate(LAYOUTS) if index not in (1, 5)]  # float32: fewer that cut small


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module")
def textbook(tiny_model):
    """`textbook(mode, alike)`: (loss, gradient) of the ragged batch, made once."""
    model = plain_model(tiny_model)
    batches = {alike: ragged_batch(prompts=5, alike=alike) for alike in (False, True)}
    outputs = {alike: plain_outputs(model, batch, TEMPERATURE) for alike, batch in batches.items()}

    @functools.cache
    def expected(mode: str, alike: bool) -> tuple[float, torch.Tensor]:
        loss = plain_loss(outputs[alike], batches[alike], mode=mode, kl=KL, entropy=ENTROPY)
        return float(loss.detach()), flat_gradient(loss, model)

    return expected


@pytest.mark.parametrize(
    ("mode", "dtype"), [*((mode, torch.float64) for mode in AGGREGATION_MODES), ("token-mean", torch.float32)], ids=str
)
@pytest.mark.parametrize("alike", [False, True], ids=["different", "alike"])
def test_gradient_is_the_textbooks_and_the_same_in_every_layout(engines, textbook, mode, dtype, alike):
    batch = ragged_batch(dtype=dtype, prompts=5, alike=alike)
    whole_loss = objective(loss_agg_mode=mode)
    whole = gradient(engines(dtype, {"share_prompts": False}), batch, whole_loss)
    assert whole.norm() > 1e-3
    loss, expected = textbook(mode, alike)
    assert relative(whole.double(), expected) < EXACT[dtype]
    assert whole_loss.metrics()["actor/loss"] == pytest.approx(loss, rel=1e-4)
    for layout in LAYOUTS if dtype is torch.float64 else COARSE:
        loss = objective(loss_agg_mode=mode)
        part = gradient(engines(dtype, layout), batch, loss)
        assert relative(part, whole) < LIMITS[dtype], layout
        for name, value in whole_loss.metrics().items():
            assert loss.metrics()[name] == pytest.approx(value, rel=1e-5, abs=1e-6), (layout, name)


def test_a_division_by_the_micro_batch_would_be_seen(make_engine):
    """The test above can fail: a loss that normalises by its own rows differs between splits."""
    batch = ragged_batch()

    class Wrong(type(objective())):
        def __call__(self, micro, outputs):
            return super().__call__(micro, outputs) * 16 / len(micro)

    def wrong():
        loss = objective()
        loss.__class__ = Wrong
        return loss

    whole = gradient(make_engine(), batch, wrong())
    assert relative(gradient(make_engine(max_rows=2), batch, wrong()), whole) > 0.1


def test_a_prompt_is_computed_once_for_all_its_responses_where_that_is_cheaper(make_engine, monkeypatch):
    from posttrain.models import forward

    seen = []
    plain = forward.hidden_states
    monkeypatch.setattr(
        forward, "hidden_states", lambda m, ids, *rest: seen.append(ids.numel()) or plain(m, ids, *rest)
    )
    batch = ragged_batch(prompts=4)
    mask, width = batch.batch["attention_mask"], batch.batch["responses"].shape[1]
    prompt, response = int(mask[::4, :-width].sum()), int(mask[:, -width:].sum())
    make_engine().log_probs(batch)
    make_engine(share_prompts=False).log_probs(batch)
    last = len(batch)  # the last token of a response is only predicted
    assert seen == [prompt + response - last, int(mask.sum()) - last]


@pytest.mark.parametrize("share", [True, False])
def test_responses_that_begin_alike_are_computed_once(make_engine, share):
    """Only what is fed counts: the last token of a response is not."""
    prompt, answers = [7, 8, 9], [[1, 2, 3], [1, 2, 4], [1, 5], [1, 2, 3, 6], [], [9], [5, 2], [1, 2, 3]]
    outputs = [Output(row, ids, [0.0] * len(ids), "stop") for row, ids in enumerate(answers)]
    batch = to_batch([prompt] * len(answers), outputs, pad_token_id=0)
    units = plan_units(batch, share=share, width=64, all_pairs=False)
    fed = [ids[:-1] for ids in answers]
    if not share:
        assert [(unit.rows, unit.sources) for unit in units] == [([row], [0]) for row in range(len(answers))]
        assert [unit.tokens for unit in units] == [len(prompt) + len(ids) for ids in fed]
        return
    [unit] = units
    own = [len(prompt + ids) - shared for ids, shared in zip(fed, unit.shared, strict=True)]
    whole = [prompt + ids for ids in fed]
    pairs = zip(whole, unit.sources, unit.shared, strict=True)
    assert all(whole[source][:shared] == ids[:shared] for ids, source, shared in pairs)
    assert sorted(own) == [0] * 6 + [1, 6] and unit.tokens == 3 + 3 + 1
    rows = packed_units(batch, units, torch.device("cpu"))
    assert rows.input_ids.tolist() == [[7, 8, 9, 1, 2, 3, 5]]
    engine = make_engine()
    for name, value in make_engine(share_prompts=False).log_probs(batch).items():
        torch.testing.assert_close(engine.log_probs(batch)[name], value, rtol=0, atol=1e-9)


def test_packing_computes_no_padding(make_engine, monkeypatch):
    from posttrain.models import forward

    seen = []
    plain = forward.hidden_states
    monkeypatch.setattr(
        forward, "hidden_states", lambda m, ids, *rest: seen.append(ids.numel()) or plain(m, ids, *rest)
    )
    batch = ragged_batch()
    lengths = batch.batch["attention_mask"].sum(-1)
    real, padded = int(lengths.sum()), len(batch) * int(lengths.max())  # rows are padded to the longest of them
    make_engine().log_probs(batch)
    make_engine(pack=False).log_probs(batch)
    assert seen == [real - len(batch), padded] and real < padded  # the last token of a row is only predicted


@pytest.mark.parametrize("layout", [{}, {"pack": False}, {"max_rows": 3}], ids=str)
def test_log_probs_and_entropies_equal_a_plain_forward_pass(make_engine, tiny_model, layout):
    engine, batch = make_engine(**layout), ragged_batch()
    ours = engine.log_probs(batch, temperature=0.8)
    with torch.no_grad():
        log_probs, entropy = plain_outputs(plain_model(tiny_model), batch, 0.8)
    torch.testing.assert_close(ours["log_probs"], log_probs, rtol=0, atol=1e-7)
    torch.testing.assert_close(ours["entropy"], entropy, rtol=0, atol=1e-7)


def test_an_optimizer_step_moves_the_weights_alike_in_every_layout(make_engine):
    batch = ragged_batch()
    results = []
    for layout in ({}, {"max_rows": 3}, {"pack": False}):
        engine = make_engine(**layout)
        loss = objective()
        metrics = engine.update(loss.prepare(batch.select()), loss)
        assert metrics["skipped"] == 0.0
        results.append(torch.cat([w.detach().flatten() for w in engine.module.parameters()]))
    before = torch.cat([w.detach().flatten() for w in make_engine().module.parameters()])
    assert not torch.equal(results[0], before)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=1e-9)
