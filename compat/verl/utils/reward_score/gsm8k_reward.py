"""`import verl.utils.reward_score.gsm8k_reward` gives the function, as `from verl.utils.reward_score import` does."""

import sys
from typing import Any, cast

from posttrain.utils.reward_score import gsm8k_reward

# A module of this name would take the function's place in its package.
sys.modules[__name__] = cast(Any, gsm8k_reward)
