"""`python3 -m verl.trainer.fsdp_sft_trainer key=value ...`: posttrain's supervised fine-tuning with verl's keys."""

import sys

from posttrain.interrupts import one_interrupt
from posttrain.trainer.fsdp_sft_trainer import main, run_sft

__all__ = ["main", "run_sft"]

if __name__ == "__main__":
    with one_interrupt():
        sys.exit(main())
