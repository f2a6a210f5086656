"""Settings of a run by what they change in it: what is asked, scored, saved, validated and written, and when."""

from __future__ import annotations

import functools
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from light_rewards import always_right
from patience import gone
from runs import metrics_of, run, settings

import posttrain
from posttrain.commands.evaluation.scoring import Scoring
from posttrain.config.rollout import CustomRewardConfig, RewardConfig
from posttrain.config.root import PPOConfig
from posttrain.errors import UserError
from posttrain.protocol import DataProto
from posttrain.rewards import resolve_reward
from posttrain.rollout.native.speculation import PassCost
from posttrain.tracking.rundir import TIMELINE, read_lines
from posttrain.tracking.samples import read_vocabulary, sample_files, validation_files
from posttrain.trainer.ppo import reward
from posttrain.trainer.ppo.first_batch import FirstBatchChecks, MismatchError, compare_log_probs, tolerance
from posttrain.trainer.ppo.recorder import Recorder
from posttrain.trainer.run.process import prepare_torch, restore_determinism
from posttrain.workers.fsdp_workers import ActorRolloutRefWorker
from posttrain.workers.roles import pick_device

ONE = {"trainer__total_training_steps": 1}
REWARD = """
import os, sys, time
from pathlib import Path
(Path(__file__).parent / f"worker_{os.getpid()}").touch()

def first(data_source, solution_str, ground_truth, extra_info=None):
    return 0.125

def third(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0

def second(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    if sum(map(ord, solution_str)) % 4 == 0:
        time.sleep(60)
    return 0.5 + bonus
"""


def samples(path: Path, step: int = 1) -> list[dict[str, Any]]:
    return pq.read_table(path / "samples" / f"step_{step}.parquet").to_pylist()


@pytest.fixture(scope="module")
def due(tiny_model, sums, tmp_path_factory):
    """A run of 7 steps whose checkpoints, validations, samples and lines come at frequencies of their own."""
    validated: list[int] = []
    plain = ActorRolloutRefWorker.submit

    @functools.wraps(plain)
    def submit(self: Any, prompts: DataProto) -> None:
        if prompts.meta_info.get("validate"):
            validated.append(len(prompts))
        plain(self, prompts)

    more = {
        "trainer__total_training_steps": 7,
        "trainer__save_freq": 2,
        "trainer__test_freq": 4,
        "trainer__val_before_train": False,
        "trainer__max_ckpt_to_keep": 2,
        "trainer__export_hf": "all",
        "trainer__logger": [],
        "tracking__samples_freq": 3,
        "data__val_files": str(sums["test"]),
        "data__val_batch_size": 5,
        "actor_rollout_ref__rollout__val_kwargs__n": 2,
        "actor_rollout_ref__rollout__val_kwargs__do_sample": True,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActorRolloutRefWorker, "submit", submit)
        folder = tmp_path_factory.mktemp("due")
        result = run(tiny_model, sums, folder, **more)
    assert result.path == folder / "test" / "run"  # default_local_dir, project_name and experiment_name
    return result, validated


def test_checkpoints_validations_samples_and_lines_come_when_they_are_due(due):
    result, _ = due
    lines, log = metrics_of(result.path), (result.path / "logs" / "run.log").read_text()
    assert [line["step"] for line in lines] == list(range(1, 8))
    assert [line["step"] for line in lines if any(name.startswith("val/") for name in line)] == [4, 7]
    assert [step for step in range(1, 8) if f"saved {result.path}/checkpoints/global_step_{step}\n" in log] == [
        2,
        4,
        6,
        7,
    ]
    kept = {int(path.name.split("_")[-1]) for path in (result.path / "checkpoints").glob("global_step_*")}
    assert {6, 7} <= kept and len(kept) < 4  # the newest two, and the best by validation if it is another
    assert (result.path / "checkpoints" / "global_step_6" / "huggingface" / "config.json").exists()
    assert [path.name for path in sample_files(result.path / "samples")] == ["step_3.parquet", "step_6.parquet"]


def test_samples_and_validations_can_be_traced_to_their_data_and_read_token_by_token(due, sums):
    result, _ = due
    data = json.loads(sums["train"].read_text())
    tokens = read_vocabulary(result.path)
    for row in pq.read_table(result.path / "samples" / "step_3.parquet").to_pylist():
        assert data[row["data_row"]]["prompt"] in row["prompt"] and row["seed"] >= 0
        assert json.loads(row["sampling"])["temperature"] == 1.0
        assert b"".join(tokens[number] for number in row["prompt_ids"]).decode() == row["prompt"]
        assert row["new_log_probs"] == pytest.approx(row["rollout_log_probs"], abs=1e-4)  # of the same weights
        assert 0 <= row["mismatch"] < 1e-4 and min(row["entropy"]) > 1.0  # by the trainer, of an untrained model
    held_out = [pq.read_table(path) for path in validation_files(result.path / "samples")]
    assert [len(table) for table in held_out] == [24, 24] and held_out[0]["step"].to_pylist() == [4] * 24
    assert None not in held_out[0]["score"].to_pylist() and len(set(held_out[0]["seed"].to_pylist())) == 24


