"""Groups by role: their calls are typed, so that pyright finds wrong ones in the loop, and go to the right workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from textbook import CPU

from posttrain.controller.group import RoleGroup, all_of, delegate, register, to_all, to_first
from posttrain.controller.pool import LocalWorkerGroup
from posttrain.workers.groups import DisaggregatedGroup, PolicyGroup, RolloutGroup

ROOT = Path(__file__).parents[2]
PPO = ROOT / "posttrain" / "trainer" / "ppo" / "ray_trainer.py"
SUPERVISED = ROOT / "posttrain" / "trainer" / "supervised" / "loop.py"
TASKS = ROOT / "posttrain" / "trainer" / "supervised" / "tasks.py"
GROUPS = ROOT / "posttrain" / "workers" / "groups.py"
# Name of a copy -> (its source, the call in it, the wrong call).
PLANTED = {
    "as_it_is": (PPO, "", ""),
    "wrong_type": (PPO, "actor_rollout_wg.sync_weights(version)", "actor_rollout_wg.sync_weights(self.config)"),
    "one_too_many": (
        PPO,
        "ref_wg.compute_ref_log_prob.later(batch)",
        "ref_wg.compute_ref_log_prob.later(batch, 1)",
    ),
    "none_at_all": (PPO, "critic.update_critic(batch)", "critic.update_critic()"),
    "misspelt": (PPO, "actor_rollout_wg.compute_log_prob(batch)", "actor_rollout_wg.compute_logprob(batch)"),
    "wrong_result": (PPO, "actor_rollout_wg.token_stats().items()", "actor_rollout_wg.notes().items()"),
    "supervised_as_it_is": (SUPERVISED, "", ""),
    "supervised_wrong_type": (
        SUPERVISED,
        'task.group.export_hf(folder / "huggingface")',
        "task.group.export_hf(self.step)",
    ),
    "tasks_as_they_are": (TASKS, "", ""),
    "tasks_wrong_type": (TASKS, "self.group.update(batch), **counts", "self.group.update(rows), **counts"),
    "tasks_misspelt": (TASKS, "self.group.log_probs(batch)", "self.group.log_prob(batch)"),
    "groups_as_they_are": (GROUPS, "", ""),
    "handed_over_wrong_type": (GROUPS, "hand_over(parts[0], version)", "hand_over(parts[0], self.route)"),
    "handed_over_too_few": (GROUPS, "hand_over(parts[0], version)", "hand_over(parts[0])"),
    "handed_over_wrong_answer": (GROUPS, "hand_over(parts[0], version)", "hand_over(was_last, version)"),
    "tasks_of_another_group": (TASKS, "self.group.scores(batch)", "self.group.log_probs(batch)"),
}


class Part:
    config = None

    @register(to_all)
    def doubled(self, number: int) -> int:
        return 2 * number


class PartCalls:
    doubled = delegate(Part.doubled, to="part")


class Whole(PartCalls):
    """Has a part, and passes calls on to it."""

    config = None

    def __init__(self) -> None:
        self.part = Part()


class Own(Whole):
    """A class of the user's: another mark on a method, and one method more."""

    @register(to_all, all_of)
    def doubled(self, number: int) -> int:
        return super().doubled(number) + 1

    @register(to_first)
    def further(self) -> str:
        return "called"

    def unmarked(self) -> None:
        pass


class Plain(Own):
    """Overrides a method without a mark."""

    def doubled(self, number: int) -> int:
        return -number


class WholeGroup(RoleGroup, PartCalls):
    pass


def test_a_worker_that_is_made_of_parts_passes_calls_on_by_itself_and_through_its_group():
    group = WholeGroup(LocalWorkerGroup(Whole()))
    assert Whole().doubled(4) == 8 and group.doubled(4) == 8
    assert group.doubled.later(5).result() == 10 and group.doubled.on(0, 6).result() == 12


def test_a_group_calls_a_users_class_by_its_own_marks_and_finds_methods_that_its_role_does_not_list():
    group = WholeGroup(LocalWorkerGroup(Own()))
    assert group.doubled(4) == [9]
    assert group.further() == "called"  # pyright: ignore
    assert WholeGroup(LocalWorkerGroup(Plain())).doubled(4) == [-4]  # joined as the overridden method is
    for name in ("unmarked", "absent"):
        with pytest.raises(AttributeError, match=name):
            getattr(group, name)
    with pytest.raises(TypeError, match="by place; give number without names"):
        group.doubled(number=4)


def test_disaggregated_calls_go_to_the_workers_that_have_the_method():
    class Trains:
        config = device = CPU

        @register(to_first)
        def vocabulary(self) -> int:
            return 7

    class Generates:
        config = CPU

        @register(to_first)
        def rollout_engine(self) -> str:
            return "an engine"

    pair = DisaggregatedGroup(PolicyGroup(LocalWorkerGroup(Trains())), RolloutGroup(LocalWorkerGroup(Generates())))
    assert (pair.vocabulary(), pair.rollout_engine()) == (7, "an engine")


@pytest.mark.slow
def test_wrong_calls_that_are_planted_in_the_loops_are_found_and_the_loops_themselves_have_none(tmp_path):
    pytest.importorskip("pyright")
    planted = {}
    for name, (file, right, wrong) in PLANTED.items():
        source = file.read_text()
        assert right in source
        planted[name] = source.replace(right, wrong) if right else source
        (tmp_path / f"{name}.py").write_text(planted[name])
    settings = {"include": ["."], "extraPaths": [str(ROOT)], "pythonVersion": "3.11", "typeCheckingMode": "basic"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(tmp_path)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    errors = [problem for problem in found["generalDiagnostics"] if problem["severity"] == "error"]
    lines = {Path(problem["file"]).stem: problem["range"]["start"]["line"] for problem in errors}
    assert lines.keys() == {name for name, (_, right, _) in PLANTED.items() if right}
    for name, line in lines.items():
        assert PLANTED[name][2] in planted[name].splitlines()[line]
