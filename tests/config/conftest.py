"""`load`: load_config in an empty working folder; `write` puts a file there; `problems` gives the text of a refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain.config import ConfigError, Resolved, load_config


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def load() -> Callable[..., Resolved]:
    def call(*args: str, **options: object) -> Resolved:
        return load_config(list(args), **options)  # type: ignore[arg-type]

    return call


@pytest.fixture
def problems() -> Callable[..., str]:
    def call(*args: str, **options: object) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(list(args), **options)  # type: ignore[arg-type]
        return str(caught.value)

    return call


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    def call(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return call
