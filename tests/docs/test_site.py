"""The documentation as a site: every page is in its menu, every link and anchor leads somewhere, both languages show
the same commands."""

from __future__ import annotations

import re
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


def test_S2_01_every_page_is_in_the_menu_and_the_first_ones_are_in_the_order_of_a_newcomer(staged):
    nav = yaml.safe_load((staged.parent / "mkdocs.yml").read_text())["nav"]
    pages = menu(nav)
    assert sorted(pages) == sorted(path.relative_to(staged).as_posix() for path in staged.rglob("*.md"))
    assert {"configuration.md", "rewards.md", "zh/overview.md", "posttrain_verl.md"} <= set(pages)
    first = ["quickstart", "own_data", "own_reward", "own_algorithm", "tools", "workers", "plan", "coming_from_verl"]
    first += ["coming_from_trl", "extending", "settings", "troubleshooting"]
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
    assert "rows:   72" in said and "mean 1.000, min 1, max 1" in said and "above another row's truth in 72" in said
