"""Prepares Banking77: writes train.parquet (10,003 rows) and test.parquet (3,080 rows); into $HOME/data/banking77.

    python examples/data_preprocess/banking77.py                   from the hub; needs a network
    python examples/data_preprocess/banking77.py --from FOLDER     from a copy
    python examples/data_preprocess/banking77.py --out FOLDER      into another folder

A copy is a folder with train.csv and test.csv. Takes seconds besides the download, and prints the paths. It is
`posttrain data banking77`.

SMOKE=1 prepares a few rows that are written for it, into a new folder, without a network.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed serves too

from examples.smoke.raw_rows import smoke
from posttrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "banking77", *smoke("banking77"), *sys.argv[1:]]))
