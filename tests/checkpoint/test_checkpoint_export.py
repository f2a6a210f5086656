"""The Hugging Face folder of a checkpoint comes out whole, or an error says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.checkpoint import CheckpointError, CheckpointManager
from posttrain.checkpoint.folders import export


def model(folder: Path) -> None:
    (folder / "huggingface" / "sub").mkdir(parents=True)
    (folder / "huggingface" / "config.json").write_text("{}")
    (folder / "huggingface" / "sub" / "x").write_text("y")


def test_listed_files_are_copied(tmp_path):
    path = CheckpointManager(tmp_path).save(1, tensors={}, state={}, rng={}, extra=model)
    (path / "huggingface" / "stranger.py").write_text("")
    out = export(path, tmp_path / "out")
    assert sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()) == ["config.json", "sub/x"]
    with pytest.raises(CheckpointError, match="is not empty"):
        export(path, out)


def test_checkpoint_without_a_model_or_with_damage_is_refused(tmp_path):
    path = CheckpointManager(tmp_path).save(1, tensors={}, state={}, rng={})
    with pytest.raises(CheckpointError, match=r"holds no Hugging Face model.*trainer\.export_hf=all"):
        export(path, tmp_path / "out")
    (path / "state.json").write_text("")
    with pytest.raises(CheckpointError, match=r"damaged.*state\.json"):
        export(path, tmp_path / "out")
