"""The table of chat templates and formats of tool calls, each line by conversations, and fuzzed turns for every format.

    python scripts/check_call_formats.py                     # the table of docs/call_templates.md
    python scripts/check_call_formats.py --templates FOLDER  # that of a folder of *.jinja files
    python scripts/check_call_formats.py --short             # formats x the short templates of the tests
    python scripts/check_call_formats.py --fuzz 1000         # so many turns a format

A line: the formats that read a call of the template and were shown a result (`auto` picks the first one), which
arguments did not come back as they were, and how tokens that are appended turn by turn differ from the conversation
that the template renders at once. Why a template is rejected stands below the table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "tools"))
from call_templates import TEMPLATES, tokenizer_of
from fuzzed_turns import read_all
from template_round_trips import make_trips, read_templates

from posttrain.conversations.format_proof import prove_formats
from posttrain.conversations.formats.base import FORMATS
from posttrain.conversations.templates import MessageTemplate

REAL = Path(__file__).resolve().parents[1] / "tests" / "tools" / "real_templates"


def real_table(folder: Path) -> Iterator[str]:
    """The lines for the chat templates of a folder."""
    rejected = list[str]()
    yield "| chat template | format | arguments that change | appended tokens |\n|---|---|---|---|"
    for name, source in read_templates(folder).items():
        trips = make_trips(source)
        if trips.rejected:
            rejected.append(f"- {name}: {trips.rejected.partition(chr(10))[0]}")
        found = ", ".join(f"`{one}`" for one in trips.formats) or "rejected"
        changed = ", ".join(trips.changed) or ("none" if trips.formats else "")
        differs = ", ".join(trips.differs) or ("the same" if trips.formats else "")
        yield f"| {name} | {found}{'' if trips.several else ', one call a turn'} | {changed} | {differs} |"
        rejected += [f"- {name}, {where}" for kind, where in trips.differs.items() if kind == "text"]
    yield ""
    yield from rejected


def short_table() -> tuple[list[str], bool]:
    """(the lines for the short templates, whether every one is read by its own format alone)."""
    lines, right = [f"| chat template | {' | '.join(FORMATS)} |", "|---|" + "---|" * len(FORMATS)], True
    for family, (_, fitting) in TEMPLATES.items():
        fitted = prove_formats(MessageTemplate(tokenizer_of(family))).forms
        lines.append(f"| {family} | " + " | ".join("x" if name in fitted else "." for name in FORMATS) + " |")
        right = right and list(fitted) == [fitting]
    return lines, right


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the formats of tool calls.")
    parser.add_argument("--templates", type=Path, metavar="FOLDER", help="a folder of chat templates (*.jinja)")
    parser.add_argument("--short", action="store_true", help="formats x the short templates of the tests")
    parser.add_argument("--fuzz", type=int, metavar="N", help="read N fuzzed turns with every format")
    options = parser.parse_args()
    if options.short:
        lines, right = short_table()
        print("\n".join(lines))
        return 0 if right else 1
    if options.fuzz is None:
        folder = options.templates or REAL
        if not read_templates(folder):
            parser.error(f"--templates: {folder} has no *.jinja file")
        for line in real_table(folder):
            print(line, flush=True)
        return 0
    print("| format | turns | calls | unreadable | longest, ms |\n|---|---:|---:|---:|---:|")
    for name in FORMATS:
        calls, broken, longest = read_all(name, options.fuzz)
        print(f"| {name} | {options.fuzz:,} | {calls:,} | {broken:,} | {1000 * longest:.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
