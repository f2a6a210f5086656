"""Prepares MATH: writes train.parquet (7,500 rows) and test.parquet (5,000 rows); into $HOME/data/math.

    python examples/data_preprocess/math_dataset.py                   from the hub; needs a network
    python examples/data_preprocess/math_dataset.py --from FOLDER     from a copy
    python examples/data_preprocess/math_dataset.py --out FOLDER      into another folder

A copy is a folder with train and test with the columns problem and solution. Takes seconds besides the download, and
prints the paths. It is `posttrain data math`.

SMOKE=1 prepares a few rows that are written for it, into a new folder, without a network.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed serves too

from examples.smoke.raw_rows import smoke
from posttrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "math", *smoke("math"), *sys.argv[1:]]))
