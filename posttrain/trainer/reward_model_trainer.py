"""The entry of reward-model training: `python -m posttrain.trainer.reward_model_trainer key=value ...`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.config.trees import REWARD_MODEL
from posttrain.data.supervised import check_pair
from posttrain.doctor import dry_run
from posttrain.interrupts import one_interrupt
from posttrain.tracking.progress import waiting
from posttrain.trainer.run.entry import run_cli, settings_of

USAGE = """usage: posttrain reward-model key=value ... [--config-path DIR --config-name NAME] [--cfg job]
                                            [--quiet | --json]

Trains a reward model (a sequence classifier with one label) on pairs of a better and a worse answer. The settings, each
followed by where its value comes from:
"""


def run_reward_model(config: Sequence[str] | Mapping[str, Any] | Any, *, data: Any = None, val_data: Any = None) -> Any:
    """One training from arguments, a mapping of settings or a resolved configuration; rows may be given in Python."""
    resolved = settings_of(config, REWARD_MODEL, check_pair, data=data, val_data=val_data)
    with waiting():
        from posttrain.trainer.supervised.loop import run_supervised
        from posttrain.trainer.supervised.tasks import PairTask

    return run_supervised(resolved, PairTask, data=data, val_data=val_data)


def main(argv: Sequence[str] | None = None) -> int:
    return run_cli(sys.argv[1:] if argv is None else argv, REWARD_MODEL, USAGE, run_reward_model, dry_run)


if __name__ == "__main__":
    with one_interrupt():
        sys.exit(main())
