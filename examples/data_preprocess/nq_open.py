"""Prepares NQ-Open: writes validation.parquet (3,608 rows) and, where there is one, train.parquet; into
$HOME/data/nq_open.

    python examples/data_preprocess/nq_open.py                   from the hub; needs a network
    python examples/data_preprocess/nq_open.py --from FOLDER     from a copy
    python examples/data_preprocess/nq_open.py --out FOLDER      into another folder

A copy is a folder with NQ-open.dev.jsonl and (if wanted) NQ-open.train.jsonl. Takes seconds besides the download, and
prints the paths. It is `posttrain data nq_open`.

SMOKE=1 prepares a few rows that are written for it, into a new folder, without a network.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed serves too

from examples.smoke.raw_rows import smoke
from posttrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "nq_open", *smoke("nq_open"), *sys.argv[1:]]))
