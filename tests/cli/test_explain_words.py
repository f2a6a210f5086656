"""`posttrain explain` knows the words of a student, and every word of the lines that a run prints."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.config.resolved import ConfigError
from posttrain.config.root import PPOConfig
from posttrain.config.schema import leaves
from posttrain.explain import KEY, SPELLINGS, WORDS, _known, _pages, explain
from posttrain.pulse import Work
from posttrain.tracking.progress import STAGE_WORDS, Moment, progress_row
from posttrain.tracking.step_line import RunFacts, StepFacts, summary

ROOT = Path(__file__).resolve().parents[2]
STUDENT = """
advantage, policy, KL, entropy, clip, reference, checkpoint, batch_size, rollout, reward, epoch, group, loss, critic,
value, learning_rate, lr, temperature, token, step, prompt, response, ratio, validation, baseline, optimizer, seed,
worker, actor, batch size, gradient norm, learning rate, chat template, ground truth, reward hacking, no signal
"""


@pytest.mark.parametrize("word", [word.strip() for word in STUDENT.split(",")])
def test_a_students_word_has_a_short_page_of_its_own(word):
    page = explain(word)
    assert page.split("\n\n")[0] in "\n".join(WORDS.values()) and page.count("\n") < 25, page


@pytest.mark.parametrize("name", WORDS)
def test_a_page_names_settings_pages_and_words_that_there_are(name):
    text = WORDS[name]
    for key in KEY.findall(re.sub(r"docs/\w+\.md|global_step_N|metrics\.jsonl", "", text)):
        known = key in leaves(PPOConfig) or any(f".{key}." in f".{leaf}." for leaf in leaves(PPOConfig))
        assert known or key in ("optim.lr", "rollout.n"), key
    for page in re.findall(r"docs/\w+\.md", text):
        assert (ROOT / page).is_file(), page
    for other in re.findall(r"`posttrain explain ([^`]+)`", text):
        explain(other)
    assert max(map(len, text.splitlines())) <= 120


def test_other_spellings_lead_to_pages_or_settings():
    for word, name in SPELLINGS.items():
        assert explain(word) and (name in _pages() or any(key.endswith(f".{name}") for key in leaves(PPOConfig))), word


@pytest.mark.parametrize(
    "name", ["gradient norm", "Gradient Norm", "GRADIENT_NORM", "gradient-norm", " gradient  norm "]
)
def test_capitals_blanks_underscores_and_hyphens_do_not_matter(name):
    assert explain(name) == explain("gradient norm")


def printed() -> list[str]:
    """A step line and a live row with all their parts, cut at commas and wide blanks."""
    metrics = {"reward_mean": 0.8, "groups/no_signal": 0.38, "kl_loss": 0.01, "actor/pg_clipfrac": 0.016}
    metrics |= {"response_length": 30.0, "perf/throughput": 13395.0, "timing_s/step": 2.0, "timing_s/update_actor": 1.5}
    known = StepFacts(metrics, run=RunFacts(kl_on=True, grouped=True))
    pieces = [text for _, text in summary(known) if text]
    assert len(pieces) == 8, pieces
    work = Work("responses", 64, done=12, tokens=3210)
    moment = Moment(4, 20, 3, number="reward 0.459", stage="gen", step_seconds=9.0, seconds_left=70.0, work=work)
    row = re.sub("[━─]+", "  ", progress_row(moment, 200))
    return pieces + [part for part in re.split(r"  +|, ", row) if part.strip()]


def test_every_piece_of_a_runs_lines_is_explained():
    for piece in printed():
        if re.search("[A-Za-z]", piece.removesuffix(" s")):  # not `1.2 s` and `15%`
            assert explain(piece), piece


def said_in_source(*calls: str) -> dict[str, set[str]]:
    """The texts that are first arguments of all calls of these names in the package."""
    found: dict[str, set[str]] = {call: set() for call in calls}
    for path in (ROOT / "posttrain").rglob("*.py"):
        text = path.read_text()
        if not any(f"{call}(" in text for call in calls):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                call, said = getattr(node.func, "attr", getattr(node.func, "id", "")), node.args[0].value
                if call in calls and isinstance(said, str):
                    found[call].add(said)
    return found


def test_every_stage_and_unit_that_the_live_row_can_show_is_explained():
    said = said_in_source("stage", "showing", "named_stage", "work")
    units = said.pop("work")
    stages = set().union(*said.values(), STAGE_WORDS)
    assert {"gen", "update_actor", "validation", "update"} <= stages and {"responses", "rows", "scores"} <= units
    for word in {STAGE_WORDS.get(name, name) for name in stages} | units:
        assert explain(word), word
        assert "more than half" in explain(f"{word}-bound 76%"), word


@pytest.mark.parametrize("wrong", ["advantagee", "sed", "data.sed", "entropie", "grpoo", "data.promt_key"])
def test_the_nearest_words_are_each_named_once(wrong):
    with pytest.raises(ConfigError) as caught:
        explain(wrong)
    near = re.search(r"Nearest: (.*?)\. `posttrain", str(caught.value))
    names = near[1].split(", ") if near else []
    assert names and len(names) == len(set(names)) and all(name in _known() for name in names), str(caught.value)


def test_what_is_like_nothing_gets_no_hint_and_settings_still_answer_by_their_ends():
    with pytest.raises(ConfigError, match=r"There is no page on `xyzzy`\. `posttrain explain` lists all"):
        explain("xyzzy")
    assert "critic.grad_clip (default 1.0)" in explain("grad_clip")
    assert "actor_rollout_ref.rollout.max_num_seqs (default" in explain("actor_rollout_ref.rollout")
    assert explain("kl+").startswith("`k1`")


def test_a_name_of_several_words_needs_no_quotes(capsys):
    assert main(["explain", "38%", "no", "signal"]) == 0
    assert "they teach nothing" in capsys.readouterr().out
