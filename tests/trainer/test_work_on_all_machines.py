"""Rewards, tools and agents of a run on all machines of its Ray: which of them, and a Ray of two nodes."""

from __future__ import annotations

import os
from contextlib import ExitStack, nullcontext
from unittest.mock import Mock

import pytest

pytest.importorskip("ray")
import torch

from posttrain.config import load_config
from posttrain.conversations.opening import open_conversations
from posttrain.conversations.tools.base import ToolCall
from posttrain.machines.cluster import Places
from posttrain.models.embedded import byte_tokenizer
from posttrain.rewards.loading import resolve_reward
from posttrain.rewards.pool import RewardPool
from posttrain.rewards.types import RewardItem
from posttrain.trainer.ppo import runner as module
from posttrain.trainer.ppo.runner import spread_work

REWARDS_HERE, OTHERS_HERE = "reward.on_all_machines=False", "actor_rollout_ref.rollout.agent.on_all_machines=False"


@pytest.mark.parametrize(
    ("given", "in_ray", "spread"),
    [
        ([], True, "rewards conversations"),
        ([], False, ""),
        ([REWARDS_HERE], True, "conversations"),
        ([OTHERS_HERE], True, "rewards"),
        ([REWARDS_HERE, OTHERS_HERE], True, ""),
    ],
)
def test_other_machines_work_only_in_a_ray_and_where_the_settings_say_so(tmp_path, monkeypatch, given, in_ray, spread):
    entered, done, logged = list[int](), list[str](), list[object]()
    monkeypatch.setattr(module, "has_workers", lambda _: True)
    monkeypatch.setattr(module, "keep_machine_logs", lambda machines, logs: logged.append((machines, logs)))
    monkeypatch.setattr(module, "spread_conversations", lambda *_: done.append("conversations"))
    config, pool, turns = load_config(["preset=embedded", *given]).config, Mock(), Mock()
    pool.spread = lambda *_: done.append("rewards")
    for others in ([], ["a machine"]):
        monkeypatch.setattr(module, "other_machines", lambda _, o=others: nullcontext(entered.append(1) or o))
        with ExitStack() as stack:
            spread_work(stack, config, pool, turns, Mock(in_ray=in_ray), tmp_path, print)
            assert " ".join(done) == (spread if others else "") and not turns.close.called
    assert len(entered) == (2 if spread else 0)
    assert logged == ([(["a machine"], tmp_path)] if spread else [])
    assert turns.close.called == ("conversations" in spread), "tools end before their machines are given up"


WORK = """
import os


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    os.write(2, b"past all streams\\n")
    return {"score": 1.0, "node": os.environ.get("NODE", "")}


def place() -> str:
    '''Says where it runs.'''
    import time
    time.sleep(0.5)
    return os.environ.get("NODE", "") + " " + os.environ.get("KEY_OF_THE_DRIVER", "")


async def lead(chat, row):
    return {"score": 1.0, "node": os.environ.get("NODE", "")}
"""


@pytest.mark.slow
def test_a_second_node_of_a_ray_computes_rewards_and_runs_tools_and_agents(tmp_path, monkeypatch):
    import ray
    from ray.cluster_utils import Cluster

    (tmp_path / "work.py").write_text(WORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEY_OF_THE_DRIVER", "sesame")
    config = load_config(
        [
            "preset=embedded",
            "actor_rollout_ref.rollout.multi_turn.enable=True",
            "actor_rollout_ref.rollout.multi_turn.format=hermes",
            "actor_rollout_ref.rollout.tools=[work.py:place]",
            "actor_rollout_ref.rollout.agent=work.py:lead",
            "custom_reward_function.path=work.py",
        ]
    ).config
    monkeypatch.setattr("posttrain.cores.usable", lambda: 2)
    with ExitStack() as opened:
        said = list[str]()
        device = torch.device("cpu")
        loop = opened.enter_context(open_conversations(config, byte_tokenizer(), device, said.append))
        pool = opened.enter_context(RewardPool(resolve_reward(config.custom_reward_function), num_workers=1))
        small = {"object_store_memory": 80_000_000}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **small})
        opened.callback(cluster.shutdown)
        ray.init(cluster.address, log_to_driver=False, configure_logging=False)
        opened.callback(ray.shutdown)
        assert loop is not None

        with ExitStack() as stack:
            spread_work(stack, config, pool, loop, Mock(in_ray=True), tmp_path, said.append)
            assert not [line for line in said if "machine" in line], "there is no other"

        cluster.add_node(num_cpus=1, env_vars={"NODE": "second"}, **small)
        cluster.wait_for_nodes()
        stack = opened.enter_context(ExitStack())
        spread_work(stack, config, pool, loop, Mock(in_ray=True), tmp_path, said.append)
        found = [line for line in said if "machines." in line]
        expected = ["Reward workers: 2 on 2 machines.", "Tools run on 2 machines.", "Agents run on 2 machines."]
        assert found == expected, said

        answers = loop.runner.tools.answer("c", [ToolCall("place", {})] * 4).result(120)
        assert sorted(answer.text for answer in answers) == [" sesame", " sesame", "second sesame", "second sesame"]

        for number in range(4):
            row = {"raw_prompt": [{"role": "user", "content": "?"}]}
            loop.begin((str(number), 0), [1, 2, 3], number, {}, row)
        while loop.waits():
            loop.next(wait=True)
        assert sorted(record.score["node"] for record in loop.records.values()) == ["", "", "second", "second"]

        nodes, first = set[str](), 0
        while nodes != {"", "second"} and first < 20_000:
            pool.submit_many([(first + number, RewardItem("x", "1", "1")) for number in range(200)])
            nodes |= {str(result.parts["node"]) for result in pool.wait_all().values()}
            first += 200
        assert nodes == {"", "second"}
        assert os.environ.get("NODE") is None
        stack.close()
        heading, *lines = (tmp_path / "workers.log").read_text().splitlines()
        assert heading.startswith("--- Rewards, tools and agents on ") and "past all streams" in lines


def test_a_machine_gets_workers_by_its_share_and_no_more_than_allowed_while_another_has_fewer():
    large = Mock(lost=False)
    large.start.side_effect = lambda kind: Mock(machine=large)
    places = Places(lambda: Mock(machine=None), 1, "agents", [(large, 30)], most=3)
    running: list[Mock] = []
    for _ in range(6):
        running.append(places.start(running))
    assert [one.machine is large for one in running].count(True) == 3  # by its share alone it would have more
    unlimited = Places(lambda: Mock(machine=None), 1, "agents", [(large, 30)])
    for _ in range(6):
        running.append(unlimited.start(running))
    assert [one.machine is large for one in running].count(True) == 9
