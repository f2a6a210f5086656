"""`python -m posttrain.explain_docs`: the tables of docs/algorithms.md, made from the pages of `posttrain explain`.

With `--check` nothing is written: status 1 if the page is out of date.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from posttrain.config.choices import ESTIMATORS, POLICY_LOSSES
from posttrain.config.presets import PRESETS
from posttrain.explain import LOSS_PAGES, explain, first_sentence

PAGE = Path(__file__).resolve().parents[1] / "docs" / "algorithms.md"
_TABLE = re.compile(r"(<!-- made: (\w+) -->\n).*?(?=<!-- end -->)", re.S)


def table(kind: str) -> str:
    """The rows of one kind: `estimators`, `losses` or `presets`."""
    if kind == "presets":
        chosen = [(name.split("/")[1], text) for name, (text, _) in PRESETS.items() if name.startswith("algorithm/")]
        return "\n".join(["| preset | |", "|---|---|", *(f"| `algorithm={name}` | {text} |" for name, text in chosen)])
    names = {name: name for name in ESTIMATORS} if kind == "estimators" else {}
    names = names or {name: LOSS_PAGES.get(name, name) for name in POLICY_LOSSES}
    lines = ["| name | | paper |", "|---|---|---|"]
    for name, page in names.items():
        paper = re.search(r"arXiv (\d{4}\.\d{5})", explain(page))
        assert paper is not None, f"the page of {name} names no paper"
        link = f"[arXiv {paper[1]}](https://arxiv.org/abs/{paper[1]})"
        lines.append(f"| `{name}` | {first_sentence(page)} | {link} |")
    return "\n".join(lines)


def text() -> str:
    """The page with its tables made anew."""
    return _TABLE.sub(lambda found: found[1] + table(found[2]) + "\n", PAGE.read_text(encoding="utf-8"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m posttrain.explain_docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; status 1 if the page is out of date")
    check = parser.parse_args(argv).check
    made = text()
    stale = made != PAGE.read_text(encoding="utf-8")
    if stale and not check:
        PAGE.write_text(made, encoding="utf-8")
    if stale:
        print(f"{'out of date' if check else 'written'}: {PAGE}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
