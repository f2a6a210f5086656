"""An OpenEnv server with the same game: uvicorn examples.environments.openenv_server:app --port 8000"""

from __future__ import annotations

import random

from openenv.core import Action, Environment, Observation, create_app  # pip install "posttrain[openenv]"
from openenv.core.env_server import State


class Guess(Action):
    number: int


class Told(Observation):
    text: str


class NumberGame(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.secret, self.left = 5, 2

    def reset(self, seed=None, episode_id=None, **more):
        self.secret, self.left = random.Random(seed).randint(1, 9), 2
        return Told(text="guess 1 to 9", done=False, reward=None)

    def step(self, action, timeout_s=None, **more):
        self.left -= 1
        off = abs(action.number - self.secret)
        over = off == 0 or self.left == 0
        told = "" if over else "higher" if action.number < self.secret else "lower"
        return Told(text=told, done=over, reward=max(0.0, 1 - off / 9) if over else 0.0)

    @property
    def state(self):
        return State()


app = create_app(NumberGame, Guess, Told, env_name="number", max_concurrent_envs=1024)
