"""The table formats x chat templates, each cell by a round trip, and fuzzed turns for every format.

    python scripts/check_call_formats.py                # the table of docs/call_formats.md
    python scripts/check_call_formats.py --fuzz 10000   # so many turns a format

In a cell: the template writes a call, the format reads it, and a tool result follows the turn. `x` is a call that came
back as it was, `.` one that did not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "tools"))
from call_templates import TEMPLATES, tokenizer_of
from fuzzed_turns import read_all

from posttrain.conversations.format_proof import prove_formats
from posttrain.conversations.formats.base import FORMATS
from posttrain.conversations.templates import MessageTemplate


def table() -> tuple[list[str], bool]:
    """(the lines, whether every template is read by its own format alone)."""
    lines, right = [f"| chat template | {' | '.join(FORMATS)} |", "|---|" + "---|" * len(FORMATS)], True
    for family, (_, fitting) in TEMPLATES.items():
        fuse_and_prove = prove_formats(MessageTemplate(tokenizer_of(family))).forms
        lines.append(f"| {family} | " + " | ".join("x" if name in fuse_and_prove else "." for name in FORMATS) + " |")
        right = right and list(fuse_and_prove) == [fitting]
    return lines, right


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the formats of tool calls.")
    parser.add_argument("--fuzz", type=int, metavar="N", help="read N fuzzed turns with every format")
    options = parser.parse_args()
    if options.fuzz is None:
        lines, right = table()
        print("\n".join(lines))
        return 0 if right else 1
    print("| format | turns | calls | unreadable | longest, ms |\n|---|---:|---:|---:|---:|")
    for name in FORMATS:
        calls, broken, longest = read_all(name, options.fuzz)
        print(f"| {name} | {options.fuzz:,} | {calls:,} | {broken:,} | {1000 * longest:.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
