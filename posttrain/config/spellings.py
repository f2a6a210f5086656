"""What the settings of a tree are called: canonical keys, other spellings of them, and the key that a typo meant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from posttrain.config.closest import closest, longer_or_shorter, same_key, slips
from posttrain.config.dialect import Dialect, dialect
from posttrain.config.schema import Leaf, Section, leaf_of, leaves, sections
from posttrain.config.values import NULLS
from posttrain.yaml_text import parse_yaml


@dataclass(frozen=True)
class FreeDict:
    """A setting that is a free dict, into which keys outside of it write, too: one that is given whole does not
    replace what these say."""

    switch: str = ""
    """`KEY=True` is `KEY.switch=True`."""
    named_by: str = ""
    """`KEY=TEXT` is `KEY.named_by=TEXT`."""

    def inner_name(self, value: Any) -> str:
        """`.name` of the inner key that a plain value means; empty where it means the dict itself."""
        if self.switch and str(value).lower() in ("true", "false"):
            return f".{self.switch}"
        is_name = isinstance(value, str) and value.lower() not in NULLS and not value.startswith("{")
        return f".{self.named_by}" if self.named_by and is_name else ""

    def split(self, value: Any) -> dict[str, Any] | None:
        """A dict, also one that is written out; None for all else, which is judged where its type is known."""
        if isinstance(value, str) and value.startswith("{") and "${" not in value:
            try:
                value = parse_yaml(value)
            except ValueError:
                return None
        return value if isinstance(value, dict) else None


class Canonical(NamedTuple):
    """What a spelling means."""

    key: str | None
    """Canonical or derived key; None if unknown or not built."""
    note: str = ""
    """A sentence to print, for a spelling that is a slip."""
    not_built: str = ""
    """Why the key cannot be used, if its feature is not built."""
    answer: Any = None
    """What the dialect says about a key of another system that is no setting here."""
    spelled: str = ""
    """The key that it answers, in its own section."""


_ROLES = ("actor_rollout_ref", "critic", "reward_model")


@dataclass(frozen=True)
class Spellings:
    """What the settings of one tree are called: their keys, other spellings, and those of other systems."""

    root: type[Section]
    program: str
    """Name of the tree's main file."""
    own_moved: Mapping[str, str] = field(default_factory=dict)
    """Prefix -> prefix; applied before the renames. The first that fits is taken."""
    own_renamed: Mapping[str, str] = field(default_factory=dict)
    derived: Mapping[str, Any] = field(default_factory=dict)
    """Keys that set or check other settings, with their type."""
    not_built: Mapping[str, str] = field(default_factory=dict)
    """Key, or prefix that ends in a dot -> what is said about it."""
    free_dicts: Mapping[str, FreeDict] = field(default_factory=dict)
    programs: Mapping[type[Section], tuple[str, str]] = field(default_factory=dict)
    """Settings of all programs -> (what the program is called, the command that lists them)."""

    @property
    def leaves(self) -> dict[str, Leaf]:
        return leaves(self.root)

    @property
    def sections(self) -> dict[str, type[Section]]:
        return sections(self.root)

    @property
    def dialect(self) -> Dialect:
        return dialect(self.program)

    @cached_property
    def moved(self) -> Mapping[str, str]:
        return {**self.own_moved, **self.dialect.moved}

    @cached_property
    def renamed(self) -> Mapping[str, str]:
        return {**self.own_renamed, **self.dialect.renamed}

    def leaf_of(self, key: str) -> Leaf | None:
        """The setting that a key names: itself, or the free-form dict that it lies in."""
        return leaf_of(self.root, key)

    def flatten(self, tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        """Nested mappings as dotted keys; free-form dict settings and empty mappings stay whole."""
        flat: dict[str, Any] = {}
        for name, value in tree.items():
            key = f"{prefix}{name}"
            leaf = self.leaves.get(key)
            if isinstance(value, dict) and value and not (leaf is not None and leaf.free_keys):
                flat.update(self.flatten(value, f"{key}."))
            else:
                flat[key] = value
        return flat

    def canonical(self, spelling: str) -> Canonical:
        """What a spelling means."""
        key, note = spelling, ""
        if key not in self.leaves and key not in self.renamed and key not in self.derived:
            for old, new in self.moved.items():
                if key.startswith(old):
                    key = new + key[len(old) :]
                    if old == "actor_rollout.ref.":
                        note = f"`{spelling}` is read as `{key}` (an underscore, not a dot, before `ref`)."
                    break
        key = self.renamed.get(key, key)
        if key in self.derived or key in self.leaves:
            return Canonical(key, note)
        if (answer := self.dialect.answer(key)) is not None:
            return Canonical(None, answer=answer, spelled=key)
        if self.leaf_of(key) is not None:
            return Canonical(key, note)
        for prefix, reason in self.not_built.items():
            if key == prefix.rstrip(".") or (prefix.endswith(".") and key.startswith(prefix)):
                return Canonical(None, not_built=reason)
        return Canonical(None)

    def nearest(self, spelling: str) -> str:
        """Advice for an unknown key: the program that has it, what a name of another system is here, the known spelling
        closest to it, or the sections."""
        if others := [name for root, (name, _) in self.programs.items() if spelling in leaves(root)]:
            same = [f"`{key}`" for key in self.leaves if key.endswith(f".{spelling}")]
            here = f"; did you mean {' or '.join(same)}?" if same else ", not of this program"
            return f"it is a key of {' and '.join(others)}{here}"
        if f"training.{spelling}" in {**self.renamed, **self.derived}:
            return f"did you mean {self._meaning(f'training.{spelling}')}?"
        if advice := self.dialect.advice(spelling):
            return advice
        if found := self._likely(spelling):
            return "did you mean " + " or ".join(self._meaning(key) for key in found[:3]) + "?"
        tops = ", ".join(f"`{name}`" for name in self.sections if "." not in name)
        return f"the sections are {tops}; `{self.programs[self.root][1]}` lists every key"

    def _likely(self, spelling: str) -> list[str]:
        """Keys that a spelling is likely to stand for, by the first rule that gives some.

        One part misspelt; the right name in another section; a name with words left out or added; a misspelt name in
        another section. Another role's setting is never meant: an actor's batches are not those of the reward model.
        """
        known = list(dict.fromkeys([*self.leaves, *self.renamed, *self.derived, *self.dialect.keys()]))
        if found := [key for key in known if same_key(spelling, key)]:
            return sorted(found, key=lambda key: slips(spelling, key))[:1]
        path, _, last = spelling.rpartition(".")
        top = path.split(".")[0]
        strangers = tuple(f"{role}." for role in _ROLES if role != top) if top in _ROLES else ()
        names = {key: key.rsplit(".", 1)[-1] for key in self.leaves if not key.startswith(strangers)}
        same = [key for key, name in names.items() if name == last]
        near = [key for key in same if top and key.startswith(f"{top}.")] or same
        if near and (not path or len(last) > 3) and len(near) <= 3:
            return near
        if found := [
            key for key in known if key.rpartition(".")[0] == path and longer_or_shorter(last, names.get(key, ""))
        ]:
            return found
        name = closest(last, names.values())
        found = [key for key, other in names.items() if other == name]
        return found if len(found) <= 3 else []

    def _meaning(self, key: str) -> str:
        target = self.canonical(key).key
        return f"`{key}`" if target in (None, key) else f"`{key}` (that is `{target}`)"
