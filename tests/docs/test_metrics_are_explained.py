"""`posttrain explain` knows every metric that a run writes; a new one must be given a sentence."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from posttrain.explain import FAMILIES, METRICS, explain, metric_text
from posttrain.explain import SUPERVISED_METRICS as SUPERVISED

ROOT = Path(__file__).resolve().parents[2] / "posttrain"
ROOMS = ("algorithms", "engine", "workers", "trainer/ppo", "trainer/supervised", "tracking/metrics.py")
PREFIXES = {re.split(r"[/{]", name)[0] for name in [*METRICS, *SUPERVISED, *FAMILIES] if "/" in name} - {""}
METRIC = re.compile(rf"(?:{'|'.join(sorted(PREFIXES))})/[a-z0-9_/@]+")
HELP = "has no explanation: declare it in its algorithm's file or in posttrain/explain/prose/families.md"


def is_explained(name: str) -> bool:
    return metric_text(name) is not None


def written_in(path: Path) -> set[str]:
    """Texts of a file that look like names of metrics."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and METRIC.fullmatch(node.value):
            found.add(node.value)
    return found


def files() -> list[Path]:
    paths = [ROOT / room for room in ROOMS]
    return sorted(file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py")))


PARTIAL = {"critic/score", "critic/rewards", "reward_model"}
"""Beginnings that `_spread` completes."""


@pytest.mark.parametrize("file", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_metrics_named_in_the_code_have_an_explanation(file):
    assert [f"{name} {HELP}" for name in sorted(written_in(file) - PARTIAL) if not is_explained(name)] == []


def test_the_scan_sees_the_names_that_the_code_writes():
    found = {name for file in files() for name in written_in(file)}
    assert {"actor/entropy", "groups/no_signal", "rollout_is/ess", "critic/vf_loss", "val/perplexity"} <= found
    assert not is_explained("actor/new_metric") and not is_explained("groups/whatever")


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("name", ["grad_norm", "lr", "bad_steps", "optimizer_steps"])
def test_metrics_that_are_named_by_role_and_by_what_an_engine_returns_have_an_explanation(role, name):
    assert is_explained(f"{role}/{name}")


def test_explain_answers_a_name_as_metrics_jsonl_spells_it():
    for name in ("critic/score/max", "timing_s/update_actor", "val/openai/gsm8k/mean@1", "reward/Format/mean"):
        assert explain(name).startswith((f"`{name}`: ", f"`{name.lower()}`: ")), name
