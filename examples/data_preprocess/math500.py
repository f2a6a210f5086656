"""Prepares MATH-500, for evaluation: writes test.parquet (500 rows); into $HOME/data/math500.

    python examples/data_preprocess/math500.py                   from the hub; needs a network
    python examples/data_preprocess/math500.py --from FOLDER     from a copy
    python examples/data_preprocess/math500.py --out FOLDER      into another folder

A copy is a folder with math500.jsonl, or test with the columns problem, solution, answer. Takes seconds besides the
download, and prints the paths. It is `posttrain data math500`.

SMOKE=1 prepares a few rows that are written for it, into a new folder, without a network.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed serves too

from examples.smoke.raw_rows import smoke
from posttrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "math500", *smoke("math500"), *sys.argv[1:]]))
