"""Rules on launching and engines where documents disagree: strategies, several machines, one worker."""

import subprocess
import sys

STRATEGY = "actor_rollout_ref.actor.strategy"


def test_D_33_fsdp_and_fsdp2_are_one_engine_and_deepspeed_names_fsdp2(load, problems):
    for name in ("fsdp", "fsdp2"):
        assert load(f"{STRATEGY}={name}").value(STRATEGY) == name
    assert "fsdp2" in problems(f"{STRATEGY}=deepspeed")
    assert "megatron" in problems(f"{STRATEGY}=megatron")


def test_D_25_several_machines_without_a_cluster_show_the_three_forms(problems):
    said = problems("trainer.nnodes=4", "trainer.seed=1", environment=True)
    assert "running Ray cluster" in said and "torchrun" in said and "RAY_HEAD_ADDRESS" in said


def test_D_24_module_and_command_start_the_same_program():
    """`--cfg job` of the module and of `posttrain train` give the same tree for the same keys."""
    keys = ["preset=embedded", "trainer.seed=5", "--cfg", "job"]
    module = [sys.executable, "-m", "posttrain.trainer.main_ppo", *keys]
    command = [sys.executable, "-m", "posttrain.cli", "train", *keys]
    first, second = (
        subprocess.run(line, capture_output=True, text=True, check=True).stdout for line in (module, command)
    )
    assert first == second and "seed: 5" in first
