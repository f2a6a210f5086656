"""`python3 -m verl.trainer.main_generation key=value ...`: responses of a model to a file of prompts."""

import sys

from posttrain.trainer.main_generation import cli, main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(cli(main))
