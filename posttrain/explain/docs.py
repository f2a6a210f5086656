"""`python -m posttrain.explain.docs`: tables of algorithms.md, rewards.md and api.md, made from what the code says.

With `--check` nothing is written: status 1 if a page is out of date.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from posttrain.config.choices import ESTIMATORS, POLICY_LOSSES
from posttrain.config.presets import PRESETS
from posttrain.explain.api import api
from posttrain.explain.pages import explain, first_sentence, loss_page
from posttrain.rewards.scorers import ALIASES, SCORERS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("algorithms.md", "rewards.md", "api.md")
_TABLE = re.compile(r"(<!-- made: (\w+) -->\n).*?(?=<!-- end -->)", re.S)


def presets() -> list[str]:
    chosen = [(name.split("/")[1], text) for name, (text, _) in PRESETS.items() if name.startswith("algorithm/")]
    return ["| preset | |", "|---|---|", *(f"| `algorithm={name}` | {text} |" for name, text in chosen)]


def estimators() -> list[str]:
    return _papers({name: name for name in ESTIMATORS})


def losses() -> list[str]:
    return _papers({name: loss_page(name) for name in POLICY_LOSSES})


def _papers(pages: dict[str, str]) -> list[str]:
    lines = ["| name | | paper |", "|---|---|---|"]
    for name, page in pages.items():
        paper = re.search(r"arXiv (\d{4}\.\d{5})", explain(page))
        assert paper is not None, f"the page of {name} names no paper"
        link = f"[arXiv {paper[1]}](https://arxiv.org/abs/{paper[1]})"
        lines.append(f"| `{name}` | {first_sentence(page)} | {link} |")
    return lines


def sources() -> list[str]:
    """A row per scorer: the sources that it serves, its file, its first sentence on scores, data sets read as one."""
    lines = ["| data_source | scorer | a response scores | also for |", "|---|---|---|---|"]
    for module in dict.fromkeys(scorer.__module__ for scorer in SCORERS.values()):
        names = [name for name, scorer in SCORERS.items() if scorer.__module__ == module]
        paragraph = " ".join((sys.modules[module].__doc__ or "").split("\n\n")[1].split())
        score = re.split(r"(?<=\.) (?=[A-Z])", paragraph)[0]
        others = ", ".join(alias for alias, name in ALIASES.items() if name in names)
        file = f"`{module.rpartition('.')[2]}.py`"
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {file} | {score} | {others} |")
    return lines


TABLES: dict[str, Callable[[], list[str]]] = {
    "presets": presets,
    "estimators": estimators,
    "losses": losses,
    "sources": sources,
    "api": api,
}


def text(page: str) -> str:
    """The page with its tables made anew."""
    stored = (DOCS / page).read_text(encoding="utf-8")
    return _TABLE.sub(lambda found: "\n".join([found[1].rstrip(), *TABLES[found[2]](), ""]), stored)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m posttrain.explain.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; status 1 if a page is out of date")
    check = parser.parse_args(argv).check
    stale = {page: made for page in PAGES if (made := text(page)) != (DOCS / page).read_text(encoding="utf-8")}
    for page, made in stale.items():
        if not check:
            (DOCS / page).write_text(made, encoding="utf-8")
        print(f"{'out of date' if check else 'written'}: {DOCS / page}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
