"""Stand-ins for the packages reasoning-gym and openenv, which tests put on PYTHONPATH in their place."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler

_FACTORY = """
class Config:
    def __init__(self, size=500, seed=None, top=3): ...


class Sums:
    def __init__(self, size=500, seed=None, top=3):
        self.size, self.seed, self.top = size, seed, top

    def __getitem__(self, number):
        a = (self.seed + number) % self.top
        return {"question": f"{a} + 1 = ?", "answer": str(a + 1)}

    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["answer"] else 0.1 if answer else 0.0


DATASETS = {"sums": (Sums, Config)}


class Curriculum:
    attributes = {"top": None}
    top = 3

    def increment_attr_level(self, name):
        self.top += 10

    def generate_configuration(self):
        made = Config()
        made.size, made.seed, made.top = 500, None, self.top
        return made


def create_curriculum(name):
    return Curriculum()
"""

GYM = {
    "reasoning_gym/factory.py": _FACTORY,
    "reasoning_gym/utils.py": "import re\n\n\ndef extract_answer(text):\n"
    "    found = re.findall('<answer>(.*?)</answer>', text)\n    return found[-1] if found else None\n",
    "reasoning_gym/__init__.py": "from reasoning_gym.factory import DATASETS\n\n\n"
    "def create_dataset(name, **given):\n    return DATASETS[name][0](**given)\n",
}

_CORE = """
class Result:
    def __init__(self, observation, reward, done):
        self.observation, self.reward, self.done = observation, reward, done


class GenericEnvClient:
    def __init__(self, base_url, connect_timeout_s, message_timeout_s):
        self.base_url = base_url
        assert min(connect_timeout_s, message_timeout_s) > 3600, "agent.timeout_s is the only limit"

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.base_url = "closed"

    async def reset(self, seed):
        if seed == 13:
            raise RuntimeError("Server error: 8 of 8 sessions active (code: CAPACITY_REACHED)")
        self.seed = seed
        return Result({"text": f"seed {seed}", "metadata": {}}, None, False)

    async def step(self, action):
        if action["n"] == 99:
            raise RuntimeError("Server error: 'board' (code: EXECUTION_ERROR)")
        if action["n"] < 0:
            raise RuntimeError("Invalid message (code: VALIDATION_ERROR)")
        return Result({"text": "more"}, 0.5, action["n"] == self.seed)
"""
OPENENV = {"openenv/core.py": _CORE}


class Schema(BaseHTTPRequestHandler):
    answer, asked = b"", 0

    def do_GET(self):
        type(self).asked += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_):
        pass


SCHEMA = {
    "action": {"properties": {"n": {"type": "integer"}, "metadata": {}}},
    "observation": {"properties": {"text": {"type": "string"}}},
}
