"""Documents 1 and 4, setting up: versions, an editable checkout, the hub's token, the light path, verl's keys."""

from __future__ import annotations

import tomllib
from pathlib import Path

import posttrain
from posttrain import cli
from posttrain.config import load_config
from posttrain.config.show import show

ROOT = Path(__file__).resolve().parents[2]


def test_S1_09_the_version_is_that_of_the_distribution(capsys):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = declared.get("version", posttrain.__version__)
    assert posttrain.__version__ == version
    assert cli.main(["version"]) == 0 and version in capsys.readouterr().out


def test_S1_08_what_runs_is_the_checkout_itself():
    assert Path(posttrain.__file__).resolve().is_relative_to(ROOT)


def test_S4_103_the_hubs_token_is_read_from_the_environment_and_never_shown(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_never_to_be_seen")
    resolved = load_config(["algorithm=grpo", "custom_reward_function.path=r.py", "trainer.project_name=$HF_TOKEN_NOT"])
    assert "hf_never_to_be_seen" not in resolved.to_yaml() + show(resolved)


def test_S1_51_the_docs_name_the_light_path_on_one_device():
    index, page = (ROOT / "docs" / "README.md").read_text(), (ROOT / "docs" / "lora.md").read_text()
    assert "LoRA and QLoRA" in index and "nf4" in page


def test_S1_54_S1_03_every_key_of_verl_is_answered_and_grpo_needs_no_plug_in(monkeypatch, tmp_path):
    from posttrain.config.verl.answers import all_answers

    monkeypatch.chdir(tmp_path)
    assert all(found is not None for _, _, found in all_answers())
    assert load_config(["algorithm.adv_estimator=grpo"]).value("actor_rollout_ref.model.external_lib") is None
    settings = (ROOT / "docs" / "settings.md").read_text()
    from posttrain.config.schema import leaves

    assert [key for key in leaves() if f"`{key}`" not in settings] == []


def test_S3_09_train_sh_without_an_argument_trains_the_embedded_model_on_groups_of_5(monkeypatch, tmp_path):
    from posttrain import launch

    monkeypatch.chdir(tmp_path)
    resolved = launch.resolve(launch.parse([]), {})
    assert resolved.value("actor_rollout_ref.rollout.n") == 5
    assert resolved.value("actor_rollout_ref.model.path") == resolved.value("data.train_files") == "embedded"
