"""A program of `openai-agents` that guesses a number: `agent.program="python guess_openai_agents.py"`."""

import json
import os

from agents import Agent, Runner
from guess_openai import LAST

task = json.loads(os.environ["POSTTRAIN_TASK"])
secret, agent = int(task["ground_truth"]), Agent(name="guesser", model="any")
turns = [{"role": one["role"], "content": one["content"]} for one in task["messages"]]
for _ in range(2):
    result = Runner.run_sync(agent, turns)
    said = str(result.final_output).strip()
    if not said.isdecimal() or int(said) == secret:
        break
    hint = "higher" if int(said) < secret else "lower"
    turns = [*result.to_input_list(), {"role": "user", "content": hint}]
reward = 1 - min(abs(int(said) - secret), LAST) / LAST if said.isdecimal() else 0.0
with open(os.environ["POSTTRAIN_REWARD_FILE"], "w") as file:
    json.dump(reward, file)
