"""6 steps straight equal 3 + killed + 3, bit for bit; and what a resume accepts and says."""

import textwrap
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from runs import metrics_of, parity_reward, run, settings

from posttrain.checkpoint.manager import CheckpointManager
from posttrain.tracking.status import read_origin

SIX = {"trainer__total_training_steps": 6, "trainer__save_freq": 3, "trainer__test_freq": 2}
TWO_UPDATES = {"actor_rollout_ref__actor__ppo_mini_batch_size": 2, "actor_rollout_ref__actor__use_kl_loss": True}
CASES = {
    "grpo": {},
    "grpo, several updates, KL, shuffled": {**TWO_UPDATES, "actor_rollout_ref__actor__shuffle": True},
    "gae with KL in the reward": {
        "algorithm__adv_estimator": "gae",
        "algorithm__use_kl_in_reward": True,
        "algorithm__kl_ctrl__type": "adaptive",
        "critic__optim__lr": 1e-3,
    },
    "codapo, saved before a step that repeats prompts": {
        "algorithm__adv_estimator": "codapo",
        "algorithm__codapo_top_k": 2,
    },
    "lora": {"actor_rollout_ref__model__lora_rank": 4},
}
SLOW = ("grpo", "lora", "gae with KL in the reward", "codapo, saved before a step that repeats prompts")
KILLED = """
    import os, signal, sys
    sys.path.insert(0, {folder!r})
    from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer
    from runs import parity_reward
    import posttrain

    plain = RayPPOTrainer._update

    def update(self, batch, step):
        if step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, batch, step)

    RayPPOTrainer._update = update
    posttrain.train({settings!r}, reward=parity_reward)
"""


def tensors(path: Path) -> dict[str, torch.Tensor]:
    manager = CheckpointManager(path / "checkpoints")
    newest = manager.newest()
    assert newest is not None
    found = {}
    for role in ("actor", "critic"):
        if (newest / role).exists():
            into = {
                name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in manager.describe(newest, role).items()
            }
            manager.load_tensors(newest, role, into)
            found |= {f"{role}.{name}": tensor for name, tensor in into.items()}
    return found


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES])
def test_six_steps_equal_three_plus_killed_plus_three_to_the_bit(tiny_model, sums, tmp_path, case, forked):
    more = {**SIX, **CASES[case], "data__val_files": str(sums["test"]), "data__val_max_samples": 8}
    straight = run(tiny_model, sums, tmp_path / "straight", **more)
    wanted = settings(tiny_model, sums, tmp_path / "killed", **more)
    code = textwrap.dedent(KILLED).format(folder=str(Path(__file__).parent), settings=wanted)
    killed = forked.run(code)
    assert killed.returncode == -9, killed.stderr[-2000:]
    path = tmp_path / "killed" / "test" / "run"
    assert [line["step"] for line in metrics_of(path)] == [0, 1, 2, 3, 4]
    run(tiny_model, sums, tmp_path / "killed", **more)

    assert [line["step"] for line in metrics_of(path)] == [0, 1, 2, 3, 4, 5, 6]
    assert metrics_of(path) == metrics_of(straight.path)
    for step in range(1, 7):
        name = f"samples/step_{step}.parquet"
        assert (path / name).read_bytes() == (straight.path / name).read_bytes(), name
    ours, theirs = tensors(path), tensors(straight.path)
    assert ours.keys() == theirs.keys() and len(ours) > 10
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    first = tensors_of_step(straight.path, 3)
    assert any(not torch.equal(first[name], theirs[name]) for name in first)


def tensors_of_step(path: Path, step: int) -> dict[str, torch.Tensor]:
    manager = CheckpointManager(path / "checkpoints")
    folder = manager.path_of(step)
    into = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in manager.describe(folder, "actor").items()}
    manager.load_tensors(folder, "actor", into)
    return {f"actor.{name}": tensor for name, tensor in into.items()}


