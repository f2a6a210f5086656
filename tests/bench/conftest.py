"""A tiny model and a cache of its own for the bench."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.models.embedded import write_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    return write_model(folder, **shape)


@pytest.fixture(autouse=True)
def _bench_has_its_own_cache(own_cache: Path) -> None:
    """What the bench keeps (models, environments of peers) must not come from another run."""
