"""Prepares GSM8K: writes train.parquet (7,473 rows) and test.parquet (1,319 rows) to $HOME/data/gsm8k.

    python examples/data_preprocess/gsm8k.py                          from the hub (openai/gsm8k); needs a network
    python examples/data_preprocess/gsm8k.py --from FOLDER            from a copy: train and test as .jsonl, .json or
                                                                      .parquet with the columns question and answer
    python examples/data_preprocess/gsm8k.py --out data/gsm8k         into another folder

Takes a second or two besides the download (4 MB), and prints the two paths. It is `posttrain data gsm8k`.

SMOKE=1 prepares a few rows that are written for it, into a new folder, without a network.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed serves too

from examples.smoke.raw_rows import smoke
from posttrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "gsm8k", *smoke("gsm8k"), *sys.argv[1:]]))
