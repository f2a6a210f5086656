"""Prepares HotpotQA with its passages in the prompt: writes validation.parquet and, where there is one,
train.parquet; into $HOME/data/hotpotqa.

    python examples/data_preprocess/hotpotqa.py                   from the hub; needs a network
    python examples/data_preprocess/hotpotqa.py --from FOLDER     from a copy
    python examples/data_preprocess/hotpotqa.py --out FOLDER      into another folder

A copy is a folder with hotpot_dev_distractor_v1.json and (if wanted) hotpot_train_v1.1.json. Takes seconds besides
the download, and prints the paths. It is `posttrain data hotpotqa`.

SMOKE=1 prepares a few rows that are written for it, into a new folder, without a network.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed serves too

from examples.smoke.raw_rows import smoke
from posttrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "hotpotqa", *smoke("hotpotqa"), *sys.argv[1:]]))
