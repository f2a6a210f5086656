"""Writes everything that is made from the code: YAML trees, generated pages, and the list of mutants that were caught.

    python scripts/generate.py           after you changed a setting, an algorithm, a scorer or a public name
    python scripts/generate.py --check   write nothing; exit status 1 if something is out of date

New mutants are tried, which takes a few seconds each. Those of a new loss or estimator and of its settings follow from
its file and its numeric test (docs/mutants.md).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import mutants

ROOT = Path(__file__).resolve().parents[1]
TREE, COPIES = ROOT / "posttrain" / "trainer" / "config", ROOT / "compat" / "verl" / "trainer" / "config"
sys.path.insert(0, str(ROOT))  # the settings of this checkout, and not of one that is installed


def stale_copies() -> list[Path]:
    """The YAML files of posttrain-verl that differ from posttrain's own."""
    return [copy for copy in COPIES.glob("*.yaml") if copy.read_text() != (TREE / copy.name).read_text()]


def write_stale(files: dict[Path, str], check: bool) -> bool:
    """Write those of these files that are out of date, or only name them; whether there are any."""
    stale = {path: text for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text}
    for path, text in stale.items():
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        print(f"{'out of date' if check else 'written'}: {path}", flush=True)
    return bool(stale)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only; status 1 if something is out of date")
    options = parser.parse_args()
    import made_settings
    import made_tables

    failed = 0
    for module in (made_settings, made_tables):  # in this order: pages are made from the settings' files, too
        failed |= write_stale(module.files(), options.check) and options.check
    for copy in stale_copies():
        print(f"{'out of date' if options.check else 'written'}: {copy}", flush=True)
        failed |= options.check
        if not options.check:
            shutil.copyfile(TREE / copy.name, copy)
    untried = [mutant for mutant in mutants.read_mutants() if mutant.name not in mutants.read_caught()]
    if options.check:
        for mutant in untried:
            print(f"not tried: the mutant {mutant.name}")
        return 1 if failed or untried else 0
    if untried:
        failed |= subprocess.run([sys.executable, "scripts/mutants.py", "--untried", "--write"], cwd=ROOT).returncode
    else:
        mutants.write_caught({})  # mutants that are gone are left out
    return failed


if __name__ == "__main__":
    sys.exit(main())
