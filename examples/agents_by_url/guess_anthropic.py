"""A program of the `anthropic` client that guesses a number: `agent.program="python guess_anthropic.py"`."""

import json
import os

from anthropic import Anthropic
from guess_openai import LAST

task = json.loads(os.environ["POSTTRAIN_TASK"])
secret, client = int(task["ground_truth"]), Anthropic()
messages = [{"role": one["role"], "content": one["content"]} for one in task["messages"]]
for _ in range(2):
    answer = client.messages.create(model="any", max_tokens=8, messages=messages)
    said = "".join(block.text for block in answer.content if block.type == "text").strip()
    if not said.isdecimal() or int(said) == secret:
        break
    messages.append({"role": "assistant", "content": answer.content})
    messages.append({"role": "user", "content": "higher" if int(said) < secret else "lower"})
reward = 1 - min(abs(int(said) - secret), LAST) / LAST if said.isdecimal() else 0.0
with open(os.environ["POSTTRAIN_REWARD_FILE"], "w") as file:
    json.dump(reward, file)
