"""Wrong configurations and what is said about them: what was wrong, where it was set, what to do."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from posttrain.algorithms import register_adv_est
from posttrain.config import ConfigError, load_config
from posttrain.rollout.engines import ENGINES

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
RM = ("reward_model.enable=True", "reward_model.model.path=a/b")
TEN = {
    "misspelt estimator": (
        ["algorithm.adv_estimator=gropo"],
        ["known: codapo, gae, ", " grpo, ", "did you mean `grpo`"],
    ),
    "misspelt key": ([f"{ROLLOUT}.temprature=1"], ["Unknown key", f"did you mean `{ROLLOUT}.temperature`"]),
    "wrong type": (["data.train_batch_size=many"], ["expected an integer, got 'many'", "command line"]),
    "wrong name": ([f"{ACTOR}.loss_agg_mode=mean"], ["is not known", "token-mean", "seq-mean-token-sum-norm"]),
    "out of range": ([f"{ACTOR}.optim.lr=-1"], [f"{ACTOR}.optim.lr=-1", "above 0"]),
    "group of one": (["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=1"], ["no group", "2 or more"]),
    "mini-batch above batch": (
        ["data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=16"],
        ["ppo_mini_batch_size=16", "train_batch_size=8"],
    ),
    "KL twice": (
        ["algorithm.use_kl_in_reward=True", f"{ACTOR}.use_kl_loss=True"],
        ["twice", "algorithm.allow_both_kl"],
    ),
    "missing file": (["data.train_files=nowhere.parquet"], ["nowhere.parquet does not exist", "data.train_files"]),
    "unbuilt engine": ([f"{ACTOR}.strategy=deepspeed"], ["fsdp2 shards the same state".replace("fsdp2", "`fsdp2`")]),
}


@pytest.mark.parametrize("name", list(TEN))
def test_a_wrong_configuration_is_answered(problems, name):
    args, parts = TEN[name]
    text = problems(*args, environment=True)
    for part in parts:
        assert part in text
    assert "where:" in text and "what to do:" in text


def test_all_problems_are_reported_together():
    args = [arg for name in TEN if name not in ("group of one", "misspelt estimator") for arg in TEN[name][0]]
    args = [arg for arg in args if not arg.startswith("data.train_batch_size=8")]
    with pytest.raises(ConfigError) as caught:
        load_config(args, environment=True)
    assert len(caught.value.problems) == 7
    assert str(caught.value).startswith("7 problems in the configuration")


def test_a_wrong_configuration_is_answered_in_under_two_seconds(tmp_path):
    code = "import sys; from posttrain.config import load_config; load_config(sys.argv[1:], environment=True)"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code, "data.train_files=nowhere.parquet", f"{ROLLOUT}.temprature=1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "nowhere.parquet" in done.stderr and "temperature" in done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_a_blank_argument_names_the_cut_command(problems):
    assert "a comment after `\\`" in problems("algorithm.adv_estimator=grpo", " ").lower()


def test_no_argument_at_all_says_what_is_needed(problems):
    text = problems()
    for part in ("No argument was given", "data.train_files", f"{MODEL}.path", "comment after"):
        assert part in text
    assert load_config({}).value(f"{MODEL}.path") == "embedded"


@pytest.mark.parametrize("args", [["#", "the", "estimator"], ["# text"], ["grpo"]])
def test_words_of_a_comment_get_the_same_message(problems, args):
    text = problems("trainer.seed=1", *args)
    assert "not settings (key=value)" in text and f"`{args[0]}`" in text and "comment" in text


def test_a_key_and_its_value_as_two_words_are_told_how_they_are_written(problems):
    text = problems("trainer.seed=1", "algorithm.adv_estimator", "grpo")
    assert "write `algorithm.adv_estimator=grpo`" in text and "comment" not in text


def test_without_model_and_data_the_embedded_ones_serve(load):
    resolved = load("algorithm.adv_estimator=grpo")
    assert resolved.value("data.train_files") == resolved.value(f"{MODEL}.path") == "embedded"
    note = next(note for note in resolved.notes if "embedded" in note)
    assert f"{MODEL}.path" in note and "data.train_files" in note
    assert resolved.value("data.max_response_length") == 4 and "data.max_response_length" not in resolved.explicit
    own = load(f"{MODEL}.path=a/b", "data.train_files=x.parquet")
    assert not any("embedded" in note for note in own.notes) and own.value("data.max_response_length") == 1024
    rows = load_config({}, provided=["data.train_files"])
    assert rows.value("data.train_files") is None


def test_the_default_estimator_is_pointed_to(load):
    assert any("gae" in note and "adv_estimator=grpo" in note for note in load("trainer.seed=1").notes)
    assert not any("adv_estimator=grpo" in note for note in load("algorithm.adv_estimator=gae").notes)


def test_a_name_registered_in_the_working_folder_loads_its_file(load, problems, write):
    core = "import posttrain.trainer.ppo.core_algos as core\n"
    code = core + "\n@core.register_adv_est('mine')\ndef f(**kwargs):\n    return None\n"
    args = ["algorithm.adv_estimator=mine"]
    assert f"{MODEL}.external_lib=FILE" in problems(*args)
    write("my_algorithm.py", code + "\n@core.register_policy_loss(name='my_loss')\ndef g(**kwargs): ...\n")
    write("other.py", "print('mine', 'register_adv_est')\n")
    resolved = load(*args, f"{ACTOR}.policy_loss_fn=my_loss")
    assert resolved.value(f"{MODEL}.external_lib") == "my_algorithm.py"
    assert any("my_algorithm.py registers" in note for note in resolved.notes)
    assert load(*args, f"{MODEL}.external_lib=elsewhere").value(f"{MODEL}.external_lib") == "elsewhere"
    write("second.py", code)
    assert "my_algorithm.py, second.py" in problems(*args)


@pytest.mark.parametrize("given", [[f"{MODEL}.external_lib=mine.py"], [f"{MODEL}.external_lib=mine"], []])
def test_a_file_that_fails_to_import_is_named_with_its_error_and_line(problems, write, given, monkeypatch):
    """Not its settings: which ones it would declare cannot be known."""
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    write("mine.py", "import posttrain\n\n1 / 0\n\n@core.register_adv_est('mine')\ndef f(**kwargs): ...\n")
    text = problems("algorithm.adv_estimator=mine", "algorithm.own_setting=3", *given)
    assert "1 problem in the configuration" in text and "mine.py, line 3: ZeroDivisionError: division by zero." in text
    assert f"where: {'command line' if given else 'found in the working folder'}" in text


def test_a_rollout_engine_of_the_users_own_is_named_as_any_other_and_an_unknown_one_is_refused(load, problems, write):
    refused = problems(f"{ROLLOUT}.name=mine")
    assert "unknown rollout engine; known: native, hf, vllm, sglang, server." in refused
    assert '@register_engine("mine")' in refused
    assert "did you mean `native`?" in problems(f"{ROLLOUT}.name=natve")
    assert "cannot be used" in problems(f"{ROLLOUT}.name=trtllm")
    ENGINES["mine"] = lambda order: ""
    known = load(f"{ROLLOUT}.name=mine")
    assert known.value(f"{ROLLOUT}.name") == "mine" and known.value(f"{MODEL}.external_lib") is None
    del ENGINES["mine"]
    write("my_engine.py", "import engines\n\n@engines.register_engine('mine')\ndef make(order): ...\n")
    assert load(f"{ROLLOUT}.name=mine").value(f"{MODEL}.external_lib") == "my_engine.py"


def test_a_weight_transport_of_the_users_own_is_named_as_any_other_and_an_unknown_one_is_refused(load, problems, write):
    key = f"{ROLLOUT}.weight_sync"
    refused = problems(f"{key}=golo")
    assert f"`{key}=golo`: unknown weight transport; known: auto, ray, ipc, nccl, gloo." in refused
    assert "did you mean `gloo`?" in refused and '@register_transport("golo")' in refused
    assert load(f"{key}=golo", f"{MODEL}.external_lib=mine").value(key) == "golo"  # which may register it
    write("my_transport.py", "import transports\n\n@transports.register_transport('golo')\nclass Mine: ...\n")
    assert load(f"{key}=golo").value(f"{MODEL}.external_lib") == "my_transport.py"


def test_a_name_registered_in_this_process_is_known(load):
    register_adv_est("mine")(lambda **given: None)
    assert load("algorithm.adv_estimator=mine").value("algorithm.adv_estimator") == "mine"


def test_a_staleness_below_0_is_one_problem_and_not_said_to_generate_while_it_trains(problems):
    text = problems("trainer.seed=1", "trainer.max_staleness=-1")
    assert text.startswith("1 problem in") and "`trainer.max_staleness=-1` is out of range" in text


def test_one_step_off_is_a_staleness_of_1(load):
    resolved = load("trainer.seed=1", "trainer.one_step_off=True", f"{ROLLOUT}.n_workers=1")
    assert resolved.value("trainer.max_staleness") == 1


def test_both_kl_terms_only_if_it_is_meant(load, problems):
    both = ["algorithm.use_kl_in_reward=True", f"{ACTOR}.use_kl_loss=True"]
    assert "algorithm.allow_both_kl=True" in problems(*both)
    assert load(*both, "algorithm.allow_both_kl=True").value("algorithm.allow_both_kl") is True
    for one in both:
        load("algorithm.adv_estimator=grpo", one)


def test_a_warm_up_over_all_steps_is_noted(load):
    keys = ["algorithm.adv_estimator=gae", "trainer.critic_warmup=10"]
    assert any("covers all 5 steps" in note for note in load(*keys, "trainer.total_training_steps=5").notes)
    assert not any("covers all" in note for note in load(*keys, "trainer.total_training_steps=50").notes)


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--multirun", "trainer.seed=1"], "sweeps are not offered"),
        (["trainer.seed=1,2"], "looks like a sweep"),
        (["~trainer.sede"], "did you mean `trainer.seed`"),
        (["hydra.run.dir=x"], "Hydra's run folder"),
        (["--lr", "trainer.seed=1"], "key=value"),
        (["--config-nam=x"], "--config-name"),
        (["--config-name=ppo_trainr"], "did you mean `ppo_trainer`"),
        (["algorithm=drgpo"], "did you mean `drgrpo`"),
        (["data=x"], "legacy_data"),
        (["trainer=5"], "is a section"),
        (["reward_model.enable=True"], "set reward_model.model.path"),
        (["reward.type=model"], "set reward_model.model.path"),
        (["reward.type=function", "reward_model.enable=True"], "keep one of them"),
        (["reward_model.weight=0", *RM], "would not count"),
        (["reward_model.truncation=both", *RM], "known: left, right, error"),
        (["reward_model.max_length=1", *RM], "2 or more"),
        (["reward_model.strategy=megatron", *RM], "reward_model.strategy=fsdp2"),
        (["critic.strategy=megatron"], "critic.strategy=fsdp2"),
        (["reward_model.reward_manager=mine"], "custom_reward_function.path=FILE"),
        (["reward_model.model.paht=x"], "did you mean `reward_model.model.path`"),
        ([f"{ACTOR}.strategy=fspd"], "did you mean `fsdp`? (one of your own needs @register_train_engine"),
        ([f"{ACTOR}.megatron_config.tensor_parallel_size=8"], "set actor_rollout_ref.actor.strategy=megatron"),
        ([f"{ROLLOUT}.kv_cache_gb=-1"], "must be above 0"),
        ([f"{ROLLOUT}.max_num_batched_tokens=0"], "must be 1 or more"),
        ([f"{ROLLOUT}.multi_turn=True"], "there is no tool that the model could call"),
        ([f"{ROLLOUT}.multi_turn=True", f"{ROLLOUT}.agent.on_all_machines=False"], "there is no tool that the"),
        (["training.learning_rate=2e-5"], f"{ACTOR}.optim.lr"),
        pytest.param(["trainer.device=npu"], "torch_npu", id="S2-20"),
        (["trainer.logger=[wandbb]"], "did you mean `wandb`"),
        (["trainer.seed=null"], "got null"),
        (["trainer.resume_mode=resume_path"], "trainer.resume_from_path"),
        (["data.train_files=[a.json,b.json]", "data.train_weights=[1]"], "1 weights for 2"),
        (["data.train_files=$NOT_SET_ANYWHERE/x.parquet"], "NOT_SET_ANYWHERE"),
        (["trainer.project_name=${no.such_key}"], "cannot be resolved"),
        (
            [f"{ROLLOUT}.pipeline_model_parallel_size=2", "trainer.n_gpus_per_node=2"],
            "an engine `native` cannot be cut into stages by its layers",
        ),
    ],
)
def test_a_mistake_is_answered_with(problems, args, part):
    assert part in problems(*args)


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["data.train_files=$HOME/data/gsm8k/train.parquet"], "posttrain data gsm8k"),
        ([f"{ROLLOUT}.name=sglang"], "pip install --no-deps sglang"),
        ([f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.tensor_model_parallel_size=2"], "over several devices is not built"),
        ([f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=2"], "does not divide the 1 x 1 = 1"),
        (["trainer.n_gpus_per_node=8"], "asks for 8 workers"),
        (["trainer.nnodes=4"], "RAY_HEAD_ADDRESS"),
        ([f"{ROLLOUT}.tensor_model_parallel_size=2"], "does not divide the 1 x 1 = 1"),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.name=hf", "trainer.n_gpus_per_node=2"],
            "an engine `hf` cannot be held by several workers",
        ),
        ([f"{MODEL}.path=./nowhere"], "./nowhere does not exist"),
        (["custom_reward_function.path=missing.py"], "missing.py does not exist"),
        (["data.train_files=."], ". is a folder, not a file"),
        (["trainer.default_local_dir=taken/runs"], "taken is no folder"),
    ],
)
def test_the_machine_is_checked_only_when_asked(load, problems, write, monkeypatch, args, part):
    monkeypatch.setenv("HOME", "/nonexistent-home")
    write("taken", "a file where a folder should be")
    load("trainer.seed=1", *args)
    assert part in problems("trainer.seed=1", *args, environment=True)


def test_yaml_that_does_not_parse_names_the_file(problems, write):
    write("broken.yaml", "algorithm: {adv_estimator: grpo\n")
    assert "broken.yaml" in problems("--config-path=.", "--config-name=broken")
    write("list.yaml", "- a\n- b\n")
    assert "list.yaml" in problems("--config-path=.", "--config-name=list")
