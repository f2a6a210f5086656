"""An environment in Gymnasium's form: the model guesses a number from 1 to 9 in two tries.

posttrain train actor_rollout_ref.rollout.environment=examples/environments/number_board.py:NumberBoard ...
"""

from __future__ import annotations

import random


class NumberBoard:
    def __init__(self, top: int = 9, tries: int = 2):
        self.top, self.tries = top, tries

    def reset(self, *, seed=None, options=None):
        """`options` is the row of the data."""
        self.secret, self.left = random.Random(seed).randint(1, self.top), self.tries
        return f"guess 1 to {self.top}", {"secret": self.secret}

    def step(self, action):
        """(observation, reward, terminated, truncated, info); the nearer the last guess, the larger the reward."""
        guess, self.left = action.strip(), self.left - 1
        off = abs(int(guess) - self.secret) if guess.isdecimal() else self.top
        over = off == 0 or self.left == 0 or not guess.isdecimal()
        told = "" if over else "higher" if int(guess) < self.secret else "lower"
        return told, max(0.0, 1 - off / self.top) if over else 0.0, over, False, {"right": off == 0}