def test_same_seed_same_run_and_another_seed_another(tiny_model, sums, tmp_path):
    first, again, other = (
        run(tiny_model, sums, tmp_path / name, trainer__seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert metrics_of(first.path) == metrics_of(again.path) != metrics_of(other.path)


def test_more_steps_are_accepted_and_changed_keys_are_named(tiny_model, sums, tmp_path, capsys):
    run(tiny_model, sums, tmp_path)
    capsys.readouterr()
    longer = run(tiny_model, sums, tmp_path, trainer__total_training_steps=4, actor_rollout_ref__actor__clip_ratio=0.1)
    said = capsys.readouterr().out
    assert longer.steps == 4 and [line["step"] for line in metrics_of(longer.path)] == [1, 2, 3, 4]
    assert "actor_rollout_ref.actor.clip_ratio was 0.2, is now 0.1" in said
    assert "total_training_steps was" not in said and "Resumed from" in said
    starts = read_origin(longer.path)
    assert [start["step"] for start in starts] == [0, 2] and all(start["versions"]["torch"] for start in starts)


def test_disabled_resume_refuses_a_directory_that_holds_a_run(tiny_model, sums, tmp_path):
    from posttrain.tracking.rundir import RunDirectoryError

    run(tiny_model, sums, tmp_path)
    before = metrics_of(tmp_path / "test" / "run")
    with pytest.raises(RunDirectoryError, match=r"holds a run already.*experiment_name"):
        run(tiny_model, sums, tmp_path, trainer__resume_mode="disable")
    assert metrics_of(tmp_path / "test" / "run") == before


def test_unnamed_runs_are_numbered_and_only_an_unfinished_one_goes_on(tiny_model, sums, tmp_path):
    named = {"trainer__experiment_name": None}
    first = run(tiny_model, sums, tmp_path, **named)
    second = run(tiny_model, sums, tmp_path, **named)
    assert [first.path.name, second.path.name] == ["grpo-1", "grpo-2"]
    longer = run(tiny_model, sums, tmp_path, trainer__total_training_steps=3, **named)
    assert longer.path == second.path and longer.steps == 3
    other = run(tiny_model, sums, tmp_path, trainer__total_training_steps=3, data__max_response_length=5, **named)
    assert other.path.name == "grpo-3"


def test_resume_from_a_given_checkpoint(tiny_model, sums, tmp_path):
    run(tiny_model, sums, tmp_path, trainer__save_freq=1)
    start = tmp_path / "test" / "run" / "checkpoints" / "global_step_1"
    more = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": str(start)}
    branch = run(tiny_model, sums, tmp_path, trainer__experiment_name="branch", **more)
    assert [line["step"] for line in metrics_of(branch.path)] == [2]
    straight = metrics_of(tmp_path / "test" / "run")[1]
    assert metrics_of(branch.path)[0] == straight


def test_a_foreign_checkpoint_is_not_mixed_into_a_directory_that_holds_a_run(tiny_model, sums, tmp_path):
    from posttrain.tracking.rundir import RunDirectoryError

    for name in ("one", "two"):
        run(tiny_model, sums, tmp_path, trainer__experiment_name=name, trainer__total_training_steps=1)
    start = tmp_path / "test" / "one" / "checkpoints" / "global_step_1"
    more = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": str(start)}
    with pytest.raises(RunDirectoryError, match="belongs to another one"):
        run(tiny_model, sums, tmp_path, trainer__experiment_name="two", trainer__total_training_steps=2, **more)
    assert [line["step"] for line in metrics_of(tmp_path / "test" / "two")] == [1]


def test_parity_reward_has_spread():
    assert parity_reward(None, "ab", None) == 0.5


def test_a_command_that_fails_at_its_start_changes_neither_the_link_nor_what_is_continued(tiny_model, sums, tmp_path):
    from posttrain.errors import UserError

    unnamed = {"trainer__experiment_name": None, "trainer__save_freq": 1}
    first = run(tiny_model, sums, tmp_path, **unnamed, trainer__total_training_steps=1)
    link = tmp_path / "checkpoints"
    assert link.resolve() == first.path / "checkpoints"
    with pytest.raises(UserError):  # the data is found wrong after the run directory was made
        run(tiny_model, {"train": _empty(tmp_path)}, tmp_path, **unnamed)
    assert link.resolve() == first.path / "checkpoints"
    again = run(tiny_model, sums, tmp_path, **unnamed, trainer__total_training_steps=2)
    assert (again.path, again.steps) == (first.path, 2) and link.resolve() == first.path / "checkpoints"


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_left_as_it_is(tiny_model, sums, tmp_path):
    from posttrain.checkpoint import CheckpointError

    first = run(tiny_model, sums, tmp_path, trainer__save_freq=1)
    for step in (1, 2):
        (first.path / "checkpoints" / f"global_step_{step}" / "state.json").write_text("{}")
    before = {path: path.read_bytes() for path in first.path.rglob("*") if path.is_file() and path.suffix != ".log"}
    with pytest.raises(CheckpointError, match="does not start over"):
        run(tiny_model, sums, tmp_path, trainer__total_training_steps=3)
    assert {path: path.read_bytes() for path in before} == before


def _empty(folder):
    (folder / "empty.jsonl").write_text("")
    return folder / "empty.jsonl"


def test_equal_runs_have_equal_generators_also_pythons_and_numpys(tiny_model, sums, tmp_path):
    """A user's own sampler or estimator draws from them."""
    import random

    import numpy as np

    files = []
    for name in ("one", "two"):
        random.seed(name)  # whatever was drawn before
        np.random.seed(len(files))
        result = run(tiny_model, sums, tmp_path / name, trainer__total_training_steps=1)
        files.append((result.path / "checkpoints" / "global_step_1" / "rng.safetensors").read_bytes())
    assert files[0] == files[1]
    other = run(tiny_model, sums, tmp_path / "other", trainer__total_training_steps=1, trainer__seed=2**62)
    assert (other.path / "checkpoints" / "global_step_1" / "rng.safetensors").read_bytes() != files[0]


def test_a_resumed_run_compares_its_end_with_its_own_beginning(tiny_model, sums, tmp_path, capsys):
    more = {"data__val_files": str(sums["test"]), "data__val_max_samples": 5, "trainer__test_freq": 1}
    run(tiny_model, sums, tmp_path, trainer__total_training_steps=1, **more)
    capsys.readouterr()
    run(tiny_model, sums, tmp_path, trainer__total_training_steps=2, **more)
    said = capsys.readouterr().out
    assert "1 of 2 steps are done" in said
    assert "the same prompts before (step 0) and after (step 2):" in said


def test_a_run_that_has_all_its_steps_says_so_and_keeps_the_settings_that_made_them(tiny_model, sums, tmp_path, capsys):
    path = run(tiny_model, sums, tmp_path).path
    before = {name: (path / name).read_bytes() for name in ("config.yaml", "metrics.jsonl")}
    capsys.readouterr()
    for steps, status in ((2, '"total_steps": 2'), (1, '"total_steps": 2')):
        again = run(tiny_model, sums, tmp_path, actor_rollout_ref__rollout__n=4, trainer__total_training_steps=steps)
        said = capsys.readouterr().out
        assert f"Nothing is left to train: 2 steps are done, and {steps} are asked for." in said
        assert "actor_rollout_ref.rollout.n was 3, is now 4" in said, "each time: it was not used"
        assert again.status == "finished" and status in (path / "status.json").read_text()
        assert before == {name: (path / name).read_bytes() for name in before}
    assert run(tiny_model, sums, tmp_path, trainer__total_training_steps=3).steps == 3
    assert "Nothing is left" not in capsys.readouterr().out


def test_rows_held_out_of_the_training_data_are_validated_on_never_trained_and_the_same_after_a_resume(
    tiny_model, sums, tmp_path, capsys
):
    more = {"data__val_files": "held_out", "trainer__test_freq": 1, "data__train_max_samples": 40}
    first = run(tiny_model, sums, tmp_path, **more, trainer__total_training_steps=1)
    assert "4 of the 40 training rows are held out" in capsys.readouterr().out
    run(tiny_model, sums, tmp_path, **more, trainer__total_training_steps=9)
    assert "4 of the 40 training rows are held out" in capsys.readouterr().out

    def prompts(kind: str, steps: range) -> list[set[str]]:
        tables = [pq.read_table(first.path / f"samples/{kind}_{step}.parquet") for step in steps]
        return [set(table["prompt"].to_pylist()) for table in tables]

    validated, trained = prompts("val", range(10)), set().union(*prompts("step", range(1, 10)))
    assert all(one == validated[0] for one in validated) and len(validated[0]) == 4
    assert len(trained) == 36 and not trained & validated[0]
