"""Prepares HH-RLHF as pairs for a reward model: prompt (messages), chosen and rejected; into $HOME/data/hh_rlhf.

    python examples/data_preprocess/hh_rlhf.py                   from the hub; needs a network
    python examples/data_preprocess/hh_rlhf.py --from FOLDER     from a copy
    python examples/data_preprocess/hh_rlhf.py --out FOLDER      into another folder

A copy is a folder with files named *train.jsonl.gz or *test.jsonl.gz. Takes seconds besides the download, and prints
the paths. It is `posttrain data hh_rlhf`.

SMOKE=1 prepares a few rows that are written for it, into a new folder, without a network.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed serves too

from examples.smoke.raw_rows import smoke
from posttrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "hh_rlhf", *smoke("hh_rlhf"), *sys.argv[1:]]))
