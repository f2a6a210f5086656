"""Pairs: their columns and forms, the Bradley-Terry loss, and a gradient that no split into passes changes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from chat_templates import CHATML, tokenizer_with

from posttrain.config.root import OptimConfig
from posttrain.config.supervised import PairDataConfig
from posttrain.data.rows import DataError
from posttrain.data.supervised import Pair, PairDataset
from posttrain.engine.base import EngineSettings
from posttrain.engine.heads import ScoreHead
from posttrain.engine.torch_engine import TorchEngine
from posttrain.models.scorer_loading import load_scorer
from posttrain.trainer.supervised.tasks import pair_batch
from posttrain.workers.supervised import bradley_terry_loss

CPU = torch.device("cpu")
USER = {"role": "user", "content": "2 + 2?"}


def answer(text):
    return {"role": "assistant", "content": text}


def dataset(rows, tokenizer=None, **config):
    return PairDataset(rows, tokenizer or tokenizer_with(CHATML), PairDataConfig(**config))


FORMS = {
    "texts": {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
    "messages": {"prompt": [USER], "chosen": [answer("4")], "rejected": [answer("5")]},
    "mixed": {"prompt": [USER], "chosen": "4", "rejected": [answer("5")]},
    "whole dialogues beside the prompt": {"prompt": [USER], "chosen": [USER, answer("4")], "rejected": "5"},
    "whole dialogues": {"chosen": [USER, answer("4")], "rejected": [USER, answer("5")]},
    "Human and Assistant": {
        "chosen": "\n\nHuman: 2 + 2?\n\nAssistant: 4",
        "rejected": "\n\nHuman: 2 + 2?\n\nAssistant: 5",
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_pair_is_read_as_the_same_conversation(form):
    tokenizer = tokenizer_with(CHATML)
    [pair] = dataset([FORMS[form]], tokenizer)
    for ids, text in ((pair.chosen, "4"), (pair.rejected, "5")):
        assert ids == tokenizer.apply_chat_template([USER, answer(text)], return_dict=False)


def test_a_dialogue_of_several_turns_keeps_what_looks_like_a_name_inside_a_turn():
    tokenizer = tokenizer_with(CHATML)
    text = "\n\nHuman: one\nHuman: still one\n\nAssistant: a\n\nHuman: two\n\nAssistant: {}"
    [pair] = dataset([{"chosen": text.format("b"), "rejected": text.format("")}], tokenizer)
    turns = [("user", "one\nHuman: still one"), ("assistant", "a"), ("user", "two"), ("assistant", "b")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert pair.chosen == tokenizer.apply_chat_template(messages, return_dict=False)


def test_without_a_chat_template_an_answer_follows_its_prompt():
    tokenizer = tokenizer_with(CHATML)
    tokenizer.chat_template = None
    [pair] = dataset([FORMS["texts"]], tokenizer)
    assert tokenizer.decode(pair.chosen) == "2 + 2?4"


WRONG = {
    "no chosen": ({"prompt": "a", "rejected": "b"}, r"has no 'chosen' \(data\.chosen_key\). The row has: prompt, rej"),
    "null": ({"prompt": "a", "chosen": "b", "rejected": None}, "has no 'rejected'"),
    "no dialogue": ({"chosen": "yes", "rejected": "no"}, r"no prompt .* is no dialogue .*Human:"),
    "ends with the user": ({"chosen": [USER], "rejected": [USER, answer("5")]}, "ends with a turn of 'user'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_pairs_are_named(case):
    row, message = WRONG[case]
    with pytest.raises(DataError, match=message):
        dataset([row])


def test_equal_and_overlong_answers_are_left_out_and_counted():
    same = {"prompt": "a", "chosen": "b", "rejected": "b"}
    long = {"prompt": "a", "chosen": "b" * 100, "rejected": "c"}
    made = dataset([FORMS["texts"], same, long], max_length=90, truncation="drop")
    assert len(made) == 1
    assert any("1 of 3 train pairs have two equal answers" in note for note in made.notes)
    assert any("1 of 3 train pairs were left out" in note for note in made.notes)
    with pytest.raises(DataError, match="None of the 1 train pairs"):
        dataset([same])


def test_margins_come_from_their_column():
    [pair] = dataset([{**FORMS["texts"], "lead": 2}], margin_key="lead")
    assert pair.margin == 2.0
    with pytest.raises(DataError, match=r"'lead' \(data\.margin_key\) of row 1 .* is None"):
        dataset([FORMS["texts"]], margin_key="lead")


def test_the_loss_is_the_plain_formula():
    chosen, rejected, margin = (torch.tensor(x, dtype=torch.float64) for x in ([1.5, -40.0], [0.25, 3.0], [0.5, 0.0]))
    losses = bradley_terry_loss(chosen, rejected, margin, center_coef=0.01).tolist()
    expected = [-math.log(1 / (1 + math.exp(-0.75))) + 0.01 * 1.75**2, math.log1p(math.exp(43.0)) + 0.01 * 37.0**2]
    assert losses == pytest.approx(expected, rel=1e-14)


PAIRS = [
    Pair([1, 2, 3, 4, 5, 6], [1, 2, 3, 9], 0.5),
    Pair([7] * 20 + [8], [7] * 20 + [9, 10]),
    Pair([30, 31], [40, 41, 42], -0.25),
    Pair([1, 2, 3], [1, 2, 3, 4, 5]),  # one is the beginning of the other
    Pair([1, 2, 3, 50, 256, 256], [1, 2, 3, 60]),  # 256 is padding
]
LAYOUTS = [
    {},
    {"max_rows": 1},
    {"max_rows": 2},
    {"token_budget": 12},
    {"share_prompts": False},
    {"pack": False},
    {"gradient_checkpointing": True, "max_rows": 2},
]


def scorer(folder):
    model = load_scorer(str(folder), CPU, torch.float64, new_head=True)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.score.weight)
    return model


def plain_gradient(folder) -> tuple[float, torch.Tensor]:
    """Each answer alone by transformers' own forward pass; the mean over pairs."""
    model = scorer(folder)
    scores = [[model(torch.tensor([ids])).logits[0, 0] for ids in (p.chosen, p.rejected)] for p in PAIRS]
    losses = [
        -torch.log(torch.sigmoid(better - worse - pair.margin)) + 0.1 * (better + worse) ** 2
        for (better, worse), pair in zip(scores, PAIRS, strict=True)
    ]
    loss = torch.stack(losses).mean()
    loss.backward()
    return float(loss.detach()), torch.cat([weight.grad.flatten() for weight in model.parameters()])


