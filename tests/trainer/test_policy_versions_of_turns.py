"""Policy versions of conversations count what the policy wrote: observation tokens are sampled by no policy."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import scripted
from runs import metrics_of, run

from posttrain.conversations.agents import AGENTS, register_agent
from posttrain.conversations.tools.registry import TOOLS as KNOWN
from posttrain.conversations.tools.registry import register_tool
from posttrain.trainer.ppo import runner as rl
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer

R = "actor_rollout_ref__rollout__"
COMMON = {f"{R}name": "scripted", "data__max_prompt_length": 240, "data__max_response_length": 200}
AGENT = {f"{R}agent__processes": 2}
TOLD = [65, 66, 67]


class InTurn(RayPPOTrainer):
    """One step off in one process: the next step's responses are generated, then this step trains."""

    def __init__(self, config, **parts) -> None:
        config.trainer.max_staleness = 1
        super().__init__(config, **parts)

    def _start_next_rollout(self) -> None:
        super()._start_next_rollout()
        self.pending.finish()


@pytest.fixture(autouse=True)
def registered():
    """`told` tells the model something before its first turn and after it; `echo` is a tool; `silent` fails on one
    response of every prompt before the model says anything; `composed` puts its row together itself."""

    @register_agent("told")
    async def told(chat, row):
        chat.tell_ids(TOLD)
        await chat.say(max_tokens=3)
        chat.tell("go on")
        await chat.say(max_tokens=3)
        return float(row["sample"])

    @register_agent("silent")
    async def silent(chat, row):
        if row["sample"] == 1:
            raise ConnectionError("no environment")
        await chat.say(max_tokens=3)
        return float(row["sample"])

    @register_agent("composed")
    async def composed(chat, row):
        first = (await chat.sample([*chat.prompt_ids, *TOLD], max_tokens=3)).token_ids
        ids = [*TOLD, *first]
        marks = [0, 0, 0, 1, 0, *[1] * (len(first) - 2)]
        chat.compose(chat.prompt_ids, ids, marks)
        return float(row["sample"])

    @register_tool("echo")
    def echo(text: str) -> str:
        """The text."""
        return text

    yield
    AGENTS.clear()
    KNOWN.pop("echo", None)


def script(read: str, seed: int) -> str:
    asks = json.dumps({"name": "echo", "arguments": {"text": "ho"}})
    return (
        f"ha{seed % 3}"
        if '"name": "echo"' not in read or "<tool_response>" in read
        else f"<tool_call>{asks}</tool_call>"
    )


KINDS = {
    "told": {f"{R}agent": "told", **AGENT},
    "composed": {f"{R}agent": "composed", **AGENT},
    "tools": {f"{R}multi_turn": True, f"{R}tools": ["echo"]},
}


def samples(path: Path, step: int) -> list[dict]:
    return pq.read_table(Path(path) / "samples" / f"step_{step}.parquet").to_pylist()


def versions_are(version: int, rows: list[dict]) -> None:
    """Every row has observation tokens, and one span: of all that the model wrote, sampled by this version."""
    for row in rows:
        assert 0 < sum(row["response_mask"]) < len(row["response_ids"])
        assert json.loads(row["policy_versions"]) == [[version, sum(row["response_mask"])]]


@pytest.mark.parametrize("kind", KINDS)
def test_spans_of_policy_versions_are_of_the_tokens_that_the_model_wrote(tiny_model, sums, tmp_path, kind):
    scripted.use(script)
    result = run(tiny_model, sums, tmp_path, **COMMON | KINDS[kind], trainer__total_training_steps=3)
    for step in (1, 2, 3):
        versions_are(step - 1, samples(result.path, step))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_step_off_the_age_of_a_batch_is_that_of_what_was_sampled(tiny_model, sums, tmp_path, monkeypatch, kind):
    scripted.use(script)
    monkeypatch.setattr(rl, "RayPPOTrainer", InTurn)
    correction = {"algorithm__rollout_correction__rollout_is": "token"}
    result = run(tiny_model, sums, tmp_path, **COMMON | KINDS[kind] | correction, trainer__total_training_steps=4)
    assert [line["rollout/age"] for line in metrics_of(result.path)] == [0.0, 1.0, 1.0, 1.0]
    for step in (1, 2, 3, 4):
        versions_are(max(0, step - 2), samples(result.path, step))


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["told", "silent"])
def test_a_resumed_run_checks_its_first_batch_whole_groups_and_all(tiny_model, sums, tmp_path, capsys, agent):
    scripted.use(script)
    for total in (1, 2):
        capsys.readouterr()
        counts = {"trainer__total_training_steps": total, "trainer__save_freq": 1}
        result = run(tiny_model, sums, tmp_path, **COMMON | {f"{R}agent": agent, **AGENT} | counts)
        assert f"Step {total - 1}: rollout and trainer log-probs differ by" in capsys.readouterr().out
    nothing = [row["policy_versions"] for row in samples(result.path, 2) if not sum(row["response_mask"])]
    assert nothing == ["[]"] * (4 if agent == "silent" else 0)


def test_rows_of_the_present_weights_take_the_trainers_own_old_log_probs(tiny_model, sums, tmp_path, monkeypatch):
    """Two updates in a step, and a rollout that is not exact: the trainer computes the old log-probs of fresh rows."""
    monkeypatch.setattr("posttrain.trainer.ppo.first_batch.ROLLOUT_IS_EXACT", -1.0)
    seen = []
    plain = RayPPOTrainer._old_log_probs

    def watched(self, batch):
        batch.batch["rollout_log_probs"] -= 1e-3  # which would be seen in what is taken from there
        found = plain(self, batch)
        seen.append((found.batch["old_log_probs"] - batch.batch["rollout_log_probs"])[batch.batch["response_mask"] > 0])
        return found

    monkeypatch.setattr(RayPPOTrainer, "_old_log_probs", watched)
    scripted.use(script)
    more = {"actor_rollout_ref__actor__ppo_mini_batch_size": 2, f"{R}agent": "told", **AGENT}
    run(tiny_model, sums, tmp_path, **COMMON | more, trainer__total_training_steps=2)
    assert len(seen) == 2 and all(float(gap.min()) > 5e-4 for gap in seen)
