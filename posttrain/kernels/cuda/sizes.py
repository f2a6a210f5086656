"""Sizes of captured decoding that engines and memory plans count with too; nothing here imports Triton."""

from __future__ import annotations

MOST_STEPS = 256  # of one round: some seconds with a large model, in which nobody hears of progress
MOST_TOKENS = MOST_STEPS + 1  # that a row can have made in it: its first one may be there when it joins
STEPS_UNSEEN = 16  # of a round in which rows may end: one that does stands still until it is over
FINE = 64  # logits of a chunk; those of the one that a row's token comes from are computed again
