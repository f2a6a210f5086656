"""The base of every settings class: attribute access for our code, mapping access for code written for OmegaConf."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass
class Section:
    """One section of the configuration tree; subclasses are dataclasses that hold the only defaults."""

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def __contains__(self, name: object) -> bool:
        return any(field.name == name for field in dataclasses.fields(self))

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in dataclasses.fields(self))

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts and lists, in the order of the fields."""
        return dataclasses.asdict(self)