@pytest.fixture(scope="module")
def expected(tiny_model):
    return plain_gradient(tiny_model)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradient_equals_the_plain_formula_in_every_split_into_passes(tiny_model, expected, layout):
    engine = TorchEngine(scorer(tiny_model), EngineSettings(device=CPU, optim=OptimConfig(), **layout), ScoreHead())
    batch, total = pair_batch(PAIRS, 256), 0.0

    def loss(micro, outputs):
        nonlocal total
        scores, margins = outputs["scores"][:, 0], micro.batch["margins"].double()
        losses = bradley_terry_loss(scores[::2], scores[1::2], margins[::2], center_coef=0.1)
        share = (losses * micro.batch["pair_weights"][::2]).sum()
        total += float(share.detach())
        return share

    engine.runner.gradients(batch, loss, 1.0)
    assert engine.optimizer is not None
    gradient = torch.cat([master.grad.flatten() for master in engine.optimizer.masters])
    assert total == pytest.approx(expected[0], rel=1e-11)
    assert float((gradient - expected[1]).norm() / expected[1].norm()) < 1e-10


def test_pairs_stay_together_and_a_common_beginning_is_computed_once(tiny_model, monkeypatch):
    from posttrain.models import forward

    seen = []
    plain = forward.hidden_states
    monkeypatch.setattr(
        forward, "hidden_states", lambda m, ids, *rest: seen.append(ids.numel()) or plain(m, ids, *rest)
    )
    engine = TorchEngine(scorer(tiny_model), EngineSettings(device=CPU, max_rows=1), ScoreHead())
    assert all(
        sorted(row // 2 for unit in units for row in unit.rows) == [number] * 2
        for number, units in [(units[0].rows[0] // 2, units) for units in engine.runner.plan(pair_batch(PAIRS, 256))]
    )
    engine.scores(pair_batch(PAIRS[1:2], 256))
    assert seen == [20 + 1 + 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_pairs_without_a_common_beginning_are_scored_too(tiny_model, dtype):
    model = scorer(tiny_model).to(dtype)
    pair = PAIRS[2]
    found = TorchEngine(model, EngineSettings(device=CPU), ScoreHead()).scores(pair_batch([pair], 256))
    with torch.no_grad():
        plain = [float(model(torch.tensor([ids])).logits[0, 0]) for ids in (pair.chosen, pair.rejected)]
    assert found.tolist() == pytest.approx(plain, rel=1e-5 if dtype == torch.float32 else 1e-12)


def test_batches_are_not_changed_by_scoring(tiny_model):
    engine = TorchEngine(scorer(tiny_model), EngineSettings(device=CPU), ScoreHead())
    batch = pair_batch(PAIRS, 256)
    before = copy.deepcopy(dict(batch.batch))
    engine.scores(batch)
    assert all(torch.equal(before[name], batch.batch[name]) for name in before)
