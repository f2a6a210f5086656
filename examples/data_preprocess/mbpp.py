"""Prepares sanitized MBPP: writes train (120 rows), validation (43), test (257) and prompt (7) as parquet; into
$HOME/data/mbpp.

    python examples/data_preprocess/mbpp.py                   from the hub; needs a network
    python examples/data_preprocess/mbpp.py --from FOLDER     from a copy
    python examples/data_preprocess/mbpp.py --out FOLDER      into another folder

A copy is a folder with sanitized-mbpp.json, which is divided by task number. Takes seconds besides the download, and
prints the paths. It is `posttrain data mbpp`.

SMOKE=1 prepares a few rows that are written for it, into a new folder, without a network.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed serves too

from examples.smoke.raw_rows import smoke
from posttrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "mbpp", *smoke("mbpp"), *sys.argv[1:]]))
