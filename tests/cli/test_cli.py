"""The `posttrain` command: its verbs, its exit statuses, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain import __version__, cli, launch
from posttrain.config import ConfigError, Problem

HEAVY = ("torch", "transformers", "hydra", "omegaconf", "numpy", "pyarrow", "ray")
REPORT = f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["version"],
        ["train", "--help"],
        ["config", "--help"],
        ["export", "--help"],
        ["data", "--help"],
        ["generate", "--help"],
        ["eval", "--help"],
        ["eval", "compare", "--help"],
        ["bench", "--help"],
        ["tool", "try", "--help"],
    ],
    ids=" ".join,
)
def test_help_imports_nothing_heavy(args: list[str]):
    code = f"import sys\nfrom posttrain.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n{REPORT}"
    ran = python(code, *args)
    assert ran.stderr.strip() == "[]", ran.stderr
    assert ran.stdout.strip()


def test_import_posttrain_imports_nothing_heavy():
    assert python(f"import sys, posttrain\n{REPORT}").stderr.strip() == "[]"


def test_the_command_lists_its_verbs(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(
        f"  {verb} " in shown
        for verb in ("train", "config", "explain", "reward", "export", "data", "generate", "eval", "version")
    )
    assert cli.main([]) == 2
    assert cli.main(["version"]) == 0 and capsys.readouterr().out.endswith(f"posttrain {__version__}\n")


@pytest.mark.parametrize(("verb", "near"), [("trian", "train"), ("expalin", "explain"), ("confg", "config")])
def test_an_unknown_verb_gets_the_nearest(verb: str, near: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main([verb]) == 2
    assert f"`posttrain {near}`" in capsys.readouterr().err


def test_a_users_mistake_is_printed_without_traceback_and_ends_with_2(monkeypatch, capsys):
    def wrong(args):
        raise ConfigError([Problem("The cow is blue.", "command line", "paint it")])

    monkeypatch.setitem(cli.VERBS, "train", (wrong, ""))
    assert cli.main(["train"]) == 2
    captured = capsys.readouterr().err
    assert "The cow is blue." in captured and "Traceback" not in captured


def test_ctrl_c_ends_with_130_and_our_own_mistakes_keep_their_traceback(monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    def broken(args):
        raise ZeroDivisionError

    monkeypatch.setitem(cli.VERBS, "train", (interrupted, ""))
    monkeypatch.setitem(cli.VERBS, "data", (broken, ""))
    assert cli.main(["train"]) == 130
    with pytest.raises(ZeroDivisionError):
        cli.main(["data"])


def test_config_prints_value_source_and_spelling(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["config", "algorithm.name=grpo", "actor_rollout_ref.rollout.n=6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    line = next(line for line in lines if line.startswith("algorithm.adv_estimator:"))
    assert "grpo" in line and "command line" in line and "algorithm.name" in line
    assert any(line.startswith("actor_rollout_ref.rollout.n: 6") for line in lines)


def test_config_alone_prints_every_key_at_its_default(capsys: pytest.CaptureFixture[str]):
    from posttrain.config.root import PPOConfig
    from posttrain.config.schema import leaves

    assert cli.main(["config"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{key}: " in shown for key in leaves(PPOConfig))
    assert "\ndata.train_batch_size: 1024    # default\n" in shown


def test_config_reads_train_shs_flags_and_variables(monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("LEARNING_RATE", "3e-6")
    assert cli.main(["config", "train", "--model", "org/m"]) == 0
    shown = capsys.readouterr().out
    assert "actor_rollout_ref.actor.optim.lr: 3.0e-06    # environment variable LEARNING_RATE" in shown
    assert "data.train_batch_size: 256    # default of train.sh" in shown
    assert cli.main(["config", "--rollout_n", "4"]) == 0
    assert "actor_rollout_ref.rollout.n: 4    # flag --rollout_n" in capsys.readouterr().out
    assert cli.main(["config", "algorithm.adv_estimator=grpo"]) == 0  # main_ppo reads no variables
    assert "actor_rollout_ref.actor.optim.lr: 1.0e-06    # default" in capsys.readouterr().out


def test_train_cfg_job_shows_the_settings_and_does_not_train(capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--rollout_n", "3", "--cfg", "job"]) == 0
    assert "adv_estimator: grpo" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_train_hands_the_resolved_settings_to_the_trainer(monkeypatch):
    main_ppo = pytest.importorskip("posttrain.trainer.main_ppo")
    seen = []
    monkeypatch.setattr(main_ppo, "run_ppo", seen.append)
    assert cli.main(["train", "--rollout_n", "3", "trainer.seed=9"]) == 0
    assert seen[0].config.actor_rollout_ref.rollout.n == 3 and seen[0].config.trainer.seed == 9


CUT_SHORT = [
    pytest.param([" "], "comment after `\\` cut this command short", id="M_01_blank_argument"),
    pytest.param(["#", "my", "comment"], "a comment inside a command", id="M_04_words_of_a_comment"),
    pytest.param(["algorithm.adv_estimator"], "key=value", id="M_04_no_equals"),
]


@pytest.mark.parametrize(("extra", "part"), CUT_SHORT)
def test_a_command_cut_short_by_a_comment_is_answered(extra: list[str], part: str, monkeypatch, capsys):
    main_ppo = pytest.importorskip("posttrain.trainer.main_ppo")
    monkeypatch.setattr(sys, "argv", ["main_ppo", "algorithm.adv_estimator=grpo", *extra])
    assert main_ppo.cli() == 2
    assert part in capsys.readouterr().err
    assert cli.main(["train", "--lr", "1e-6", *extra]) == 2
    assert part in capsys.readouterr().err


def test_main_ppo_without_arguments_says_what_it_needs():
    ran = subprocess.run(
        [sys.executable, "-m", "posttrain.trainer.main_ppo"], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 2
    assert "actor_rollout_ref.model.path" in ran.stderr and "an empty line inside a continued command" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_data_arithmetic_writes_files_that_train_files_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["data", "arithmetic", str(tmp_path / "sums"), "--max-operand", "12"]) == 0
    rows = json.loads((tmp_path / "sums" / "train.json").read_text())
    assert {"prompt", "ground_truth", "data_source"} <= set(rows[0])
    assert f"train.json: {len(rows)} rows" in capsys.readouterr().out


def test_explain_prints_a_page_and_answers_an_unknown_name(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["explain", "grpo"]) == 0
    assert "2402.03300" in capsys.readouterr().out
    assert cli.main(["explain", "grpoo"]) == 2
    assert "grpo" in capsys.readouterr().err


def test_config_shows_the_settings_of_the_supervised_trainers(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["config", "sft", "training.learning_rate=2e-5", "data.train_files=x.json"]) == 0
    shown = capsys.readouterr().out
    assert "optim.lr: 2.0e-05    # command line, written `training.learning_rate`" in shown
    assert "data.multiturn.enable: null    # default" in shown and "actor_rollout_ref" not in shown
    for word in ("reward-model", "reward_model"):
        assert cli.main(["config", word]) == 0
        shown = capsys.readouterr().out
        assert "loss.center_coef: 0.0    # default" in shown and "model.path: null    # default" in shown
    assert cli.main(["config", "sft", "--help"]) == 0
    assert "posttrain config reward-model" in capsys.readouterr().out
    assert cli.main(["config", "sft", "optim.lrr=1"]) == 2
    assert "did you mean `optim.lr`" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["config", "plan"])
def test_a_first_word_that_names_no_program_is_answered_with_those_that_do(verb, capsys: pytest.CaptureFixture[str]):
    assert cli.main([verb, "grpo", "data.train_files=x.json"]) == 2
    assert f"posttrain {verb} grpo: the first word may be `train` (train.sh), `sft` or" in capsys.readouterr().err


def test_a_supervised_key_given_to_RL_is_answered_with_its_program(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["config", "data.multiturn.enable=true", "optim.lr=1"]) == 2
    said = capsys.readouterr().err
    assert "it is a key of `posttrain sft`, not of this program" in said
    assert "did you mean `actor_rollout_ref.actor.optim.lr` or `critic.optim.lr`?" in said


def test_export_of_something_else_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["export", str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    assert "nothing does not exist. Name a folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert cli.main(["export", str(tmp_path / "empty"), str(tmp_path / "out")]) == 2
    assert "empty is no whole checkpoint: it has no manifest.json" in (said := capsys.readouterr().err)
    assert "resume" not in said
    (tmp_path / "run" / "checkpoints" / "global_step_12").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("")
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "is the folder of a run; name one of its checkpoints, such as" in said and "global_step_12." in said
    assert "damaged" not in said


def test_the_modules_own_entry_is_the_command():
    ran = subprocess.run([sys.executable, "-m", "posttrain", "version"], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, f"posttrain {__version__}\n")


def test_every_flag_has_one_meaning():
    keys = [setting.key for setting in launch.SETTINGS]
    assert len(keys) == len(set(keys)) == len(launch.BY_FLAG)
