"""Adding something takes the places that docs/extending.md names; these tests say which one was forgotten."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

from posttrain.algorithms import registry
from posttrain.config import choices
from posttrain.data.recipes import RECIPES, Recipe
from posttrain.rewards.scorers import SCORERS
from posttrain.rollout.base import RolloutEngine, WrappedEngine
from posttrain.rollout.engines import ENGINES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "posttrain"
PAGE = (ROOT / "docs" / "extending.md").read_text()


def modules(folder: str) -> list[str]:
    return sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (PACKAGE / folder).rglob("*.py")
        if path.name != "__init__.py"
    )


def decorated(folder: str, decorator: str) -> dict[str, str]:
    """Names that the files of a folder give to a decorator -> the file."""
    found = {}
    for path in sorted((PACKAGE / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == decorator:
                found |= {ast.literal_eval(arg): path.name for arg in node.args[:1]}
    return found


KINDS = {
    "loss": ("algorithms/losses", "register_policy_loss", registry.POLICY_LOSSES, "POLICY_LOSSES"),
    "estimator": ("algorithms/advantages", "register_adv_est", registry.ADV_ESTIMATORS, "ESTIMATORS"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_algorithm_that_has_a_file_can_be_chosen_without_a_line_elsewhere(kind):
    folder, decorator, registered, setting = KINDS[kind]
    found = decorated(folder, decorator)
    assert len(found) >= 10
    for name, file in found.items():
        assert name in registered and name in getattr(choices, setting), file
        assert file == f"{name}.py", f"the file of {name} is {folder}/{name}.py"
    assert set(getattr(choices, setting)) == set(found)


def test_a_scorer_that_has_a_file_is_found_by_a_data_source():
    used = {inspect.getmodule(scorer).__name__ for scorer in SCORERS.values()}  # pyright: ignore
    having = [name for name in modules("rewards/scorers") if hasattr(importlib.import_module(name), "score")]
    forgotten = [name for name in having if name not in used]
    assert not forgotten, f'decorate `score` of {forgotten} with @register_scorer("DATA_SOURCE")'


def test_a_recipe_that_has_a_file_is_registered():
    made = {
        value.name
        for name in modules("data/recipes")
        for value in vars(importlib.import_module(name)).values()
        if isinstance(value, Recipe)
    }
    assert made == set(RECIPES), f"declare {made ^ set(RECIPES)} with register_recipe"


def subclasses(kind: type) -> set[type]:
    return {found for one in kind.__subclasses__() for found in (one, *subclasses(one))}


def test_a_rollout_engine_that_has_a_file_can_be_named_and_passes_the_conformance_suite():
    for name in modules("rollout"):
        importlib.import_module(name)
    kinds = {kind for kind in subclasses(RolloutEngine) if kind.__module__.startswith("posttrain.")} - {WrappedEngine}
    suite = (ROOT / "tests" / "rollout" / "test_conformance.py").read_text()
    joined = re.search(r"^ENGINES = \{(.*?)\}", suite, re.M | re.S)
    assert joined is not None
    for kind in kinds:
        if inspect.isabstract(kind):
            continue
        name = kind.__module__.split(".")[2]  # posttrain.rollout.NAME...
        assert name in choices.ROLLOUT_ENGINES, f"register {name!r} in posttrain/rollout/engines.py"
        assert name in ENGINES
        assert f'"{name}"' in joined[1], f"let {name!r} join ENGINES of tests/rollout/test_conformance.py"


def test_the_page_names_at_most_three_places_and_they_are_there():
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| ") and "| 1 |" not in line]
    assert {row[0].strip() for row in rows} >= {"policy loss", "scorer of a data source", "logger", "setting", "metric"}
    for row in rows:
        paths = [path for cell in row[1:] for path in re.findall(r"`((?:posttrain|tests|examples)/[\w/.]+)`", cell)]
        missing = [path for path in paths if not (ROOT / path).exists() and "NAME" not in path]
        assert len(row) == 5 and paths and missing == [], row
