"""Small runs that the tests of the seed documents share; a run with the same settings is made once."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from seen import DOCUMENT_3, ROOT, Seen, chdir, parity_reward, see, settings

Run = Callable[..., Seen]


@pytest.fixture(scope="session")
def brief_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with half of its tokens as end tokens: responses stay short whatever their limit is."""
    folder = tmp_path_factory.mktemp("models") / "brief"
    shutil.copytree(tiny_model, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": list(range(130))}))
    return folder


@pytest.fixture(scope="session")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small sums as parquet files."""
    from posttrain.data.recipes.arithmetic import arithmetic_rows, write_files

    return write_files(tmp_path_factory.mktemp("parquet"), arithmetic_rows(max_operand=8), suffix="parquet")


@pytest.fixture(scope="session")
def four_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JSON array of objects, as document 3 writes it."""
    path = tmp_path_factory.mktemp("data") / "train.json"
    path.write_text(json.dumps(DOCUMENT_3, ensure_ascii=False))
    return path


@pytest.fixture(scope="session")
def small(tiny_model: Path, parquet: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`small(key__of__a_setting=value)`: the run of runs.py with 5 responses per prompt and these settings."""
    made: dict[str, Seen] = {}

    def run(*, reward: Any = parity_reward, **more: Any) -> Seen:
        import posttrain

        key = repr((reward, sorted(more.items())))
        if key not in made:
            wanted = {"actor_rollout_ref__rollout__n": 5, **more}
            chosen = settings(tiny_model, parquet, tmp_path_factory.mktemp("run"), **wanted)
            made[key] = see(lambda: posttrain.train(chosen, reward=reward))
        return made[key]

    return run


@pytest.fixture(scope="session")
def grpo(small: Run, parquet: dict[str, Path]) -> Seen:
    """GRPO as document 0 has it: KL loss, validation, two mini-batches per step, a checkpoint with a model."""
    return small(
        actor_rollout_ref__actor__use_kl_loss=True,
        actor_rollout_ref__actor__ppo_mini_batch_size=2,
        data__val_files=str(parquet["test"]),
        trainer__export_hf="last",
    )


@pytest.fixture(scope="session")
def gae(small: Run) -> Seen:
    return small(algorithm__adv_estimator="gae")


@pytest.fixture(scope="session")
def train_sh(brief_model: Path, four_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`train_sh(*args, **environment)`: what ./train.sh does after its shell part, with the brief model."""
    from posttrain import cli

    made: dict[str, Seen] = {}

    def run(*args: str, **environment: str) -> Seen:
        key = repr((args, sorted(environment.items())))
        if key not in made:
            given = [f"--train-sh={ROOT}", "--model", str(brief_model), "--train_files", str(four_rows), *args]
            given += ["data.max_prompt_length=64", "reward.num_workers=1", "trainer.device=cpu"]
            with chdir(tmp_path_factory.mktemp("work"), **{"MAX_RESPONSE_LENGTH": "16", **environment}):
                made[key] = see(lambda: cli.train(given))
                made[key].trainer.run.path = made[key].path.resolve()
        return made[key]

    return run


@pytest.fixture
def main_ppo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`main_ppo(*args)`: `python -m posttrain.trainer.main_ppo args`, in this process and a folder of its own."""
    from posttrain.trainer import main_ppo

    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> Seen:
        monkeypatch.setattr(sys, "argv", ["main_ppo", *args])
        return see(main_ppo.cli)

    return run
