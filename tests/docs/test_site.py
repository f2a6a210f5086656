"""The documentation as a site: every page is in its menu, every link and anchor leads somewhere, both languages show
the same commands."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import build_docs  # noqa: E402
import check_docs  # noqa: E402

TRANSLATED = ("quickstart", "own_data", "own_reward", "own_algorithm")


@pytest.fixture(scope="module")
def staged(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build_docs.stage(folder)
    return folder / "docs"


def menu(entries: list) -> list[str]:
    values = [value for entry in entries for value in (entry.values() if isinstance(entry, dict) else [entry])]
    return [page for value in values for page in (menu(value) if isinstance(value, list) else [value])]


def test_every_page_is_in_the_menu_and_the_first_ones_are_in_the_order_of_a_newcomer(staged):
    nav = yaml.safe_load((staged.parent / "mkdocs.yml").read_text())["nav"]
    pages = menu(nav)
    assert sorted(pages) == sorted(path.relative_to(staged).as_posix() for path in staged.rglob("*.md"))
    assert {"configuration.md", "rewards.md", "zh/overview.md", "posttrain_verl.md"} <= set(pages)
    first = ["quickstart", "real_model", "own_data", "own_reward", "own_algorithm", "tools", "workers", "plan"]
    first += ["coming_from_verl", "coming_from_trl", "extending", "settings", "troubleshooting"]
    assert pages[1 : len(first) + 1] == [f"{name}.md" for name in first]


def anchors(text: str) -> set[str]:
    """The anchors that headings get: small letters, words joined by hyphens."""
    plain = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    headings = [re.sub(r"[`*]|\]\([^)]*\)|\[", "", line) for line in re.findall(r"^#+ (.+)$", plain, re.M)]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_every_link_and_anchor_of_the_site_leads_somewhere(staged):
    wrong, seen = [], 0
    for page in staged.rglob("*.md"):
        text = re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S))
        for target in re.findall(r"\]\(([^)\s:]+)\)", text):
            name, _, anchor = target.partition("#")
            there = page if not name else (page.parent / name).resolve()
            seen += 1
            if not there.is_file() or (anchor and anchor not in anchors(there.read_text())):
                wrong.append(f"{page.relative_to(staged)}: {target}")
    assert seen > 150 and wrong == []


@pytest.mark.parametrize("page", TRANSLATED)
def test_both_languages_show_the_same_commands_and_name_each_other(page):
    english, chinese = ((ROOT / "docs" / folder / f"{page}.md").read_text() for folder in ("", "zh"))
    shown = check_docs.BLOCK.findall(chinese)
    assert shown and shown == check_docs.BLOCK.findall(english)[: len(shown)]
    assert f"(zh/{page}.md)" in english and f"(../{page}.md)" in chinese and re.search("[一-鿿]{8}", chinese)


@pytest.mark.parametrize("page", TRANSLATED)
def test_the_chinese_page_names_all_settings_and_pages_of_the_english_one(page):
    pages = [(ROOT / "docs" / folder / f"{page}.md").read_text() for folder in ("", "zh")]
    pages[0] = pages[0].partition("## Measured time")[0]  # only in English; the Chinese page links to it
    prose = [check_docs.BLOCK.sub("", text) for text in pages]
    for pattern in (r"`([^`\n]+)`", r"\]\((?:\.\./|zh/)*([\w/#-]+\.?[\w#-]*)\)"):
        english, chinese = (set(re.findall(pattern, text)) for text in prose)
        assert english and english - chinese == set()


def test_what_the_first_pages_write_and_try_runs_as_printed(tmp_path):
    """Rows and reward of the two pages, without their trainings (scripts/check_docs.py runs those too)."""
    blocks = [block for page in ("own_data", "own_reward") for _, block in check_docs.blocks_of(page)]
    commands = [command for block in blocks for command in check_docs.commands_of(block)]
    quick = [one for one in commands if not one.startswith(("posttrain train", "posttrain doctor"))]
    assert len(commands) - len(quick) == 3 and len(quick) == 5
    program = "\n".join(["set -e", f'posttrain() {{ "{sys.executable}" -m posttrain "$@"; }}', *quick])
    program = program.replace("python make_rows.py", f"{sys.executable} make_rows.py")
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout.split("reward: compute_score in ")[1]
    assert "rows:   72" in said and "mean 1.000, min 1, max 1" in said and "above another row's in 72" in said


def test_the_loop_of_the_page_calls_worker_groups_and_trains(tiny_model, sums, tmp_path, monkeypatch):
    """The code as printed, in this process; the picture says where what lives."""
    page = (ROOT / "docs" / "own_loop.md").read_text()
    assert "RayPPOTrainer.fit                one process" in page and "group.method(batch)" in page
    [(_, code)] = [block for block in check_docs.blocks_of("own_loop") if block[0] == "python"]
    [command] = check_docs.commands_of(check_docs.blocks_of("own_loop")[1][1])
    arguments = command.replace("\\\n", " ").split()[2:]
    here = {"actor_rollout_ref.model.path=tiny": f"actor_rollout_ref.model.path={tiny_model}"}
    here["data.train_files=sums/train.json"] = f"data.train_files={sums['train']}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["my_loop.py", *(here.get(one, one) for one in arguments), "trainer.export_hf=none"]
    )
    (tmp_path / "my_loop.py").write_text(code)
    runpy.run_path("my_loop.py", run_name="__main__")
    [metrics] = tmp_path.rglob("metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(lines) == 2 and all(line["second/ppo_kl"] != line["first/ppo_kl"] for line in lines)


def test_each_subject_has_a_page_and_trls_arguments_have_a_table(staged):
    page = (staged / "coming_from_trl.md").read_text()
    names = ("num_generations", "max_completion_length", "beta", "epsilon_high", "loss_type", "scale_rewards")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert all(any(f"`{name}" in row for row in rows) for name in names) and len(rows) > 25
    assert all((staged / f"{name}.md").is_file() for name in ("configuration", "own_reward", "workers"))


def test_the_api_page_has_every_public_function_and_class_with_a_sentence():
    from made_tables import MODULES, public_names

    for module in MODULES:
        imported = importlib.import_module(module)
        names = {name for name in imported.__all__ if callable(getattr(imported, name))}
        shown = dict(public_names(module))
        assert names == {signature.partition("(")[0] for signature in shown}, module
        assert [signature for signature, sentence in shown.items() if len(sentence) < 10] == []
