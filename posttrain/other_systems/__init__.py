"""What the settings of verl, TRL, OpenRLHF and others mean here; plugs into `posttrain.config` by `dialect`.

`verl/` holds the answers to verl's keys, `names.py` what names of the other systems are called here, `verl_script/` is
`posttrain compat check`, which reads a run script of verl without running it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain.config.checked import Dialect


def dialect(program: str) -> Dialect:
    """What other systems call the settings of `ppo_trainer`, `sft_trainer` or `reward_model_trainer`."""
    from posttrain.config.checked import Dialect
    from posttrain.other_systems.names import counterpart
    from posttrain.other_systems.verl import renamed
    from posttrain.other_systems.verl.answers import apply_answers, find_rule, verl_keys
    from posttrain.other_systems.verl.renamed import as_ours

    rl = program == "ppo_trainer"
    return Dialect(
        moved=renamed.MOVED if rl else {},
        renamed=renamed.RENAMED if rl else renamed.SUPERVISED_RENAMED,
        answer=partial(find_rule, supervised=not rl),
        apply=apply_answers,
        keys=verl_keys,
        advice=partial(counterpart, supervised=not rl),
        main_file=as_ours,
    )
