"""Asynchronous training beyond one step, in one process: the bound, partial responses, replay and resume."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from light_rewards import rarely_right
from runs import metrics_of, run

from posttrain.config import load_config
from posttrain.config.root import PPOConfig
from posttrain.controller.pool import LocalWorkers
from posttrain.conversations.agents import AGENTS, register_agent
from posttrain.errors import UserError
from posttrain.protocol import DataProto
from posttrain.tracking.metrics import GENERATED_S
from posttrain.trainer.ppo import runner as rl
from posttrain.trainer.ppo.events import EngineClock, EventLog, Replay
from posttrain.trainer.ppo.pending import Batch, PendingBatches, staleness
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer

R = "actor_rollout_ref__rollout__"
LONG = {"data__max_response_length": 24, f"{R}max_num_seqs": 8, f"{R}n_workers": 1, "trainer__total_training_steps": 6}


class Beside(RayPPOTrainer):
    """A dice throw says how many steps the engine makes while an update is computed."""

    dice: ClassVar[random.Random] = random.Random(0)
    batches: ClassVar[list[Any]] = []

    def _update(self, batch, step):
        self.batches.append(batch)
        found = super()._update(batch, step)
        for _ in range(self.dice.randrange(4)):
            if len(self.experience._outputs) < len(self.experience._prompts):
                self.experience.poll()
        return found


@pytest.fixture
def beside(monkeypatch, tiny_model, sums, tmp_path):
    """`beside(name, seed, ...)`: a run with a worker of its own for rollout, in this process, whose engine makes other
    numbers of steps at other times for another seed."""
    workers = LocalWorkers()
    workers.own_size = lambda role: int(role == "rollout")  # pyright: ignore
    monkeypatch.setattr(rl, "open_workers", lambda *given: workers)
    monkeypatch.setattr(rl, "RayPPOTrainer", Beside)

    def steps(engine):
        left = iter(range(Beside.dice.randrange(1, 4)))
        return lambda: next(left, None) is None

    monkeypatch.setattr("posttrain.workers.rollout.admission_deadline", steps)

    def start(name: str, seed: int, *, bound: int = 2, **more: Any):
        Beside.dice, Beside.batches = random.Random(seed), []
        return run(
            tiny_model, sums, tmp_path / name, **LONG | ({"trainer__max_staleness": bound} if bound else {}) | more
        )

    return start


def events_of(result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(result.path) / "events.jsonl").read_text().splitlines()]


def same(one, other) -> bool:
    return metrics_of(one.path) == metrics_of(other.path)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_token_is_older_than_the_bound_and_the_bound_is_used(beside, bound):
    def ages(name: str, **more: Any) -> list[float]:
        lines = metrics_of(beside(name, 1, bound=bound, **more).path)
        return [line.get("rollout/age_max", 0.0) for line in lines]

    used = [float(min(step, bound)) for step in range(6)]
    assert ages("whole", **{"trainer__partial_rollout": False} if bound else {}) == used
    assert not bound or all(
        age <= most for age, most in zip(ages("partial", trainer__partial_rollout=True), used, strict=True)
    )


def test_what_dynamic_sampling_keeps_for_the_next_step_is_not_trained_past_the_bound(beside):
    given = {
        "algorithm__filter_groups__enable": True,
        "trainer__partial_rollout": False,
        f"{R}n": 2,
        "trainer__seed": 3,
    }
    given |= {"trainer__total_training_steps": 12}  # a group is too old about once in five steps
    result = beside("run", 2, bound=1, reward=rarely_right, **given)
    lines = metrics_of(result.path)
    assert max(line["rollout/age_max"] for line in lines) == 1
    asked = [uid for line in events_of(result) for uid in line.get("ask", [])]
    trained = [uid for line in events_of(result) for uid in line.get("take", [])]
    assert len(trained) == len(set(trained)) == 48 < len(asked) == len(set(asked))
    assert any(line["rollout/dropped_groups"] for line in lines)


def test_an_engine_that_cannot_load_weights_in_flight_waits_for_whole_responses_and_says_so(beside, capsys):
    more = {f"{R}name": "hf", "trainer__total_training_steps": 3}
    result = beside("run", 2, **more)
    assert "name=hf cannot load weights while it generates: every weight sync waits" in capsys.readouterr().out
    assert [line["rollout/age_max"] for line in metrics_of(result.path)] == [0, 1, 2]
    assert not any(line["rollout/partial"] for line in metrics_of(result.path))
    with pytest.raises(UserError, match=r"partial_rollout=True, but .*name=hf cannot load weights"):
        beside("again", 2, trainer__partial_rollout=True, **more)


def test_a_response_of_two_versions_is_weighted_token_by_token(beside):
    """Each token by the policy that begins to learn, over the weights that sampled it: further away in older spans."""
    given = {"actor_rollout_ref__actor__old_log_probs": "trainer", "algorithm__rollout_correction__rollout_is": "token"}
    lines = metrics_of(beside("run", 3, algorithm__rollout_correction__rollout_is_threshold=1e6, **given).path)
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for step, (batch, line) in enumerate(zip(Beside.batches, lines, strict=True)):
        gap = batch.batch["old_log_probs"] - batch.batch["rollout_log_probs"]
        written = batch.batch["response_mask"].bool()
        assert line["rollout_is/mean"] == pytest.approx(float(gap[written].exp().mean()), rel=1e-5)
        for row, spans in enumerate(batch.non_tensor_batch["policy_versions"]):
            assert sum(count for _, count in spans) == int(written[row].sum())
            assert [version for version, _ in spans] == sorted({version for version, _ in spans})
            if len(spans) == 2 and spans[1][0] == step:
                own, first = gap[row][written[row]].abs(), spans[0][1]
                gaps[True] += own[:first].tolist()
                gaps[False] += own[first:].tolist()
    assert np.mean(gaps[True]) > 1.2 * np.mean(gaps[False]) > 0


def test_a_replay_is_bitwise_what_another_timing_is_not(beside):
    first = beside("first", 5, trainer__test_freq=2, data__val_files="held_out")
    assert any(line.get("rollout/partial", 0) > 0 for line in metrics_of(first.path))
    more = {"trainer__test_freq": 2, "data__val_files": "held_out"}
    assert not same(first, beside("other", 6, **more))
    log = str(Path(first.path) / "events.jsonl")
    again = beside("again", 7, trainer__replay_events=log, **more)
    assert same(first, again) and events_of(first) == events_of(again)
    with pytest.raises(UserError, match=r"other settings: trainer.max_staleness=3 \(it had 2\)"):
        beside("differs", 7, bound=3, trainer__replay_events=log, **more)
    with pytest.raises(UserError, match="is no event log"):
        beside("none", 7, trainer__replay_events=str(first.path / "metrics.jsonl"), **more)


def copy_of(result, name: str, *, until: int) -> str:
    """The folder of a run, with checkpoints up to this step alone, under another name."""
    folder = Path(result.path).parents[1]
    copied = Path(shutil.copytree(folder, folder.parent / name)) / "test" / "run" / "checkpoints"
    for checkpoint in copied.glob("global_step_*"):
        if int(checkpoint.name.rpartition("_")[2]) > until:
            shutil.rmtree(checkpoint)
    return name


def test_a_killed_run_loses_no_prompt_and_trains_none_twice_and_its_replay_is_bitwise(beside):
    """It continues from a checkpoint of step 2, by the log bitwise as if it had never ended."""
    saves = {"trainer__save_freq": 2}
    whole = beside("whole", 8, **saves)
    log = str(Path(whole.path) / "events.jsonl")
    copies = {name: copy_of(whole, name, until=2) for name in ("free", "replayed")}
    resumed = {"free": beside(copies["free"], 9, **saves)}
    resumed["replayed"] = beside(copies["replayed"], 9, **saves, trainer__replay_events=log)
    assert same(whole, resumed["replayed"]) and not same(whole, resumed["free"])
    assert events_of(whole) == events_of(resumed["replayed"])
    for result in (whole, *resumed.values()):
        trained = [uid for line in events_of(result) for uid in line.get("take", [])]
        assert sorted(map(int, trained)) == list(range(24))


@pytest.mark.parametrize("corrected", [False, True])
def test_a_resume_changes_neither_the_old_policy_nor_the_weights_of_samples_that_wait(beside, corrected):
    """The first steps after it learn from samples of versions that no process has any more: clipped around these (one
    update a step), or with their importance weights."""
    more: dict[str, Any] = {"trainer__save_freq": 2, "actor_rollout_ref__actor__ppo_mini_batch_size": 4}
    more |= {"algorithm__rollout_correction__rollout_is": "token"} if corrected else {}
    whole = beside("whole", 8, **more)
    log = str(Path(whole.path) / "events.jsonl")
    assert same(whole, beside(copy_of(whole, "again", until=2), 9, **more, trainer__replay_events=log))
    waited = Beside.batches[0]  # that of step 3, by the policy of version 2
    assert all(span[0][0] < 2 for span in waited.non_tensor_batch["policy_versions"])
    if corrected:
        assert "old_log_probs" not in waited.batch and metrics_of(whole.path)[2]["rollout_is/mean"] != 1.0
    else:
        assert torch.equal(waited.batch["old_log_probs"], waited.batch["rollout_log_probs"])


def test_a_log_of_a_stopped_and_continued_run_is_replayed_from_its_beginning(beside):
    """The recorded run was drained where it was stopped, as its replay is, which saves nothing there."""
    first = beside("first", 10, trainer__save_freq=3)
    path = Path(first.path) / "events.jsonl"
    assert Replay(str(path)).drains == {3, 6}
    lines = path.read_text().replace('"trainer.save_freq": 3', '"trainer.save_freq": -1')
    path.write_text(lines)
    assert same(first, beside("again", 11, trainer__save_freq=-1, trainer__replay_events=str(path)))


def test_one_step_off_waits_for_whole_responses_and_depends_on_no_clock(beside):
    first, other = beside("first", 12, bound=1), beside("other", 13, bound=0, trainer__one_step_off=True)
    assert same(first, other)
    assert [line["rollout/age"] for line in metrics_of(first.path)] == [0.0, *[1.0] * 5]
    whole = beside("whole", 14, bound=3, trainer__partial_rollout=False)
    assert not any(line["rollout/partial"] for line in metrics_of(whole.path))


def test_a_lower_bound_drops_what_is_too_old_and_asks_its_prompts_again(beside):
    first = beside("run", 15, bound=3, trainer__partial_rollout=False, trainer__save_freq=4)
    shutil.rmtree(Path(first.path) / "checkpoints" / "global_step_6")
    lower = beside("run", 15, bound=1, trainer__partial_rollout=False, trainer__save_freq=4)
    last = metrics_of(lower.path)[4:]
    assert [line["rollout/dropped_groups"] for line in last] == [8.0, 0.0]  # two batches waited
    assert max(line["rollout/age_max"] for line in last) <= 1


@pytest.mark.slow
def test_a_replay_of_conversations_is_bitwise_however_long_their_tools_take(beside):
    """Turns join between other decode steps in every run, and in a replay between the same ones."""

    @register_agent("slow")
    async def slow(chat, row):
        for _ in range(2):
            await asyncio.sleep(random.SystemRandom().random() * 0.02)
            await chat.say(max_tokens=8)
            chat.tell("go on")
        return float(row["sample"])

    more = {f"{R}agent": "slow", f"{R}agent__processes": 2, "data__max_response_length": 40}
    more |= {"trainer__save_freq": 3, "trainer__total_training_steps": 5}
    try:
        first = beside("first", 16, **more)
        assert any(line["rollout/partial"] > 0 for line in metrics_of(first.path))
        assert {"turns", "end", "weights"} <= {line.get("do") for line in events_of(first)}
        again = beside("again", 17, trainer__replay_events=str(Path(first.path) / "events.jsonl"), **more)
        assert same(first, again) and events_of(first) == events_of(again)
    finally:
        AGENTS.clear()


@pytest.mark.slow
def test_a_replay_whose_agents_end_sooner_than_recorded_ends_with_an_error(beside, tmp_path):
    """The engine waits for a second turn that never comes, while other conversations are open."""

    @register_agent("hasty")
    async def hasty(chat, row):
        await chat.say(max_tokens=8)
        chat.tell("go on")
        if not (tmp_path / "again").exists() or int(row["uid"]) != 6:
            await chat.say(max_tokens=8)
        return float(row["sample"])

    more = {f"{R}agent": "hasty", f"{R}agent__processes": 2, "data__max_response_length": 40}
    more |= {"trainer__total_training_steps": 4}
    try:
        first = beside("first", 20, **more)
        (tmp_path / "again").mkdir()
        with pytest.raises(UserError, match="not do what the replayed run did: its settings, data or tools differ"):
            beside("again", 21, trainer__replay_events=str(Path(first.path) / "events.jsonl"), **more)
    finally:
        AGENTS.clear()


def test_drafts_of_earlier_epochs_which_no_checkpoint_has_are_rejected_in_a_replay(beside):
    more = {"trainer__replay_events": "events.jsonl", f"{R}speculation": "epochs"}
    with pytest.raises(UserError, match=r"(?s)speculation=epochs` with trainer.replay_events.*speculation=batch"):
        beside("run", 22, **more)
    with pytest.raises(UserError, match="is no event log"):  # of whole responses: no step is counted
        beside("run", 22, trainer__partial_rollout=False, **more)


def test_a_synchronous_run_does_not_train_what_waits_in_an_asynchronous_checkpoint(beside):
    first = beside("run", 18, trainer__save_freq=4)
    shutil.rmtree(Path(first.path) / "checkpoints" / "global_step_6")
    synchronous = beside("run", 18, bound=0, trainer__save_freq=4, algorithm__rollout_correction__rollout_is="token")
    trained = metrics_of(synchronous.path)
    assert [line["step"] for line in trained] == [1, 2, 3, 4, 5, 6] and trained[4]["mismatch/logp_max"] < 1e-5


OVER = {f"{R}oversample": 0.5, "trainer__total_training_steps": 8, f"{R}agent": "uneven", f"{R}agent__processes": 2}


@pytest.fixture
def uneven():
    """Every third prompt has long responses."""

    @register_agent("uneven")
    async def uneven(chat, row):
        await chat.say(max_tokens=3 if int(row["uid"]) % 3 else 20)
        return float(row["sample"])

    yield
    AGENTS.clear()


@pytest.mark.slow
def test_with_oversampling_the_first_whole_groups_are_trained_and_a_replay_takes_the_same(beside, uneven):
    """Half a batch more is under way: groups overtake each other, by another timing others do."""
    first = beside("first", 19, **OVER)
    lines, events = metrics_of(first.path), events_of(first)
    assert max(line["rollout/age_max"] for line in lines) == 2  # the bound holds
    assert sum(line["rollout/overtaken_groups"] for line in lines) > 0
    taken = [line["take"] for line in events if "take" in line]
    trained = [int(uid) for uids in taken for uid in uids]
    assert [len(uids) for uids in taken] == [4] * 8 and len(set(trained)) == 32
    assert [len(line["ask"]) for line in events if "ask" in line][:2] == [6, 8]  # a step and a half; then what is left
    asked = {int(uid) for line in events if "ask" in line for uid in line["ask"]}
    assert set(trained) < asked  # some are behind the last step
    log = str(Path(first.path) / "events.jsonl")
    again = beside("again", 20, **OVER, trainer__replay_events=log)
    assert same(first, again) and events == events_of(again)
    assert not same(first, beside("other", 21, **OVER))


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    return tmp_path_factory.mktemp("stopped") / "run"


@pytest.fixture
def stopped(beside, uneven, made_once, tmp_path):
    """What each of the first four steps took in `run`, which has oversampling and its checkpoint of step 4."""
    if made_once.exists():
        shutil.copytree(made_once, tmp_path / "run", symlinks=True)
    else:
        first = beside("run", 22, trainer__save_freq=4, **OVER)
        shutil.rmtree(Path(first.path) / "checkpoints" / "global_step_8")
        shutil.copytree(tmp_path / "run", made_once, symlinks=True)
    (log,) = made_once.rglob("events.jsonl")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return [line["take"] for line in events if line["step"] <= 4 and "take" in line]


@pytest.mark.slow
def test_groups_that_wait_in_a_checkpoint_are_trained_once_with_oversampling(beside, stopped):
    before = [uid for take in stopped for uid in take]
    again = beside("run", 23, trainer__save_freq=4, **OVER)
    taken = [uid for line in events_of(again) for uid in line.get("take", [])]
    assert taken[:16] == before and len(taken) == len(set(taken)) == 32
    assert max(line["rollout/age_max"] for line in metrics_of(again.path)) <= 2


MINI = "actor_rollout_ref__actor__ppo_mini_batch_size"


@pytest.mark.parametrize(
    ("changed", "prompts"),
    [
        ({f"{R}oversample": 0.0}, 4),
        ({f"{R}top_p": 0.9}, 4),
        ({f"{R}oversample": 0.0, "data__train_batch_size": 2, MINI: 2}, 2),
    ],
)
def test_a_run_resumed_with_other_settings_trains_batches_of_its_own_size(beside, stopped, changed, prompts):
    """What the checkpoint holds are parts of batches, from a run with another size or other fields."""
    again = beside("run", 23, trainer__save_freq=4, **OVER | changed)
    taken = [line["take"] for line in events_of(again) if "take" in line]
    assert taken[:4] == stopped and [len(uids) for uids in taken[4:]] == [prompts] * 4
    assert len({uid for uids in taken for uid in uids}) == 16 + 4 * prompts
    assert max(line["rollout/age_max"] for line in metrics_of(again.path)) <= 2


def test_of_the_groups_that_are_whole_the_oldest_are_taken():
    config, whole = PPOConfig(), {"1", "2", "4"}
    config.actor_rollout_ref.rollout.oversample = 1.0
    experience = SimpleNamespace(
        has_ended=lambda keys: {uid for uid, _ in keys} <= whole, wait_until=lambda over: over()
    )
    pending = PendingBatches(config, experience, lambda name: None, prompts=2)  # pyright: ignore
    for uids in ("001122", "334455"):
        rows = DataProto.from_dict(non_tensors={"uid": list(uids), "sample": [0, 1] * 3})
        pending.batches.append(Batch(rows, asked=1.0))
    assert pending.extra == 2 and pending.groups == 6
    assert pending._wait_for_whole(2) == ["1", "2"]


@pytest.mark.parametrize("oversample", [0.0, 0.5])
def test_a_step_takes_the_oldest_groups_of_several_batches_and_the_time_that_they_took(oversample):
    config = PPOConfig()
    config.actor_rollout_ref.rollout.oversample, config.trainer.max_staleness = oversample, 1
    clock = SimpleNamespace(choose=lambda what, make: make())
    experience = SimpleNamespace(clock=clock, wait_until=lambda over: over(), decode=None, turns=None)
    pending = PendingBatches(config, experience, lambda name: None, prompts=2)  # pyright: ignore
    for uids, seconds in (("44", 2.0), ("1122", 7.0), ("33", 5.0)):
        fields = {"uid": list(uids), "sample": [0, 1] * (len(uids) // 2), "policy_versions": [[(3, 1)]] * len(uids)}
        pending.batches.append(Batch(DataProto.from_dict(non_tensors=fields, meta_info={GENERATED_S: seconds})))
    found = [pending.take(4) for _ in range(3)]
    assert [list(rows.non_tensor_batch["uid"]) for rows in found[:2]] == [list("1122"), list("4433")]
    assert [rows.meta_info[GENERATED_S] for rows in found[:2]] == [7.0, 5.0] and found[2] is None


def test_oversampling_is_rejected_where_responses_do_not_continue_with_new_weights(beside):
    given = ["actor_rollout_ref.rollout.n_workers=1", "actor_rollout_ref.rollout.oversample=0.5"]
    for rest in ([], ["trainer.max_staleness=1"], ["trainer.max_staleness=2", "trainer.partial_rollout=False"]):
        with pytest.raises(UserError, match=r"oversample=0.5` leaves responses under way when weights change"):
            load_config([*given, *rest])
    assert load_config([*given, "trainer.max_staleness=2"]).value("actor_rollout_ref.rollout.oversample") == 0.5
    with pytest.raises(UserError, match=r"oversample needs weights loaded in flight, but .*name=hf cannot"):
        beside("hf", 2, **{f"{R}name": "hf", f"{R}oversample": 0.5})


def test_a_group_goes_to_the_engine_with_the_fewest_requests_and_a_replay_to_the_one_of_the_log(tmp_path):
    rollout = SimpleNamespace(submit=SimpleNamespace(world_size=3), take_schedule=lambda: [(0, [])] * 3)
    clock = EngineClock(rollout, EventLog(tmp_path))
    clock.log.begin(0, {})
    assert clock.place([5, 0, 3], [2, 2, 2, 2]) == [1, 1, 2, 1]
    replay = Replay(str(clock.log.path))
    (tmp_path / "again").mkdir()
    again = EngineClock(rollout, EventLog(tmp_path / "again", replay))
    again.restart(0)
    assert again.place([0, 0, 0], [2, 2, 2, 2]) == [1, 1, 2, 1]
    assert again.place([0, 0, 9], [2]) == [0]  # the log ends here
    again.restart(0)
    with pytest.raises(UserError, match="does not ask for the groups"):
        again.place([0, 0, 0], [2])


def test_a_dropped_group_that_called_a_tool_which_must_not_be_repeated_is_counted_and_not_asked_for_again():
    rows = DataProto.from_dict(
        non_tensors={
            "uid": ["1", "1", "2", "2"],
            "dataset_row": [11, 11, 12, 12],
            "tool_calls": [[], [{"name": "pay"}], [{"name": "look"}], []],
            "policy_versions": [[(0, 3)]] * 4,
        }
    )
    asked = {}
    for barred in ({"pay"}, set()):
        experience = SimpleNamespace(turns=SimpleNamespace(unrepeatable=barred), forget=lambda uids: None)
        pending = PendingBatches(PPOConfig(), experience, lambda name: None)  # pyright: ignore
        pending.events = SimpleNamespace(add=lambda **event: None)  # pyright: ignore
        pending.drop(rows)
        found = pending.note_trained(rows, 0)
        assert found["rollout/dropped_groups"] == 2
        asked[len(barred)] = pending.again, found.get("rollout/unrepeated_groups")
    assert asked == {1: ([12], 1.0), 0: ([11, 12], None)}


def test_the_age_of_a_batch_is_a_mean_over_its_tokens():
    spans = np.empty(2, dtype=object)
    spans[:] = [[(1, 3), (2, 1)], [(3, 4)]]
    found = staleness(DataProto.from_dict(non_tensors={"policy_versions": spans}), 3)
    assert found == {"rollout/age": (2 * 3 + 1) / 8, "rollout/age_max": 2.0, "rollout/partial": 0.5}


@pytest.mark.parametrize(("share", "groups"), [(0.0, 0), (0.3, 2), (0.5, 2), (1.0, 4)])
def test_a_share_of_the_prompts_that_is_no_whole_number_is_rounded_up(share, groups):
    config = PPOConfig()
    config.actor_rollout_ref.rollout.oversample = share
    assert PendingBatches(config, cast("Any", None), cast("Any", None), prompts=4).extra == groups
