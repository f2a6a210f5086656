"""train.sh's flags, environment variables and defaults, up to the resolved settings."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from posttrain import launch
from posttrain.config import ConfigError, Resolved
from posttrain.launch import help_text

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model.path"
N = "actor_rollout_ref.rollout.n"


def resolve(*args: str, env: dict[str, str] | None = None, train_sh: Path | None = None) -> Resolved:
    return _resolve(args, tuple((env or {}).items()), train_sh, Path.cwd())


@functools.cache
def _resolve(args: tuple[str, ...], env: tuple[tuple[str, str], ...], train_sh: Path | None, _: Path) -> Resolved:
    request = launch.parse(args)
    request.train_sh = train_sh
    return launch.resolve(request, dict(env))


def value(resolved: Resolved, key: str) -> Any:
    node: Any = resolved.config
    for name in key.split("."):
        node = getattr(node, name)
    return node


def has(resolved: Resolved, key: str, expected: Any, source: str) -> None:
    assert value(resolved, key) == expected
    assert resolved.sources[key].startswith(source), resolved.sources[key]


def test_model_rollout_n_and_epochs_together():
    resolved = resolve("--model", "Qwen/Qwen2.5-7B", "--rollout_n", "8", "--epochs", "20")
    has(resolved, MODEL, "Qwen/Qwen2.5-7B", "flag --model")
    has(resolved, N, 8, "flag --rollout_n")
    has(resolved, "trainer.total_epochs", 20, "flag --epochs")


FLAGS: dict[str, tuple[str, str, Any]] = {
    "S3_11": ("--model", "org/m", "org/m"),
    "S3_12": ("--rollout_n", "7", 7),
    "S3_13": ("--epochs", "2", 2),
    "S3_14": ("--reward_func", "./my_reward.py", "./my_reward.py"),
    "S3_61": ("--n_gpus", "8", 8),
    "S3_65": ("--lr", "5e-7", 5e-7),
    "train_files": ("--train_files", "a.json,b c.json", ["a.json", "b c.json"]),
    "val_files": ("--val_files", "v.json", "v.json"),
    "train_batch_size": ("--train_batch_size", "64", 64),
    "max_response_length": ("--max_response_length", "77", 77),
    "norm_adv_by_std": ("--norm_adv_by_std", "False", False),
    "use_kl_loss": ("--use_kl_loss", "true", True),
    "kl_loss_type": ("--kl_loss_type", "mse", "mse"),
}


@pytest.mark.parametrize("row", FLAGS)
def test_a_flag_sets_its_key(row: str):
    flag, _, expected = FLAGS[row]
    key = launch.BY_FLAG[flag.removeprefix("--")].key
    with_model = [part for name, given, _ in FLAGS.values() for part in (name, given)]
    has(resolve(*with_model), key, expected, f"flag {flag}")
    if flag != "--model":
        has(resolve(*with_model[2:]), key, expected, f"flag {flag}")


@pytest.mark.parametrize("written", [["--rollout_n", "8"], ["--rollout_n=8"], ["--rollout-n", "8"], ["--rollout-n=8"]])
def test_a_flag_can_be_written_with_blank_or_equals_underscore_or_dash(written: list[str]):
    request = launch.parse([*written, "a.b=1", "--config-name", "mine", "--cfg=job"])
    assert request.flags == {"rollout_n": "8"}
    assert request.rest == ["a.b=1", "--config-name", "mine", "--cfg=job"]


VARIABLES: dict[str, tuple[str, str, str, Any, Any]] = {
    "S3_21": ("ROLLOUT_N", "3", N, 3, 5),
    "S3_22": ("NORM_ADV_BY_STD", "false", "algorithm.norm_adv_by_std_in_grpo", False, True),
    "S3_23": ("USE_KL_LOSS", "false", f"{ACTOR}.use_kl_loss", False, True),
    "S3_24": ("KL_LOSS_COEF", "0.05", f"{ACTOR}.kl_loss_coef", 0.05, 0.001),
    "S3_25": ("KL_LOSS_TYPE", "mse", f"{ACTOR}.kl_loss_type", "mse", "low_var_kl"),
    "S3_31": ("TRAIN_BATCH_SIZE", "32", "data.train_batch_size", 32, 256),
    "S3_32": ("LEARNING_RATE", "2e-5", f"{ACTOR}.optim.lr", 2e-5, 1e-6),
    "S3_33": ("TOTAL_EPOCHS", "4", "trainer.total_epochs", 4, 15),
    "S3_34": ("MAX_RESPONSE_LENGTH", "99", "data.max_response_length", 99, 1024),
}


@pytest.mark.parametrize("row", VARIABLES)
def test_a_variable_sets_its_key_and_unset_or_empty_gives_document_3s_default(row: str):
    name, _, key, expected, default = VARIABLES[row]
    everything = {variable: text for variable, text, *_ in VARIABLES.values()}
    has(resolve("--model", "org/m", env=everything), key, expected, f"environment variable {name}")
    has(resolve(env=everything), key, expected, f"environment variable {name}")
    has(resolve("--model", "org/m"), key, default, launch.DEFAULT)
    has(resolve("--model", "org/m", env=dict.fromkeys(everything, " ")), key, default, launch.DEFAULT)


def test_used_variables_are_said_at_the_start():
    assert any("LEARNING_RATE=2e-5" in note for note in resolve(env={"LEARNING_RATE": "2e-5"}).notes)


def test_key_wins_over_flag_over_variable_over_default():
    key, env = f"{ACTOR}.optim.lr", {"LEARNING_RATE": "1e-3"}
    args = ["--model", "m"]
    has(resolve(*args), key, 1e-6, launch.DEFAULT)
    has(resolve(*args, env=env), key, 1e-3, "environment variable LEARNING_RATE")
    has(resolve(*args, "--lr", "1e-4", env=env), key, 1e-4, "flag --lr")
    has(resolve(*args, f"{key}=1e-5", "--lr", "1e-4", env=env), key, 1e-5, "command line")


def test_holds_for_other_spellings_of_the_key_too():
    resolved = resolve(
        "--model", "m", "--lr", "1e-4", "actor.learning_rate=1e-5", "rollout.n=4", env={"ROLLOUT_N": "3"}
    )
    has(resolved, f"{ACTOR}.optim.lr", 1e-5, "command line")
    has(resolved, N, 4, "command line")


def test_without_a_model_the_embedded_task_has_its_own_values():
    from posttrain.config.choices import EMBEDDED

    resolved = resolve()
    for key, expected in EMBEDDED.items():
        assert value(resolved, key) == expected, key
    assert value(resolved, N) == 5


@pytest.mark.parametrize("args", [["--model", "m"], [f"{MODEL}=m"], ["actor.model_name=m"]])
def test_with_a_model_in_any_spelling_document_3s_values_hold(args: list[str]):
    resolved = resolve(*args)
    has(resolved, "algorithm.adv_estimator", "grpo", launch.DEFAULT)
    assert value(resolved, MODEL) == "m"
    got = [value(resolved, k) for k in (N, f"{ACTOR}.use_kl_loss", "data.train_batch_size", "trainer.total_epochs")]
    assert got == [5, True, 256, 15]


def test_a_users_file_wins_over_train_shs_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = "data:\n  train_batch_size: 48\nactor_rollout_ref:\n  model:\n    path: my/model\n"
    (tmp_path / "mine.yaml").write_text(file)
    monkeypatch.chdir(tmp_path)
    resolved = resolve("--config-name", "mine")
    has(resolved, "data.train_batch_size", 48, "mine.yaml")
    has(resolved, f"{ACTOR}.use_kl_loss", True, launch.DEFAULT)
    has(resolve("--config-name", "mine", env={"TRAIN_BATCH_SIZE": "12"}), "data.train_batch_size", 12, "environment")


def test_train_shs_defaults_do_not_count_as_set_by_the_user():
    resolved = resolve("--model", "m", "--lr", "1e-4")
    assert "data.train_batch_size" not in resolved.explicit
    assert {MODEL, f"{ACTOR}.optim.lr"} <= resolved.explicit
    assert not any("no effect" in note for note in resolve("--model", "m", env={"USE_KL_LOSS": "false"}).notes)


def test_epochs_asked_for_replace_the_embedded_tasks_number_of_steps():
    assert value(resolve(), "trainer.total_training_steps") is not None
    assert value(resolve("--epochs", "2"), "trainer.total_training_steps") is None
    assert value(resolve("--epochs", "2", "trainer.total_training_steps=7"), "trainer.total_training_steps") == 7


def test_a_kl_coefficient_switches_the_kl_loss_on_and_0_off():
    for args in ([], ["--model", "m"]):
        resolved = resolve(*args, "--kl_coef", "0.01")
        has(resolved, f"{ACTOR}.kl_loss_coef", 0.01, "flag --kl_coef")
        has(resolved, f"{ACTOR}.use_kl_loss", True, "flag --kl_coef")
        assert value(resolve(*args, "--kl_coef", "0"), f"{ACTOR}.use_kl_loss") is False
    both = {"USE_KL_LOSS": "false", "KL_LOSS_COEF": "0.001"}
    assert value(resolve(env=both), f"{ACTOR}.use_kl_loss") is False
    assert value(resolve("--kl_coef", "0.01", env=both), f"{ACTOR}.use_kl_loss") is True
    assert value(resolve("--kl_coef", "0.01", f"{ACTOR}.use_kl_loss=False"), f"{ACTOR}.use_kl_loss") is False


def test_kl_in_the_reward_replaces_train_shs_kl_loss():
    resolved = resolve("--model", "m", "algorithm.use_kl_in_reward=True")
    assert value(resolved, f"{ACTOR}.use_kl_loss") is False


def test_the_algorithm_group_wins_over_train_shs_defaults():
    resolved = resolve("--model", "m", "algorithm=drgrpo")
    assert value(resolved, f"{ACTOR}.use_kl_loss") is False
    assert value(resolved, "algorithm.norm_adv_by_std_in_grpo") is False


def test_the_reward_beside_train_sh_serves_unless_another_is_named(tmp_path: Path):
    (tmp_path / "reward_func.py").write_text("def compute_score(data_source, solution_str, ground_truth): return 0.0\n")
    key, path = "custom_reward_function.path", str(tmp_path / "reward_func.py")
    has(resolve(train_sh=tmp_path), key, path, launch.DEFAULT)
    has(resolve("--model", "m", train_sh=tmp_path), key, path, launch.DEFAULT)
    has(resolve("--reward_func", "./mine.py", train_sh=tmp_path), key, "./mine.py", "flag --reward_func")
    has(resolve(f"{key}=k.py", train_sh=tmp_path), key, "k.py", "command line")
    has(resolve("trainer.reward_fn.path=pkg.fn", train_sh=tmp_path), key, "pkg.fn", "command line")
    assert value(resolve(), key) is None


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--rollout_m", "3"], ["--rollout_m", "did you mean `--rollout_n`"]),
        (["--learning-rat=1"], ["--learning-rat"]),
        (["--data.train_files=x.json"], ["without dashes: data.train_files=x.json"]),
        (["--model"], ["`--model` has no value"]),
        (["--model", "--lr", "1e-4"], ["`--model` has no value"]),
        (["--lr="], ["`--lr` has no value"]),
        (["--modle", "x", "--epoch", "3"], ["--model`", "--epochs`"]),
    ],
)
def test_wrong_flags_are_answered_together_with_the_nearest(args: list[str], parts: list[str]):
    with pytest.raises(ConfigError) as caught:
        resolve(*args)
    for part in parts:
        assert part in str(caught.value)


def test_a_wrong_value_names_the_flag_or_variable_it_came_from():
    with pytest.raises(ConfigError, match="flag --rollout_n"):
        resolve("--rollout_n", "many")
    with pytest.raises(ConfigError, match="environment variable LEARNING_RATE"):
        resolve(env={"LEARNING_RATE": "fast"})
    with pytest.raises(ConfigError, match="flag --kl_coef"):
        resolve("--kl_coef", "some")


def test_an_unknown_key_gives_main_ppos_error():
    from posttrain.config import load_config

    argument = "actor_rollout_ref.rollout.temprature=1"
    with pytest.raises(ConfigError) as ours:
        resolve(argument)
    with pytest.raises(ConfigError) as main_ppos:
        load_config([argument])
    assert str(ours.value) == str(main_ppos.value)
    assert "actor_rollout_ref.rollout.temperature" in str(ours.value)


def test_help_prints_both_columns_for_every_row():
    from posttrain.config.choices import EMBEDDED

    lines = help_text({"ROLLOUT_N": "3"}).splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.startswith("  --")}
    assert set(rows) == {f"--{setting.flag}" for setting in launch.SETTINGS}
    for flag, variable, default in [
        ("train_batch_size", "TRAIN_BATCH_SIZE", "256"),
        ("lr", "LEARNING_RATE", "1e-6"),
        ("max_response_length", "MAX_RESPONSE_LENGTH", "1024"),
        ("rollout_n", "ROLLOUT_N", "5"),
    ]:
        embedded = str(EMBEDDED[launch.BY_FLAG[flag].key])
        assert rows[f"--{flag}"][:4] == [f"--{flag}", variable, default, embedded]
    assert "(now ROLLOUT_N=3)" in " ".join(rows["--rollout_n"])
