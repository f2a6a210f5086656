"""Rules on launching and engines where documents disagree: strategies, several machines, one worker."""

import subprocess
import sys

import pytest

from posttrain.config import ConfigError, load_config
from posttrain.config.trainer import generating_workers_of, one_process, own_workers_of, workers_of
from posttrain.config.trees import PPO, SFT

STRATEGY = "actor_rollout_ref.actor.strategy"
SIZES = ("fsdp_config.fsdp_size", "ulysses_sequence_parallel_size")


def test_fsdp_and_fsdp2_are_one_engine_and_deepspeed_names_fsdp2(load, problems):
    for name in ("fsdp", "fsdp2"):
        assert load(f"{STRATEGY}={name}").value(STRATEGY) == name
    assert "fsdp2" in problems(f"{STRATEGY}=deepspeed")
    assert load(f"{STRATEGY}=megatron").value(STRATEGY) == "megatron"


@pytest.mark.parametrize("name", ["fsdp", "fsdp2"])
def test_a_strategy_that_shards_is_taken_and_says_once_what_one_process_does(load, name):
    notes = load(f"{STRATEGY}={name}", f"critic.strategy={name}").notes
    assert [note for note in notes if "sharded" in note] == [
        f"{STRATEGY}: one process holds the whole model, nothing is sharded."
    ]
    supervised = load(f"fsdp.strategy={name}", "model.path=embedded", tree=SFT).notes
    assert "fsdp.strategy: one process holds the whole model, nothing is sharded." in supervised
    assert not any("sharded" in note for note in load("trainer.seed=1").notes)


def test_several_workers_shard_whatever_the_strategy_is_called(load):
    assert not any("sharded" in note for note in load(f"{STRATEGY}=fsdp2", "trainer.n_workers=2").notes)


@pytest.mark.parametrize("section", ["actor_rollout_ref.actor", "critic"])
def test_sizes_of_groups_of_workers_must_divide_them(load, problems, section):
    four = ["trainer.n_workers=4", "algorithm.adv_estimator=gae"]
    shards, sequence = f"{section}.fsdp_config.fsdp_size", f"{section}.ulysses_sequence_parallel_size"
    resolved = load(*four, f"{shards}=2", f"{sequence}=4")
    assert (resolved.value(shards), resolved.value(sequence)) == (2, 4)
    assert not any("no effect" in note for note in resolved.notes)
    assert load(*four).value(shards) == -1
    for key in (shards, sequence):
        assert f"`{key}=3` does not divide the 4 worker(s)" in problems(*four, f"{key}=3")
        assert f"set {key} to one of 1, 2, 4" in problems(*four, f"{key}=3")
        assert key in problems(*four, f"{key}=0")
    assert f"`{sequence}=2` does not divide the 1 worker(s)" in problems(f"{sequence}=2", four[1])


@pytest.mark.parametrize("name", ["fsdp_config.fsdp_size", "ulysses_sequence_parallel_size"])
def test_the_reference_is_cut_as_the_actor_is(load, problems, name):
    both = [f"actor_rollout_ref.{role}.{name}=2" for role in ("actor", "ref")]
    assert load("trainer.n_workers=4", *both).value(f"actor_rollout_ref.actor.{name}") == 2
    assert "the reference is cut as the actor is" in problems("trainer.n_workers=4", both[1])


def test_the_place_of_the_sequence_size_in_newer_files_is_read_too(load):
    key = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"
    resolved = load("trainer.n_workers=2", key, key.replace(".actor.", ".ref."))
    assert resolved.value("actor_rollout_ref.actor.ulysses_sequence_parallel_size") == 2


def torchrun(monkeypatch: pytest.MonkeyPatch, *, processes: int, here: int, rank: int, machine: int = 0) -> None:
    given = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": here, "LOCAL_RANK": rank, "GROUP_RANK": machine}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("tree", [PPO, SFT])