def test_every_step_says_when_it_was_made_and_when_its_stages_began(due):
    result, _ = due
    lines, spans = metrics_of(result.path, times=True), list(read_lines(result.path / TIMELINE))
    assert [line["step"] for line in spans] == [line["step"] for line in lines] == list(range(1, 8))
    for line, span in zip(lines, spans, strict=True):
        own = [one for one in span["stages"] if len(one) == 3]  # of the loop; others name what works beside it
        assert {name for name, _, _ in own} == {
            name.removeprefix("timing_s/") for name in line if name.startswith("timing_s/") and name != "timing_s/step"
        }
        stages = {f"perf/memory_gb/{name}" for name, _, _ in own}
        assert stages <= set(line) and line["perf/memory_gb"] > 0.01
        assert {one[3] for one in span["stages"] if one not in own} <= {"rewards", "disk"}
        begins = [begin for _, begin, _ in own]
        assert begins == sorted(begins) and begins[-1] <= line["time"]


def test_validation_takes_its_own_number_of_responses_and_prompts_at_a_time(due):
    result, validated = due
    assert validated == [10, 10, 4] * 2  # 12 prompts, 5 at a time, 2 responses each
    assert all(any("mean@2" in name for name in found) for _, found in result.validation)


def test_step_lines_are_on_the_console_only_if_it_is_among_the_loggers(due, tiny_model, sums, tmp_path, monkeypatch):
    from posttrain.tracking import progress

    seen: list[Any] = []
    plain = progress.Progress.step
    monkeypatch.setattr(
        progress.Progress, "step", lambda self, *a, **k: seen.append(k["quiet"]) or plain(self, *a, **k)
    )
    for logger in (["console"], []):
        run(tiny_model, sums, tmp_path / str(len(logger)), trainer__logger=logger, **ONE)
    assert seen == [False, True]


def test_samples_are_thinned_beyond_the_size_that_is_set(tiny_model, sums, tmp_path):
    result = run(tiny_model, sums, tmp_path, tracking__samples_max_gb=1e-6)
    left = [
        len(samples(result.path, step))
        for step in (1, 2)
        if (result.path / "samples" / f"step_{step}.parquet").exists()
    ]
    assert sum(left) < 24


def test_the_best_checkpoint_is_chosen_by_the_metric_that_is_named():
    recorder = object.__new__(Recorder)
    recorder.config = PPOConfig()
    recorder.validations = [(3, {"val/a/mean@1": 0.1, "val/a/pass@2": 0.9}, [])]
    assert recorder._metric(3) == 0.1 and recorder._metric(2) is None
    recorder.config.trainer.best_metric = "val/a/pass@2"
    assert recorder._metric(3) == 0.9


def test_adapters_are_exported_alone_or_merged(tiny_model, sums, tmp_path):
    found = {}
    for kind in ("adapter", "merged"):
        more = {"actor_rollout_ref__model__lora_rank": 2, "trainer__export_hf": "last", "trainer__export_lora": kind}
        result = run(tiny_model, sums, tmp_path / kind, **more, **ONE)
        folder = result.path / "checkpoints" / "global_step_1" / "huggingface"
        found[kind] = ((folder / "adapter_config.json").exists(), (folder / "config.json").exists())
    assert found == {"adapter": (True, False), "merged": (False, True)}


def test_the_seed_decides_the_samples(tiny_model, sums, tmp_path):
    """Of the same prompts in the same order, in training and in validation."""
    more = {
        "data__shuffle": False,
        "data__val_files": str(sums["test"]),
        "data__val_max_samples": 3,
        "actor_rollout_ref__rollout__val_kwargs__do_sample": True,
        **ONE,
    }
    seen: dict[int, tuple[list[str], list[str], list[str]]] = {}
    plain = Recorder.record_validation
    for seed in (1, 2):
        shown: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                Recorder,
                "record_validation",
                lambda self, step, metrics, rows, shown=shown: (
                    shown.extend(row["response"] for row in rows) or plain(self, step, metrics, rows)
                ),
            )
            rows = samples(run(tiny_model, sums, tmp_path / str(seed), trainer__seed=seed, **more).path)
        seen[seed] = ([row["prompt"] for row in rows], [row["response"] for row in rows], shown[:3])
    assert seen[1][0] == seen[2][0] and seen[1][1] != seen[2][1] and seen[1][2] != seen[2][2]


