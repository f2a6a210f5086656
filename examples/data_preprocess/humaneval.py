"""Prepares HumanEval, for evaluation: writes test.parquet (164 rows); into $HOME/data/humaneval.

    python examples/data_preprocess/humaneval.py                   from the hub; needs a network
    python examples/data_preprocess/humaneval.py --from FOLDER     from a copy
    python examples/data_preprocess/humaneval.py --out FOLDER      into another folder

A copy is a folder with HumanEval.jsonl.gz. Takes seconds besides the download, and prints the paths. It is `posttrain
data humaneval`.

SMOKE=1 prepares a few rows that are written for it, into a new folder, without a network.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed serves too

from examples.smoke.raw_rows import smoke
from posttrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "humaneval", *smoke("humaneval"), *sys.argv[1:]]))