def test_two_commands_of_torchrun_are_one_run_that_the_first_machine_drives(monkeypatch, tree):
    given = ["trainer.seed=1", "trainer.device=cpu"]
    monkeypatch.setattr("posttrain.cores.usable", lambda: 8)
    for machine in (0, 1):
        torchrun(monkeypatch, processes=16, here=8, rank=0, machine=machine)
        resolved = load_config(given, environment=True, tree=tree)
        assert (resolved.value("trainer.n_gpus_per_node"), resolved.value("trainer.nnodes")) == (8, 2)
        assert resolved.node_rank == machine and "node_rank" not in resolved.to_yaml()
        with pytest.raises(ConfigError, match=r"nnodes=1`, but torchrun started 2 machines[\s\S]*--nnodes=1, or leave"):
            load_config([*given, "trainer.nnodes=1"], environment=True, tree=tree)
        torchrun(monkeypatch, processes=16, here=8, rank=5, machine=machine)
        with pytest.raises(SystemExit) as left:
            load_config(given, environment=True, tree=tree)
        assert left.value.code == 0


@pytest.mark.parametrize("here", [2, 0])
def test_machines_with_unlike_numbers_of_torchruns_processes_get_one_refusal_before_anything_else(
    problems, monkeypatch, here
):
    torchrun(monkeypatch, processes=3, here=here, rank=0)
    said = problems("data.train_batch_size=many", environment=True)
    assert said.startswith("1 problem") and f"torchrun started 3 processes in all and {here} on this machine" in said
    torchrun(monkeypatch, processes=3, here=here, rank=1)  # the second process of the same machine adds nothing
    with pytest.raises(SystemExit) as left:
        load_config(["data.train_batch_size=many"], environment=True)
    assert left.value.code == 2


@pytest.mark.parametrize("tree", [PPO, SFT])
def test_the_first_process_of_torchrun_trains_with_as_many_workers_and_the_others_leave(problems, monkeypatch, tree):
    torchrun(monkeypatch, processes=2, here=2, rank=0)
    monkeypatch.setattr("posttrain.cores.usable", lambda: 8)
    given = ["trainer.seed=1", "trainer.device=cpu"]
    resolved = load_config(given, environment=True, tree=tree)
    assert resolved.value("trainer.n_gpus_per_node") == 2
    assert resolved.where("trainer.n_gpus_per_node") == "torchrun"
    assert load_config([*given, "trainer.n_gpus_per_node=2"], environment=True, tree=tree)
    with pytest.raises(ConfigError, match=r"n_gpus_per_node=3`, but torchrun started 2 processes"):
        load_config([*given, "trainer.n_gpus_per_node=3"], environment=True, tree=tree)
    torchrun(monkeypatch, processes=2, here=2, rank=1)
    with pytest.raises(SystemExit) as left:
        load_config(given, environment=True, tree=tree)
    assert left.value.code == 0


ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    "given, workers",
    [
        ([f"{ROLLOUT}.n_workers=3"], 3),
        ([f"{ROLLOUT}.n_gpus_per_node=4"], 4),
        ([f"{ROLLOUT}.nnodes=2", f"{ROLLOUT}.n_gpus_per_node=4", "actor_rollout_ref.hybrid_engine=False"], 8),
        ([f"{ROLLOUT}.nnodes=1", "trainer.n_gpus_per_node=4"], 4),
        ([f"{ROLLOUT}.nnodes=0", f"{ROLLOUT}.n_gpus_per_node=4", "actor_rollout_ref.hybrid_engine=True"], 0),
        (["trainer.seed=1"], 0),
    ],
)
def test_workers_that_only_generate_are_counted_in_ours_and_in_verls_words(load, given, workers):
    resolved = load(*given)
    assert resolved.value(f"{ROLLOUT}.n_workers") == workers
    assert f"n_workers: {workers}" in resolved.to_yaml() and "hybrid_engine" not in resolved.to_yaml()


def test_some_of_the_workers_that_train_can_generate_and_no_more_than_there_are(load, problems):
    four, key, size = "trainer.n_workers=4", f"{ROLLOUT}.colocated_workers", f"{ROLLOUT}.tensor_model_parallel_size"
    resolved = load(four, f"{key}=2", f"{size}=2")
    assert generating_workers_of(resolved.config) == 2 and workers_of(resolved.config) == 4
    assert generating_workers_of(load(four).config) == 4
    assert f"`{key}=5`: only 4 worker(s) train" in problems(four, f"{key}=5")
    assert "set one of the two to 0" in problems(four, f"{key}=2", f"{ROLLOUT}.n_workers=1")
    assert f"set a divisor of {key}" in problems(four, f"{key}=3", f"{size}=2", environment=True)


