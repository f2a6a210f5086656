"""The game that the programs here play, and how they get its numbers.

`agent.program="python guess_openai.py"` starts a program for every game, whose number is in POSTTRAIN_TASK. With
`agent.program_per=run` it is started once, and asks the run for one game after another: a start costs a second.
"""

import json
import os
import sys
import threading
import time
from urllib.request import Request, urlopen

LAST = 9


def hint(said, secret):
    """What the model reads after a guess; None where the game is over: the number is right, or is none."""
    if not said.isdecimal() or int(said) == secret:
        return None
    return "higher" if int(said) < secret else "lower"


def score(said, secret):
    """The nearer the last guess, the larger the reward."""
    return 1 - min(abs(int(said) - secret), LAST) / LAST if said.isdecimal() else 0.0


def main(play, make_client, *, version="/v1"):
    """Plays with `play(client, messages, secret)`. `version` is what the client wants at the end of its address."""
    if "POSTTRAIN_RUN_URL" in os.environ:
        games = [threading.Thread(target=play_on, args=(play, make_client, version)) for _ in range(32)]
        for game in games:
            game.start()
        for game in games:
            game.join()
    task = json.loads(os.environ["POSTTRAIN_TASK"])
    reward = play(make_client(), task["messages"], int(task["ground_truth"]))
    with open(os.environ["POSTTRAIN_REWARD_FILE"], "w") as file:
        json.dump(reward, file)


def play_on(play, make_client, version):
    """Game after game of a run."""
    run, client = os.environ["POSTTRAIN_RUN_URL"], make_client()
    while True:
        try:
            found = post(f"{run}/s/next", {})
        except OSError:  # the run has not started, or is over
            time.sleep(1.0)
            continue
        if found["id"] is None:
            time.sleep(0.05)
            continue
        # A copy with another address: a client of its own for every game would open its connections anew.
        own = client.with_options(base_url=found["base_url"].removesuffix("/v1") + version)
        try:
            reward = play(own, found["task"]["messages"], int(found["task"]["ground_truth"]))
            post(f"{run}/s/{found['id']}/reward", {"reward": reward})
        except Exception as error:  # the run was killed during a game; a resumed one gives out its games again
            print(f"{type(error).__name__}: {error}", file=sys.stderr)


def post(url, body):
    headers = {"Authorization": f"Bearer {os.environ['POSTTRAIN_API_KEY']}"}
    return json.load(urlopen(Request(url, json.dumps(body).encode(), headers)))
