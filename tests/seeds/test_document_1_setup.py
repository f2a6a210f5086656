"""Documents 1 and 4, setting up: versions, an editable checkout, the hub's token, the light path, verl's keys."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import posttrain
from posttrain import cli
from posttrain.config import load_config

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_is_that_of_the_distribution(capsys):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = declared.get("version", posttrain.__version__)
    assert posttrain.__version__ == version
    assert cli.main(["version"]) == 0 and version in capsys.readouterr().out


@pytest.mark.slow
def test_a_checkout_is_installed_editable_and_an_edit_takes_effect_at_once(tmp_path):
    """`pip install -e .` in a copy, into an empty environment (what it needs is there already: nothing is fetched)."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "posttrain", tmp_path / "posttrain", ignore=shutil.ignore_patterns("__pycache__"))
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps", "-q"]
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}  # setuptools, which builds it
    done = subprocess.run(
        [*pip, "--no-build-isolation", "-e", "."], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    source = tmp_path / "posttrain" / "__init__.py"
    source.write_text(source.read_text() + '\nEDITED = "at once"\n')
    asks = "import posttrain; print(posttrain.EDITED, posttrain.__file__)"
    said = subprocess.run([python, "-I", "-c", asks], cwd="/", capture_output=True, text=True, check=True).stdout
    assert said.split() == ["at", "once", str(source)] and (tmp_path / "env" / "bin" / "posttrain").is_file()


def test_the_docs_name_the_light_path_on_one_device():
    index, page = (ROOT / "docs" / "README.md").read_text(), (ROOT / "docs" / "lora.md").read_text()
    assert "LoRA and QLoRA" in index and "nf4" in page


def test_every_key_of_verl_is_answered_and_grpo_needs_no_plug_in(monkeypatch, tmp_path):
    from posttrain.other_systems.verl.answers import all_answers

    monkeypatch.chdir(tmp_path)
    assert all(found is not None for _, _, found in all_answers())
    assert load_config(["algorithm.adv_estimator=grpo"]).value("actor_rollout_ref.model.external_lib") is None
    settings = (ROOT / "docs" / "settings.md").read_text()
    from posttrain.config.root import PPOConfig
    from posttrain.config.schema import leaves

    assert [key for key in leaves(PPOConfig) if f"`{key}`" not in settings] == []


def test_train_sh_without_an_argument_trains_the_embedded_model_on_groups_of_5(monkeypatch, tmp_path):
    from posttrain import launch

    monkeypatch.chdir(tmp_path)
    resolved = launch.resolve(launch.parse([]), {})
    assert resolved.value("actor_rollout_ref.rollout.n") == 5
    assert resolved.value("actor_rollout_ref.model.path") == resolved.value("data.train_files") == "embedded"


def test_the_default_run_writes_five_samples_of_each_prompt(monkeypatch, tmp_path, own_cache):
    """One step of it, with a tiny model in the embedded one's place (scripts/check_default_run.py makes all 200)."""
    from posttrain import cli
    from posttrain.data.recipes.arithmetic import arithmetic_rows, write_files
    from posttrain.models.embedded import write_model
    from posttrain.trainer.embedded import embedded_folder

    write_files(embedded_folder(), arithmetic_rows(max_operand=10))
    write_model(embedded_folder() / "model", hidden_size=32, intermediate_size=64)
    monkeypatch.chdir(tmp_path)
    brief = ["trainer.total_training_steps=1", "trainer.val_before_train=False", "tracking.samples_freq=1"]
    assert cli.train([f"--train-sh={ROOT}", "data.train_batch_size=20", *brief]) == 0
    [samples] = (tmp_path / "outputs").rglob("samples/step_1.parquet")
    uids = pq.read_table(samples).column("uid").to_pylist()
    assert len(uids) == 100 and {uids.count(uid) for uid in uids} == {5}