def test_two_words_on_who_generates_must_agree(problems):
    assert "hybrid_engine=False` has other workers generate than train, but nothing says how many" in problems(
        "actor_rollout_ref.hybrid_engine=False"
    )
    assert "hybrid_engine=True` has the same workers train and generate, but" in problems(
        "actor_rollout_ref.hybrid_engine=True", f"{ROLLOUT}.n_workers=1"
    )
    assert "n_workers=1`, but" in problems(f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_workers=2")


def test_more_workers_in_both_pools_than_there_are_devices_are_refused(problems, monkeypatch):
    monkeypatch.setattr("posttrain.cores.usable", lambda: 3)
    two = ["trainer.n_workers=2", "trainer.device=cpu"]
    assert load_config([*two, f"{ROLLOUT}.n_workers=1"], environment=True)
    said = problems(*two, f"{ROLLOUT}.n_workers=2", environment=True)
    assert "n_workers=2` asks for so many workers beside the 2 that train" in said and "3 CPU core(s)" in said
    assert f"{ROLLOUT}.n_workers=0: then the same workers do both" in said


OWN = {
    "reward_model.n_workers": ["reward_model.enable=True", "reward_model.model.path=m"],
    "critic.n_workers": ["algorithm.adv_estimator=gae"],
    "actor_rollout_ref.ref.n_workers": ["actor_rollout_ref.actor.use_kl_loss=True"],
}


@pytest.mark.parametrize("key", list(OWN))
def test_a_role_has_workers_of_its_own_where_the_run_has_the_role(load, problems, monkeypatch, key):
    resolved = load(f"{key}=2", *OWN[key])
    assert list(own_workers_of(resolved.config).values()) == [2] and not one_process(resolved.config)
    assert not any(key in note for note in resolved.notes)
    assert key in problems(f"{key}=-1", *OWN[key])
    grpo = ["algorithm.adv_estimator=grpo", f"{key}=2"]
    assert not own_workers_of(load(*grpo).config) and one_process(load(*grpo).config)
    assert any(key in note for note in load(*grpo).notes)  # that it has no effect
    monkeypatch.setattr("posttrain.cores.usable", lambda: 2)
    said = problems(f"{key}=2", *OWN[key], "trainer.device=cpu", environment=True)
    assert f"`{key}=2` asks for so many workers beside the 1 that train" in said and f"{key}=0" in said


def test_what_is_cut_over_workers_of_its_own_is_cut_by_their_number(load, problems):
    critic, reference = (["trainer.n_workers=4", f"{key}=3", *OWN[key]] for key in list(OWN)[1:])
    assert load(*critic, "critic.fsdp_config.fsdp_size=3")
    assert "fsdp_size=2` does not divide the 3 worker(s) of critic" in problems(
        *critic, "critic.fsdp_config.fsdp_size=2"
    )
    shards, sequences = (f"{STRATEGY.rpartition('.')[0]}.{name}=2" for name in SIZES)
    for size in (shards, sequences):
        assert f"{size}` does not divide the 3 worker(s) of actor_rollout_ref.ref" in problems(*reference, size)
    assert load(*reference[:1], reference[1].replace("3", "2"), *reference[2:], shards, sequences)


@pytest.mark.parametrize("key", list(OWN)[1:])
def test_megatron_cuts_all_models_over_the_workers_that_train(problems, key):
    said = problems(f"{STRATEGY}=megatron", "trainer.n_workers=2", f"{key}=1", *OWN[key])
    assert f"`{key}=1` with {STRATEGY}=megatron, which cuts all models over the workers that train" in said


def test_the_reference_of_adapters_needs_no_workers(problems):
    key = list(OWN)[2]
    said = problems(f"{key}=1", *OWN[key], "actor_rollout_ref.model.lora_rank=4")
    assert f"`{key}=1` with adapters: the reference is the policy's own base" in said


def test_workers_that_only_generate_need_ray(problems, monkeypatch):
    monkeypatch.setattr("posttrain.config.environment.importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("posttrain.cores.usable", lambda: 3)
    said = problems("trainer.device=cpu", f"{ROLLOUT}.n_workers=1", environment=True)
    assert f"`{ROLLOUT}.n_workers=1` asks for 2 workers, which Ray starts" in said


def test_several_machines_without_a_cluster_are_told_how_to_give_one(problems):
    said = problems("trainer.nnodes=4", "trainer.seed=1", environment=True)
    for form in ("running Ray cluster", "torchrun --nnodes=N", "RAY_HEAD_ADDRESS=auto trainer.node_rank=0"):
        assert form in said
    assert "no cluster or head address is given" in said


@pytest.mark.parametrize("name", ["RAY_ADDRESS", "RAY_HEAD_ADDRESS"])
def test_several_machines_with_an_address_are_taken_whatever_this_one_has(problems, monkeypatch, name):
    monkeypatch.setattr("posttrain.cores.usable", lambda: 2)
    monkeypatch.setattr("posttrain.config.environment.gpus_present", lambda: 0)
    monkeypatch.setenv(name, "10.0.0.1:6379")
    for given in (["trainer.nnodes=2"], ["trainer.nnodes=2", "trainer.n_gpus_per_node=8"]):
        resolved = load_config([*given, "trainer.device=cpu"], environment=True)
        assert resolved.value("trainer.nnodes") == 2


@pytest.mark.parametrize("tree", [PPO, SFT])
def test_a_machine_has_a_number_below_their_count_and_all_but_the_first_need_an_address(monkeypatch, tree):
    two = ["trainer.nnodes=2", "trainer.device=cpu"]
    monkeypatch.setenv("RAY_HEAD_ADDRESS", "10.0.0.1:6379")
    assert load_config(two, environment=True, tree=tree).node_rank == 0
    assert load_config([*two, "trainer.node_rank=1"], environment=True, tree=tree).node_rank == 1
    for number in ("2", "-1"):
        with pytest.raises(ConfigError, match=rf"`trainer.node_rank={number}`: trainer.nnodes=2, and .* 0 to 1"):
            load_config([*two, f"trainer.node_rank={number}"], tree=tree)
    monkeypatch.setenv("RAY_HEAD_ADDRESS", "auto")
    assert load_config([*two, "trainer.node_rank=0"], environment=True, tree=tree).node_rank == 0
    with pytest.raises(ConfigError, match=r"node_rank=1` joins machine 0, and `auto` does not say where that is"):
        load_config([*two, "trainer.node_rank=1"], environment=True, tree=tree)


def test_more_processes_of_torchrun_than_this_machine_has_cores_name_its_own_flag(problems, monkeypatch):
    monkeypatch.setattr("posttrain.cores.usable", lambda: 2)
    monkeypatch.setattr("posttrain.config.environment.gpus_present", lambda: 0)
    torchrun(monkeypatch, processes=8, here=8, rank=0)
    said = problems("algorithm.adv_estimator=grpo", environment=True)
    assert "asks for 8 workers" in said and "set --nproc_per_node to 2 or less" in said


def test_many_workers_on_a_machine_without_a_gpu_are_told_of_one_and_never_of_none(problems, monkeypatch):
    monkeypatch.setattr("posttrain.config.environment.gpus_present", lambda: 0)
    said = problems("trainer.device=cuda", "trainer.n_gpus_per_node=4", environment=True)
    assert "this machine has 0 GPU(s)" in said and "set trainer.n_gpus_per_node to 1 or less" in said
    assert "asks for" not in problems("trainer.device=cuda", environment=True)


def test_module_and_command_start_the_same_program():
    """`--cfg job` of the module and of `posttrain train` give the same tree for the same keys."""
    keys = ["preset=embedded", "trainer.seed=5", "--cfg", "job"]
    module = [sys.executable, "-m", "posttrain.trainer.main_ppo", *keys]
    command = [sys.executable, "-m", "posttrain.cli", "train", *keys]
    first, second = (
        subprocess.run(line, capture_output=True, text=True, check=True).stdout for line in (module, command)
    )
    assert first == second and "seed: 5" in first