def test_seed_and_determinism_reach_torch(capsys):
    config = PPOConfig()
    config.trainer.seed, config.trainer.deterministic = 123, True
    before = torch.random.get_rng_state()
    try:
        with restore_determinism():
            prepare_torch(config.trainer, torch.device("cpu"))
            assert torch.initial_seed() == 123 and torch.are_deterministic_algorithms_enabled()
            assert not torch.utils.deterministic.fill_uninitialized_memory, "which takes time and changes no number"
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.random.set_rng_state(before)


def test_the_device_is_the_one_that_is_named(monkeypatch):
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        found = [pick_device(name).type for name in ("auto", "cpu", "cuda")]
        assert found == ["cuda" if there else "cpu", "cpu", "cuda"]


def test_a_run_stops_where_rollout_and_trainer_differ_by_more_than_is_set(monkeypatch):
    monkeypatch.setattr("posttrain.trainer.ppo.first_batch.largest_rows", lambda config, sizes: [])
    ones = torch.ones(2, 3)
    batch = DataProto.from_dict(tensors={"response_mask": ones, "rollout_log_probs": -ones})
    for allowed in (0.5, 0.1, None):
        config = PPOConfig()
        config.trainer.rollout_mismatch_tol = allowed
        checks = FirstBatchChecks(config, Any, Any, torch.device("cpu"), one_prompt=True)
        limit = tolerance(checks.tolerance, torch.float32)
        assert limit == (allowed or 1e-3)
        if allowed == 0.5:
            assert compare_log_probs(batch, -1.2 * ones, limit)[1] == pytest.approx(0.2)
            continue
        with pytest.raises(MismatchError, match="differ by 0"):
            compare_log_probs(batch, -1.2 * ones, limit)


def test_the_rollout_engine_is_the_one_that_is_named(tiny_model, sums, tmp_path, capsys):
    run(tiny_model, sums, tmp_path, actor_rollout_ref__rollout__name="hf", **ONE)
    assert "Rollout engine: hf (transformers" in capsys.readouterr().out


def test_with_fp8_the_rollout_rounds_and_importance_weights_correct_for_it(tiny_model, sums, tmp_path, capsys):
    result = run(tiny_model, sums, tmp_path, actor_rollout_ref__rollout__quantization="fp8")
    said = capsys.readouterr().out
    assert "fp8 products)" in said
    assert "rollout_is=token under actor_rollout_ref.rollout.quantization" in said
    steps = metrics_of(result.path)
    # The trainer computes in float32: rounding to 8 bits is what differs, after each weight sync anew.
    assert all(1e-3 < step["mismatch/logp_mean"] < 0.5 for step in steps), steps


def test_with_fp8_the_trainer_rounds_the_base_and_agrees_better_with_a_rollout_that_does(
    tiny_model, sums, tmp_path, capsys
):
    found = {}
    for rollout in (None, "fp8"):
        settings = {"actor_rollout_ref__actor__quantization": "fp8", "actor_rollout_ref__model__lora_rank": 4}
        settings |= {"actor_rollout_ref__rollout__quantization": rollout} if rollout else {}
        result = run(tiny_model, sums, tmp_path / str(rollout), **settings)
        found[rollout] = [step["mismatch/logp_mean"] for step in metrics_of(result.path)]
    assert "rollout_is=token under actor_rollout_ref.actor.quantization" in capsys.readouterr().out
    assert all(1e-3 < apart < 0.5 for apart in found[None]), found
    assert sum(found["fp8"]) < 0.5 * sum(found[None]), found


def test_with_speculation_few_responses_are_verified_and_none_differs(tiny_model, sums, tmp_path, monkeypatch):
    monkeypatch.setattr(PassCost, "best_width", lambda *_: 4)  # as if it always paid
    found = []
    for value in (None, "batch"):
        result = run(tiny_model, sums, tmp_path / str(value), actor_rollout_ref__rollout__speculation=value, **ONE)
        found.append((metrics_of(result.path)[0], [row["response"] for row in samples(result.path)]))
    (plain, responses), (metrics, same) = found
    assert "rollout/speculation_share" not in plain and metrics["rollout/speculation_share"] > 0
    assert responses == same


