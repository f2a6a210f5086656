"""The pages say what is: keys, links, tables and papers in them are compared with the code."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from posttrain.config.choices import ESTIMATORS, POLICY_LOSSES, PRESETS
from posttrain.config.schema import leaves
from posttrain.config.trees import DERIVED, PPO, RENAMED, REWARD_MODEL, SFT
from posttrain.explain import METRICS, _pages
from posttrain.rewards.scorers import SCORERS, known_sources
from posttrain.trainer import main_eval, main_generation

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
SHORT = {"A.": "actor_rollout_ref.actor.", "R.": "actor_rollout_ref.rollout.", "M.": "actor_rollout_ref.model."}
SLIPS = {"data.train_bath_size", "user.max_user_namespaces"}  # the example of an error, and a sysctl
VERL = {*main_generation.FLAGS, *main_generation.KEYS, *main_generation.OTHERS, *main_eval.KNOWN}
KEY = re.compile(r"(?<![\w./])\+?((?:[ARM]\.|[a-z_]+\.)[a-z_]+(?:\.[a-z_]+)*)=")


def whole(key: str) -> str:
    return SHORT[key[:2]] + key[2:] if key[:2] in SHORT else key


def is_known(key: str) -> bool:
    """Whether a program of ours takes this key."""
    return any(tree.canonical(key).key is not None for tree in (PPO, SFT, REWARD_MODEL))


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_that_a_page_gives_a_value_is_known(page):
    unknown = [key for key in KEY.findall(PAGES[page]) if not is_known(whole(key))]
    unknown = [key for key in unknown if PPO.canonical(key.rpartition(".")[0]).key is None]  # entries of a free dict
    if page in ("coming_from_verl.md", "verl_keys.md"):
        unknown = [key for key in unknown if PPO.dialect.answer(key) is None]  # keys of verl
    assert set(unknown) <= SLIPS | (VERL if page == "evaluation.md" else set())


@pytest.mark.parametrize("page", PAGES)
def test_every_link_to_a_file_leads_to_one(page):
    links = re.findall(r"\]\(([^)#:]+)\)", PAGES[page])
    assert [link for link in links if not (ROOT / "docs" / link).is_file()] == []
    scripts = re.findall(r"examples/[\w./-]+\.(?:py|sh)", PAGES[page])
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


def test_the_index_names_every_page_and_written_pages_are_short():
    for page, text in PAGES.items():
        assert page == "README.md" or f"({page})" in PAGES["README.md"]
        written = re.sub(r"<!-- made: .*?<!-- end -->\n", "", text, flags=re.S)  # tables grow with what is registered
        assert page.startswith(("settings", "verl_keys")) or len(written.splitlines()) <= 150, page


@pytest.mark.parametrize(("page", "least"), [("review.md", 50), ("second_review.md", 40)])
def test_the_tests_that_a_review_page_names_are_there(page, least):
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGES[page])
    assert len(named) > least
    files = {file: (ROOT / "tests" / file).read_text() for file, _ in named}
    assert [name for file, name in named if f"\ndef {name}(" not in files[file]] == []


def test_the_algorithms_page_links_the_grpo_paper_and_the_right_drgrpo_paper():
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGES["algorithms.md"], re.M | re.S))
    assert re.findall(r"https://arxiv\.org/abs/([\d.]+)", sections["GRPO"]) == ["2402.03300"]
    assert re.findall(r"https://arxiv\.org/abs/([\d.]+)", sections["DrGRPO"]) == ["2503.20783"]


def test_the_papers_of_the_algorithms_page_are_those_of_explain():
    links = re.findall(r"\[arXiv ([\d.]+)\]\(https://arxiv\.org/abs/([\d.]+)\)", PAGES["algorithms.md"])
    assert links and all(shown == target for shown, target in links)
    explained = " ".join(_pages().values())
    assert [shown for shown, _ in links if shown not in explained] == []


def test_the_algorithms_page_names_everything_that_can_be_chosen():
    text = PAGES["algorithms.md"]
    table = leaves(PPO.root)
    modes = table["actor_rollout_ref.actor.loss_agg_mode"].choices
    names = [*ESTIMATORS, *POLICY_LOSSES, *modes, *table["algorithm.kl_penalty"].choices]
    assert [name for name in names if not re.search(rf"[`=]{re.escape(name)}\b", text)] == []


def test_the_configuration_page_has_every_other_spelling_and_every_preset():
    rows = [re.findall(r"`([^`]+)`", line) for line in PAGES["configuration.md"].splitlines() if line.startswith("|")]
    shown = {whole(spelling): whole(row[-1]) for row in rows if len(row) > 1 for spelling in row[:-1]}
    assert {spelling: shown.get(spelling) for spelling in RENAMED} == RENAMED
    words = {whole(word) for row in rows for word in row}
    assert [key for key in DERIVED if key not in words] == []
    presets = {*words, *re.findall(r"`(algorithm=\w+)`", PAGES["algorithms.md"])}
    assert [name for name in PRESETS if name.replace("/", "=") not in presets] == []


def test_the_rewards_page_has_every_built_in_source_and_the_runs_page_every_explained_metric():
    assert [source for source in known_sources() if f"`{source}`" not in PAGES["rewards.md"]] == []
    assert [name for name in METRICS if f"`{name}`" not in PAGES["runs.md"]] == []


def test_a_scorer_whose_docstring_lacks_its_row_is_named(monkeypatch):
    from made_tables import sources

    monkeypatch.setitem(sys.modules, "my_scorer", ModuleType("my_scorer", "One paragraph."))
    score = SimpleNamespace(__module__="my_scorer")
    monkeypatch.setitem(SCORERS, "mine", score)
    with pytest.raises(SystemExit, match="the docstring of my_scorer needs a second paragraph"):
        sources()


@pytest.mark.parametrize("page", ["algorithms.md", "rewards.md", "api.md"])
def test_the_made_tables_of_a_page_are_those_of_the_code(page):
    from made_tables import PAGES as MADE
    from made_tables import text

    assert page in MADE and "<!-- made: " in PAGES[page] and text(page) == PAGES[page]
