"""Settings as verl's code reads them: attributes, `config["name"]`, `config.get("name")`, `config.name = value`."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar


class NoSetting(KeyError, AttributeError):
    """A setting that is not there: an AttributeError in verl 0.9, a KeyError in later versions."""


class BaseConfig(Mapping[str, Any]):
    """A section of settings. Values come from the keywords, then from posttrain's own section."""

    _section: ClassVar[Any] = None
    """posttrain's class of the same section: the defaults."""
    _defaults: ClassVar[Mapping[str, Any]] = {}
    """Settings that only verl has."""
    _mutable_fields: ClassVar[frozenset[str] | None] = None
    """Settings that can be set again; None: all."""

    if TYPE_CHECKING:  # settings are attributes that no class declares

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, /, **values: Any) -> None:
        self._fill(values)
        self._check(values)
        self.__dict__["_is_made"] = True

    def _fill(self, values: Mapping[str, Any]) -> None:
        own = self._section() if self._section is not None else None
        defaults = {} if own is None else {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
        self.__dict__.update({**defaults, **copy.deepcopy(dict(self._defaults)), **values})

    def __setattr__(self, name: str, value: Any) -> None:
        frozen = self._mutable_fields is not None and self.__dict__.get("_is_made") and name in self.__dict__
        if frozen and name not in (self._mutable_fields or ()):
            raise dataclasses.FrozenInstanceError(f"Field '{name}' is frozen and cannot be modified")
        super().__setattr__(name, value)

    def _check(self, given: Mapping[str, Any]) -> None:
        """Raise for values that verl's own class rejects."""

    @classmethod
    def of(cls, section: Any, **values: Any) -> Any:
        """A view of a section as it is now."""
        if isinstance(section, cls) and not values:
            return section
        names = list(section) if isinstance(section, Mapping) else [f.name for f in dataclasses.fields(section)]
        made = cls.__new__(cls)
        made._fill({name: section[name] for name in names} | values)  # checked when the run was configured
        return made

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise NoSetting(name) from None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and hasattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.__dict__ if not name.startswith("_"))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.items())})"
