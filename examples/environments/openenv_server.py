"""An OpenEnv server with the game of number_board.py.

uvicorn --app-dir examples/environments openenv_server:app --port 8000
python examples/environments/openenv_server.py PORT             the same, until the process that started it ends
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time

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


def stop_with_parent() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


if __name__ == "__main__":
    import uvicorn

    threading.Thread(target=stop_with_parent, daemon=True).start()
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
