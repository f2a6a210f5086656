"""Runs that went wrong on purpose, as `scripts/check_diagnosis.py --record` wrote them: the rules name each within 20
steps, and say nothing about those that went well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.tracking.diagnosis import RULES, RunFacts, StepFacts, collect_advice

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.tsv"))
A = "actor_rollout_ref.actor"


def first_spoken(path: Path) -> tuple[list[str], dict[str, int]]:
    """(the rules of which one must speak, rule -> the first step at which it spoke)."""
    head, names, *rows = path.read_text().splitlines()
    about = json.loads(head)
    settings = about["settings"]
    facts = RunFacts(
        kl_on=settings.get(f"{A}.use_kl_loss", False),
        lr=settings.get(f"{A}.optim.lr", 5e-4),
        n=5,
        temperature=settings.get("actor_rollout_ref.rollout.temperature", 1.0),
    )
    steps = [
        {name: float(value) for name, value in zip(names.split("\t"), row.split("\t"), strict=True) if value}
        for row in rows
    ]
    first: dict[str, int] = {}
    for i, metrics in enumerate(steps):
        for advice in collect_advice(StepFacts(metrics, steps[:i], facts)):
            first.setdefault(advice.rule, i + 1)
    return about["rules"], first


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_run_is_named_within_20_steps_and_a_healthy_one_is_left_alone(path):
    rules, first = first_spoken(path)
    if not rules:
        assert first == {}
    else:
        assert min((first[rule] for rule in rules if rule in first), default=99) <= 20, first


def test_the_records_are_there_and_need_all_rules_but_those_of_single_steps():
    wanted = {rule for path in RECORDED for rule in first_spoken(path)[0]}
    assert len(RECORDED) >= 17 and sum(not first_spoken(path)[0] for path in RECORDED) >= 3
    assert wanted == {rule.__name__ for rule in RULES}
