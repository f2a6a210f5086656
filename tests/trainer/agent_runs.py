"""What runs with agents share: small settings, a script of the model, and a file of agents."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from posttrain.models.embedded import byte_tokenizer

R = "actor_rollout_ref__rollout__"
AGENT = {
    f"{R}name": "scripted",
    f"{R}agent": "guess",
    f"{R}agent__processes": 2,  # for 12 conversations; forking 12 processes took longer than their runs
    "data__max_prompt_length": 64,
    "data__max_response_length": 120,
    "trainer__total_training_steps": 1,
}
FILE = """
import asyncio

async def lead(chat, row):
    await chat.say()
    return 1.0

def plain(chat, row):
    return 1.0

async def one(chat):
    return 1.0

class Played:
    def __init__(self, bonus: float = 0.5):
        self.bonus = bonus

    async def run(self, chat, row):
        await chat.say()
        return self.bonus

class NoRun:
    pass
"""


def tries(read: str, seed: int) -> str:
    """A first guess by the seed, then what it was told to guess."""
    return read.rpartition("say ")[2].partition("!")[0] if "say " in read else str(seed % 3)


def samples(result, step: int = 1) -> list[dict]:
    return pq.read_table(Path(result.path) / "samples" / f"step_{step}.parquet").to_pylist()


def split(row: dict) -> tuple[str, str]:
    """(what the model wrote, what it was told)."""
    tokenizer, pairs = byte_tokenizer(), list(zip(row["response_ids"], row["response_mask"], strict=True))
    return tuple(tokenizer.decode([one for one, own in pairs if own == mark]) for mark in (1, 0))  # pyright: ignore
