"""The list of mutants stays true: each has its place and its tests, and every setting, loss and estimator has one.

Whether the named tests fail is tried by `python scripts/mutants.py`, which takes long.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    import mutants

    sys.path.remove(str(SCRIPTS))
    return mutants


@pytest.fixture(scope="module")
def mutants(script):
    return script.read_mutants()


def test_every_mutant_has_its_place_and_its_tests(script, mutants):
    assert not (wrong := script.problems(mutants)), "\n" + "\n".join(wrong)
    changed = [mutant for mutant in mutants if isinstance(mutant, script.ChangedCode)]
    assert changed and all(mutant.code.strip() != mutant.becomes.strip() for mutant in changed)


def test_a_place_or_a_test_that_is_gone_is_named(script, mutants):
    first = next(mutant for mutant in mutants if isinstance(mutant, script.ChangedCode))
    gone = [
        replace(first, code="a line that was rewritten"),
        replace(first, inside="gone"),
        replace(first, tests=("tests/algorithms/test_losses.py::test_gone",)),
    ]
    code, inside, test = script.problems(gone)
    assert "this code is no longer there: 'a line that was rewritten'" in code
    assert f"{first.listed}.toml, {first.name}: nothing is named `gone` any more" in inside
    assert "there is no test tests/algorithms/test_losses.py::test_gone" in test


def test_two_mutants_of_one_name_are_refused(script, tmp_path):
    (tmp_path / "settings.toml").write_text('"a.b" = "tests/x.py::test_x"\n')
    entry = '[[mutant]]\nbreaks = "a.b"\ninside = "f"\ncode = "x"\nbecomes = "y"\ntest = "tests/x.py::test_x"\n'
    (tmp_path / "other.toml").write_text(entry)
    with pytest.raises(ValueError, match=r"several mutants have the same name: a\.b"):
        script.read_mutants(tmp_path)


def test_mutants_of_an_algorithm_and_its_settings_follow_from_its_file(script, tmp_path):
    file = tmp_path / "posttrain/algorithms/losses/mine.py"
    file.parent.mkdir(parents=True)
    text = (
        "class Mine:\n    width: float = 1.0\n\n\n"
        '@register_policy_loss("mine", settings=Mine)\n'
        'def compute_mine(\n    advantages,\n    width,\n):\n    """Mine."""\n    return advantages * width\n'
    )
    file.write_text(text)
    ignored, flipped = script.declared_mutants(tmp_path)
    test = "tests/algorithms/test_losses.py::test_every_token_equals_the_plain_formula[mine]"
    assert (ignored.name, flipped.name) == ("actor_rollout_ref.actor.policy_loss.width", "loss mine")
    assert ignored.tests == flipped.tests == (test,)
    with flipped.applied(tmp_path):
        space: dict = {"register_policy_loss": lambda *args, **kwargs: lambda function: function}
        exec(file.read_text(), space)
        assert space["compute_mine"](3, 2) == -6
    assert file.read_text() == text


def test_what_was_caught_is_kept_in_the_order_of_the_mutants(script, mutants, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "CAUGHT", tmp_path / "caught.txt")
    first, second, third = (mutant.name for mutant in mutants[:3])
    script.write_caught({third: "caught", second: "caught", "a mutant that is gone": "caught"})
    script.write_caught({first: "caught", second: "SURVIVED"})
    assert script.read_caught() == [first, third]


def test_every_setting_has_a_mutant_or_a_reason_to_have_none(script, mutants):
    from posttrain.config.schema import leaves

    roots = {f"{prefix}:" if prefix else "": script.load_root(prefix) for prefix in script.TREES}
    keys = [prefix + key for prefix, root in roots.items() for key in leaves(root)]
    missing = script.uncovered(keys, mutants)
    assert not missing, f"scripts/mutants/settings.toml lacks {', '.join(missing)}; name a test that sees the setting"
    named = {name for mutant in mutants if isinstance(mutant, script.IgnoredSetting) for name in mutant.covers()}
    gone = named - set(keys)
    assert not gone, f"scripts/mutants/settings.toml names settings that there are not: {', '.join(sorted(gone))}"


def test_every_loss_estimator_aggregation_and_kl_type_has_a_mutant(mutants):
    from posttrain.algorithms import AGGREGATION_MODES, KL_TYPES
    from posttrain.algorithms.registry import ADV_ESTIMATORS, POLICY_LOSSES

    named = {name for mutant in mutants for name in mutant.covers()}
    wanted = {f"loss {name}" for name in POLICY_LOSSES} | {f"estimator {name}" for name in ADV_ESTIMATORS}
    wanted |= set(AGGREGATION_MODES) | {name for name in KL_TYPES if name[0] != "k" or name == "kl"}
    missing = sorted(wanted - named)
    assert not missing, f"a file of scripts/mutants (losses.toml, ...) lacks a mutant that breaks: {', '.join(missing)}"


def test_every_mutant_was_caught_when_it_was_last_tried(script, mutants):
    untried = [mutant.name for mutant in mutants if mutant.name not in script.read_caught()]
    assert not untried, "`python scripts/mutants.py --untried --write` tries them:\n" + "\n".join(untried)
