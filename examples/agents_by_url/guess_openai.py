"""A program of the `openai` client that guesses a number; nothing in it knows of training but the reward at its end.

As `agent.program="python guess_openai.py"` it plays the one game of POSTTRAIN_TASK. Started on its own with the address
of a run (`agent.program=outside`) it plays one game after another: `python guess_openai.py http://127.0.0.1:8100`.
"""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen

from openai import OpenAI, OpenAIError

LAST = 9


def play(client, messages, secret):
    """The nearer the last of two guesses, the larger the reward."""
    messages = list(messages)
    for number in range(2):
        answer = client.chat.completions.create(model="any", messages=messages).choices[0].message
        said = (answer.content or "").strip()
        if not said.isdecimal() or int(said) == secret or number:
            break
        messages += [answer.model_dump(), {"role": "user", "content": "higher" if int(said) < secret else "lower"}]
    return 1 - min(abs(int(said) - secret), LAST) / LAST if said.isdecimal() else 0.0


def post(url, body):
    headers = {"Authorization": f"Bearer {os.environ['POSTTRAIN_API_KEY']}"}
    return json.load(urlopen(Request(url, json.dumps(body).encode(), headers)))


def play_on(run):
    """Game after game of a run."""
    client = OpenAI(base_url=run, api_key=os.environ["POSTTRAIN_API_KEY"])
    while True:
        try:
            if not play_next(client, run):
                time.sleep(0.02)
        except (OSError, OpenAIError):
            # The run has not started, is over, or was killed during a game. A resumed run gives out its games again.
            time.sleep(1.0)


def play_next(client, run):
    """Plays a game that waits for a program; False if none does."""
    found = post(f"{run}/s/next", {})
    if found["id"] is None:
        return False
    # A copy with another address: a client of its own for every game would open its connections anew.
    own = client.with_options(base_url=found["base_url"])
    reward = play(own, found["task"]["messages"], int(found["task"]["ground_truth"]))
    post(f"{run}/s/{found['id']}/reward", {"reward": reward})
    return True


if __name__ == "__main__":
    if len(sys.argv) > 1:
        with ThreadPoolExecutor(32) as pool:
            list(pool.map(play_on, [sys.argv[1]] * 32))
    task = json.loads(os.environ["POSTTRAIN_TASK"])
    reward = play(OpenAI(), task["messages"], int(task["ground_truth"]))
    with open(os.environ["POSTTRAIN_REWARD_FILE"], "w") as file:
        json.dump(reward, file)
