"""Runs whose later turns do not see earlier thinking: each turn is trained behind the tokens it was sampled behind."""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import scripted
from agent_runs import AGENT, R, samples
from runs import metrics_of, run

from posttrain.errors import UserError
from posttrain.models.embedded import CHAT_TEMPLATE, byte_tokenizer

TALK = """
class Talk:
    def __init__(self):
        self.left = 3

    def reset(self, row, seed):
        return "go"

    def step(self, action):
        self.left -= 1
        return f"more {self.left}", float(len(action) % 3), not self.left
"""
OWN = "{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
DROPS = OWN.replace("(message['content'] or '')", "(message['content'] or '').split('</think>')[-1]")
OPENS = CHAT_TEMPLATE.replace(OWN, DROPS).replace("{{ '<|assistant|>' }}", "{{ '<|assistant|><think>' }}")
STRIP = {f"{R}multi_turn__thinking_in_history": "strip"}
BASE = {**AGENT, f"{R}agent": "talk.py:Talk", "data__max_response_length": 160}


@pytest.fixture
def model_with(tiny_model, tmp_path, monkeypatch):
    """`model_with(template)`: the tiny model with this chat template."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talk.py").write_text(TALK)

    def make(template: str) -> Path:
        folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        return folder

    return make


def thinks(read: str, seed: int) -> str:
    return f"<think>{'hm' * (seed % 4)}</think>{'ab'[seed % 2]}"


def by_sample(rows: list[dict]) -> dict[tuple, list[dict]]:
    found = defaultdict(list)
    for row in rows:
        found[row["uid"], row["sample"]].append(row)
    return found


def texts(row: dict) -> tuple[str, str]:
    """(what a row's last turn was sampled behind, that turn)."""
    decode, mask = byte_tokenizer().decode, row["response_mask"]
    first = mask.index(1)
    return decode([*row["prompt_ids"], *row["response_ids"][:first]]), decode(row["response_ids"][first:])


def test_each_turn_is_a_row_behind_the_words_of_earlier_turns_and_is_trained_once(model_with, sums, tmp_path, capsys):
    engines = scripted.use(thinks)
    result = run(model_with(CHAT_TEMPLATE.replace(OWN, DROPS)), sums, tmp_path / "out", **BASE, **STRIP)
    assert "the ratio is 1 within" in capsys.readouterr().out, "log-probs of all rows are those of the trainer"
    found = by_sample(samples(result))
    assert len(found) == 12
    (engine,) = engines
    asked = {tuple(request.id[:2]): [] for request in engine.seen}
    for request in engine.seen:
        asked[tuple(request.id[:2])].append(byte_tokenizer().decode(list(request.prompt_ids)))
    groups = defaultdict(dict)
    for (uid, sample), rows in found.items():
        assert [(row["branch"], row["parent"]) for row in rows] == [(0, None), (1, 0), (2, 1)]
        read, said = "<|user|>go<|end|><|assistant|>", []
        for number, row in enumerate(rows):
            before, turn = texts(row)
            assert before == read and "<think>" not in before
            assert before in asked[uid, sample], "the context that the engine was given"
            assert turn.startswith("<think>") and turn.endswith("<|end|>")
            assert sum(row["response_mask"]) == len(turn.replace("<|end|>", "#"))
            assert row["num_turns"] == 3
            said.append(turn.removesuffix("<|end|>").partition("</think>")[2])
            read += f"{said[-1]}<|end|><|user|>more {2 - number}<|end|><|assistant|>"
        advantages = {a for row in rows for a, own in zip(row["advantages"], row["response_mask"], strict=True) if own}
        assert len(advantages) == 1, "one advantage for all rows of a conversation"
        groups[uid][sample] = (rows[-1]["score"], advantages.pop())
    for group in groups.values():
        scores, advantages = np.array(list(group.values())).T
        wanted = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
        assert advantages == pytest.approx(wanted, abs=1e-5), "the baseline is over conversations, not rows"
    (line, *_) = metrics_of(result.path)
    assert (line["num_rows/mean"], line["num_turns/mean"], line["groups/count"]) == (3.0, 3.0, 4)
    assert line["reward_mean"] == pytest.approx(
        np.mean([score for one in groups.values() for score, _ in one.values()])
    )


def test_kept_thinking_stays_in_one_row(model_with, sums, tmp_path):
    scripted.use(thinks)
    result = run(model_with(CHAT_TEMPLATE.replace(OWN, DROPS)), sums, tmp_path / "out", **BASE)
    for rows in by_sample(samples(result)).values():
        (row,) = rows
        written = byte_tokenizer().decode(row["response_ids"])
        assert written.count("<think>") == 3 and row["num_turns"] == 3


def test_a_model_that_does_not_think_has_one_row(model_with, sums, tmp_path):
    scripted.use(lambda read, seed: "ab"[seed % 2])
    result = run(model_with(CHAT_TEMPLATE.replace(OWN, DROPS)), sums, tmp_path / "out", **BASE, **STRIP)
    assert all(len(rows) == 1 and rows[0]["num_turns"] == 3 for rows in by_sample(samples(result)).values())


def test_the_most_rows_of_a_sample_end_a_conversation(model_with, sums, tmp_path):
    scripted.use(thinks)
    model = model_with(CHAT_TEMPLATE.replace(OWN, DROPS))
    given = {key: value for key, value in BASE.items() if key != f"{R}agent"}
    given |= {f"{R}agent__path": "talk.py:Talk", f"{R}agent__max_rows": 2}
    for rows in by_sample(samples(run(model, sums, tmp_path / "out", **given, **STRIP))).values():
        assert [row["finish_reason"] for row in rows] == ["stop", "rows"] and not rows[-1]["error"]


def test_a_template_without_thinking_is_rejected_at_the_start(tiny_model, sums, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talk.py").write_text(TALK)
    scripted.use(thinks)
    with pytest.raises(UserError, match="thinking_in_history=strip: the chat template does not drop the thinking"):
        run(tiny_model, sums, tmp_path / "out", **BASE, **STRIP)


SAMPLED = {
    f"{R}agent": "talk.py:Talk",
    f"{R}agent__processes": 2,
    "data__max_prompt_length": 64,
    "data__max_response_length": 64,
    "actor_rollout_ref__actor__shuffle": True,
    "actor_rollout_ref__actor__ppo_mini_batch_size": 2,
    **STRIP,
}
del SAMPLED[f"{R}agent__processes"]


@pytest.mark.slow
def test_a_resumed_run_is_bitwise_the_same(model_with, sums, tmp_path):
    """Sampled turns behind a mark that the prompt opens: nearly none ends its thinking, so all of it is dropped."""
    model = model_with(OPENS)
    how = {**SAMPLED, "trainer__save_freq": 2}
    (tmp_path / "talk.py").write_text(TALK.replace("self.left = 3", "self.left = 2"))
    whole = run(model, sums, tmp_path / "whole", **how, trainer__total_training_steps=4)
    run(model, sums, tmp_path / "parts", **how, trainer__total_training_steps=2)
    parts = run(model, sums, tmp_path / "parts", **how, trainer__total_training_steps=4)
    assert metrics_of(parts.path)[-2:] == metrics_of(whole.path)[-2:]
    assert samples(parts, 4) == samples(whole, 4)


@pytest.mark.slow
def test_two_ranks_train_the_rows_of_one(model_with, sums, tmp_path):
    model = model_with(OPENS)
    how = {**SAMPLED, "trainer__total_training_steps": 1}
    one = run(model, sums, tmp_path / "one", **how)
    two = run(model, sums, tmp_path / "two", **how, trainer__n_gpus_per_node=2)
    shown = ("uid", "sample", "branch", "parent", "prompt_ids", "response_ids", "response_mask", "advantages")
    order = lambda rows: sorted(([row[name] for name in shown] for row in rows), key=lambda row: str(row[:3]))  # noqa: E731
    assert order(samples(two)) == order(samples(one)) and any(row["branch"] for row in samples(one))
    for name in ("actor/loss", "actor/grad_norm"):
        mine, theirs = (next(line[name] for line in metrics_of(result.path) if name in line) for result in (one, two))
        assert theirs == pytest.approx(mine, rel=1e-4, abs=1e-6)
