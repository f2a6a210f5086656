"""Verdicts that a program cannot forge: wrong programs that lie fail, and honest ones pass the same tests."""

from __future__ import annotations

import pytest
from forgeries import FORGERIES


def passes(box, program, forgery):
    report = box.test(program, [{"code": forgery.test, "entry": forgery.entry}])
    return any(outcome["passed"] for outcome in report.outcomes)


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_verdict(name, box):
    forgery = FORGERIES[name]
    assert passes(box, forgery.honest, forgery), "an honest program must pass"
    assert not passes(box, forgery.cheat, forgery)
