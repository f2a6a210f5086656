"""Packages that plug into a lower one by name: the lower one reads the name here, `posttrain/__init__.py` sets it."""

from __future__ import annotations

# The package with `dialect(program)`, what other systems call the settings: see `config/checked.py`.
dialect: str | None = None
# Modules with checks of settings that only their package understands: see `config/checked.py`.
checks: tuple[str, ...] = ()
