"""Programs of tests, and the conversations that they lead with a scripted engine."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import torch

from posttrain.commands.generation.loop import Requests
from posttrain.config.root import PPOConfig
from posttrain.conversations.opening import open_conversations
from posttrain.rollout.base import Sampling
from tests.serving.scripted_server import END, ScriptedEngine
from tests.tools.call_templates import tokenizer_of

HEADER = """
import json, os, sys, time, urllib.request
task = json.loads(os.environ["POSTTRAIN_TASK"])

def post(path, body, base=os.environ["OPENAI_BASE_URL"], **headers):
    headers["Authorization"] = "Bearer " + os.environ["OPENAI_API_KEY"]
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return json.load(urllib.request.urlopen(urllib.request.Request(base + path, data, headers)))

def ask(messages, **more):
    body = {"model": "gpt-9", "messages": messages, **more}
    return post("/chat/completions", body)["choices"][0]["message"]

def give(reward):
    open(os.environ["POSTTRAIN_REWARD_FILE"], "w").write(json.dumps(reward))
"""
TWO_TURNS = """
messages = task["messages"]
messages += [ask(messages), {"role": "user", "content": "again"}]
messages += [ask(messages)]
give(float(messages[-1]["content"] == "2"))
"""


def script(text: str, seed: int) -> str:
    return f"{text.count('<|im_start|>assistant')}{END}"


@contextmanager
def conversations(
    folder,
    code: str,
    count: int = 1,
    header: str = HEADER,
    device="cpu",
    kind=ScriptedEngine,
    says=script,
    template="",
    turns=None,
    **settings,
):
    """The whole conversations of a program: (responses, records, engine, what the user was told)."""
    file, said = folder / "agent.py", []
    file.write_text(header + code)
    config, tokenizer = PPOConfig(), tokenizer_of("Qwen2.5")
    tokenizer.chat_template = template or tokenizer.chat_template
    config.actor_rollout_ref.rollout.multi_turn = turns or {}
    settings = {"program": f"{sys.executable} {file}", "timeout_s": 30.0, **settings}
    config.actor_rollout_ref.rollout.agent = settings
    config.data.max_prompt_length, config.data.max_response_length = 200, 300
    engine = kind(tokenizer, says)
    sampling = Sampling(max_tokens=300, stop_token_ids=(tokenizer.convert_tokens_to_ids(END),))
    with open_conversations(config, tokenizer, torch.device(device), said.append) as loop:
        assert loop is not None
        requests = Requests(engine, sampling, loop)
        prompt = [{"role": "user", "content": "hello"}]
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        for number in range(count):
            row = {"raw_prompt": prompt, "data_source": "d", "ground_truth": "2", "extra_info": {}, "index": number}
            requests.submit((number, 0), list(ids), number, row)
        whole = []
        while requests.has_work():
            whole += requests.advance()
        yield sorted(whole, key=lambda one: one.id), [loop.records[n, 0] for n in range(count)], engine, said
