"""The list of mutants stays true: their lines are there, every setting, loss and estimator has one, the page shows all.

Whether the named tests fail is tried by `python scripts/mutants.py`, which takes long.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("mutants_script", ROOT / "scripts" / "mutants.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def mutants(script):
    return script.read_mutants()


def test_every_line_is_still_there_exactly_once_and_every_test_too(mutants):
    problems = [problem for mutant in mutants if (problem := mutant.problem())]
    assert not problems, "\n" + "\n".join(problems)
    assert all(mutant.line != mutant.becomes for mutant in mutants)


def test_a_line_that_moved_away_is_named(mutants):
    gone = replace(mutants[0], line="a line that was rewritten")
    assert "this line is no longer there: 'a line that was rewritten'" in gone.problem()
    assert "this line is there" in replace(mutants[0], line="import ").problem()
    assert "there is no test" in replace(mutants[0], test="tests/algorithms/test_losses.py::test_gone").problem()


def test_a_verdict_goes_into_the_page_as_it_comes_and_the_others_stay_unless_they_are_to_be_forgotten(
    script, mutants, tmp_path, monkeypatch
):
    page = tmp_path / "mutants.md"
    page.write_text(f"# A page\n{script.MARK}\nold")
    monkeypatch.setattr(script, "TABLE", page)
    first, second = mutants[:2]
    script.write_page([(first, "caught")])
    script.write_page([(second, "SURVIVED")])
    known = script.known_verdicts(page.read_text())
    assert known[first.row()] == "caught" and known[second.row()] == "SURVIVED"
    assert f"{len(mutants)} mutants, 1 caught." in page.read_text() and page.read_text().startswith("# A page")
    script.write_page([], forget=True)
    known = script.known_verdicts(page.read_text())
    assert {known[mutant.row()] for mutant in mutants} == {"not tried"}


def test_every_setting_has_a_mutant_or_a_reason_to_have_none(script, mutants):
    from posttrain.config.reward_trainer import RewardTrainerConfig
    from posttrain.config.root import PPOConfig
    from posttrain.config.schema import leaves
    from posttrain.config.sft import SFTConfig

    trees = {"": PPOConfig, "sft:": SFTConfig, "rm:": RewardTrainerConfig}
    keys = [prefix + key for prefix, root in trees.items() for key in leaves(root)]
    missing = script.uncovered(keys, mutants)
    assert not missing, (
        f"scripts/mutants/*.toml has no mutant of {', '.join(missing)}; add one with a test that sees it"
    )
    named = {name for mutant in mutants for name in mutant.of}
    gone = {name for name in named if "." in name and " " not in name and not name.endswith("*")} - set(keys)
    assert not gone, f"mutants name settings that there are not: {', '.join(sorted(gone))}"


def test_every_loss_estimator_aggregation_and_kl_type_has_a_mutant(mutants):
    from posttrain.algorithms import AGGREGATION_MODES, KL_TYPES
    from posttrain.algorithms.registry import ADV_ESTIMATORS, POLICY_LOSSES

    named = {name for mutant in mutants for name in mutant.of}
    wanted = {f"loss {name}" for name in POLICY_LOSSES} | {f"estimator {name}" for name in ADV_ESTIMATORS}
    wanted |= set(AGGREGATION_MODES) | {name for name in KL_TYPES if name[0] != "k" or name == "kl"}
    assert not wanted - named


def test_the_page_shows_every_mutant_as_caught(script, mutants):
    verdicts = script.known_verdicts(script.TABLE.read_text())
    wrong = [f"{', '.join(mutant.of)}: {verdicts.get(mutant.row(), 'not tried')}" for mutant in mutants]
    wrong = [line for line in wrong if not line.endswith(": caught")]
    assert not wrong, "docs/mutants.md; `python scripts/mutants.py --only NAME --write` tries one:\n" + "\n".join(wrong)
