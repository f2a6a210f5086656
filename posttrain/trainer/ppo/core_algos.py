"""The algorithms of the PPO family under their customary address; the work is done in `posttrain.algorithms`."""

from posttrain.algorithms import *  # noqa: F403
