"""Prepares conversations for multi-turn SFT (the preferred ones of HH-RLHF): a column of messages; into
$HOME/data/hh_rlhf_sft.

    python examples/data_preprocess/multiturn.py                   from the hub; needs a network
    python examples/data_preprocess/multiturn.py --from FOLDER     from a copy
    python examples/data_preprocess/multiturn.py --out FOLDER      into another folder

A copy is a folder with files named *train.jsonl.gz or *test.jsonl.gz. Takes seconds besides the download, and prints
the paths. It is `posttrain data hh_rlhf_sft`.

SMOKE=1 prepares a few rows that are written for it, into a new folder, without a network.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed serves too

from examples.smoke.raw_rows import smoke
from posttrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "hh_rlhf_sft", *smoke("hh_rlhf_sft"), *sys.argv[1:]]))