def test_the_data_settings_of_a_run_decide_what_the_model_is_asked(tiny_model, tmp_path):
    rows = [{"question": f"letter {letter}", "ground_truth": letter} for letter in "dbcaef"]
    given = settings(tiny_model, {"train": tmp_path}, tmp_path, data__prompt_key="question", data__shuffle=False, **ONE)
    given |= {"data.data_source": "mine", "data.system_prompt": "Be odd.", "data.train_max_samples": 5}
    del given["data.train_files"]
    seen: list[Any] = []

    def reward(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": len(solution_str) / 10, "source": data_source}

    result = posttrain.train(given, reward=reward, data=rows)
    seen = samples(result.path)
    prompts = list(dict.fromkeys(row["prompt"] for row in seen))
    assert [prompt.split("letter ")[1][0] for prompt in prompts] == list("dbca")  # 4 of them, as they came
    assert all("Be odd." in prompt for prompt in prompts)
    assert {row["data_source"] for row in seen} == {"mine"} or "mine" in str(seen[0])


def test_the_reward_settings_of_a_run_decide_the_scores(tiny_model, sums, tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text(REWARD)
    more = {
        "custom_reward_function__path": str(file),
        "custom_reward_function__name": "second",
        "custom_reward_function__reward_kwargs": {"bonus": 0.25},
        "reward__timeout_s": 0.4,
        "reward__failure_score": -3.0,
        "reward__num_workers": 3,
    }
    workers: list[int] = []
    pool = reward.RewardPool
    monkeypatch.setattr(reward, "RewardPool", lambda *a, **k: workers.append(k["num_workers"]) or pool(*a, **k))
    rows = samples(run(tiny_model, sums, tmp_path / "out", reward=None, **more, **ONE).path)
    assert {row["score"] for row in rows} == {0.75, -3.0}
    late = [row for row in rows if row["score"] == -3.0]
    assert all(sum(map(ord, row["response"])) % 4 == 0 and "0.4" in row["error"] for row in late)
    assert workers == [3] and len(list(tmp_path.glob("worker_*"))) >= 3


def test_what_looked_at_the_reward_is_the_first_to_score_and_ends_with_a_run_that_does_not_begin(
    tiny_model, sums, tmp_path
):
    (tmp_path / "none.json").write_text("[]")
    for name, files, error in (
        ("good", sums, nullcontext()),
        ("bad", sums | {"train": tmp_path / "none.json"}, pytest.raises(UserError)),
    ):
        file = tmp_path / name / "mine.py"
        file.parent.mkdir()
        file.write_text(REWARD)
        more = {"custom_reward_function__path": str(file), "custom_reward_function__name": "first", **ONE}
        with error:
            run(tiny_model, files, tmp_path / "out" / name, reward=None, **more)
        (worker,) = file.parent.glob("worker_*")
        assert gone(int(worker.name.removeprefix("worker_")))


def test_unless_said_there_is_a_reward_worker_for_each_core_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 7)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 5}, raising=False)
    with Scoring(PPOConfig(), ["math_reasoning"], print) as scoring:
        assert scoring._pool._crew.places.room == 2
    with reward.make_reward_pool(
        resolve_reward(CustomRewardConfig()), RewardConfig(), {"math_reasoning"}, print
    ) as pool:
        assert pool._crew.places.room == 2


def test_several_rewards_of_a_run_are_summed_by_weight(tiny_model, sums, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(REWARD)
    parts = {
        "a": {"path": str(file), "name": "first", "weight": 2.0},
        "b": {"path": str(file), "name": "third", "weight": -1.0},
    }
    rows = samples(run(tiny_model, sums, tmp_path / "out", reward=None, reward__functions=parts, **ONE).path)
    assert {row["score"] for row in rows} == {2 * 0.125 - 1.0}


def test_the_embedded_preset_learns_from_the_reward_alone(tiny_model, sums, tmp_path):
    """A bonus for entropy is earned behind an answer, where the reward does not look: responses then never end."""
    sizes = {"data.train_batch_size": 4, "actor_rollout_ref.actor.ppo_mini_batch_size": 2, "reward.num_workers": 1}
    places = {"actor_rollout_ref.model.path": str(tiny_model), "data.train_files": str(sums["train"])}
    ends = {"trainer.total_training_steps": 1, "trainer.export_hf": "none", "trainer.default_local_dir": str(tmp_path)}
    given = {"preset": "embedded", "data.val_files": None, "trainer.device": "cpu", **sizes, **places, **ends}
    result = posttrain.train(given, reward=always_right)
    (step,) = result.metrics
    assert step["groups/all_right"] == 1 and step["actor/optimizer_steps"] == 2
    assert step["actor/grad_norm"] == 0 and step["actor/loss"] == 0
