"""The entry of supervised fine-tuning: `python -m posttrain.trainer.fsdp_sft_trainer key=value ...`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.config.trees import SFT
from posttrain.data.supervised import check_row
from posttrain.doctor import dry_run
from posttrain.interrupts import one_interrupt
from posttrain.tracking.progress import waiting
from posttrain.trainer.run.entry import run_cli, settings_of

USAGE = """usage: posttrain sft key=value ... [--config-path DIR --config-name NAME] [--cfg job] [--quiet | --json]

Fine-tunes a causal language model on prompts with responses, or on conversations. The settings, each followed by where
its value comes from:
"""


def run_sft(config: Sequence[str] | Mapping[str, Any] | Any, *, data: Any = None, val_data: Any = None) -> Any:
    """One training from arguments, a mapping of settings or a resolved configuration; rows may be given in Python."""
    resolved = settings_of(config, SFT, check_row, data=data, val_data=val_data)
    with waiting():
        from posttrain.trainer.supervised.loop import run_supervised
        from posttrain.trainer.supervised.tasks import SFTTask

    return run_supervised(resolved, SFTTask, data=data, val_data=val_data)


def main(argv: Sequence[str] | None = None) -> int:
    return run_cli(sys.argv[1:] if argv is None else argv, SFT, USAGE, run_sft, dry_run)


if __name__ == "__main__":
    with one_interrupt():
        sys.exit(main())
