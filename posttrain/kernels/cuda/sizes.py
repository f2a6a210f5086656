"""Sizes of captured decoding that engines and memory plans count with too; nothing here imports Triton."""

from __future__ import annotations

MOST_STEPS = 256  # of one round: some seconds with a large model, in which nobody hears of progress
MOST_TOKENS = MOST_STEPS + 1  # that a row can have made in it: its first one may be there when it joins
STEPS_UNSEEN = 16  # of a round in which rows may end: one that does stands still until it is over
FINE = 64  # logits of a chunk; those of the one that a row's token comes from are computed again
DEPTH = 64  # columns that a product with its sums inside multiplies at once
LEAST_ROWS = 128  # of a step whose head writes sums of chunks and no logits: below it torch's product is as fast
