"""Values of several sources under several spellings become one tree.

`Spellings` says what a key means: canonical, another spelling, a key of another system, or a typo. `Merged` takes
values in: the higher rank wins, and contradictions are problems.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from posttrain.config.checked import Dialect, dialect
from posttrain.config.resolved import Problem
from posttrain.config.schema import Leaf, Section, leaves, sections
from posttrain.config.values import NULLS, WrongValue, convert, shown, split_hint
from posttrain.spelling import closest, longer_or_shorter, same_key, slips
from posttrain.yaml_text import parse_yaml


@dataclass(frozen=True)
class FreeDict:
    """A setting that is a free dict, into which keys outside of it write, too: one that is given whole does not
    replace what these say."""

    # `KEY=True` is `KEY.switch=True`.
    switch: str = ""
    # `KEY=TEXT` is `KEY.named_by=TEXT`.
    named_by: str = ""

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

    # Canonical or derived key; None if unknown or not built.
    key: str | None
    # A sentence to print, for a spelling that is a slip.
    note: str = ""
    # Why the key cannot be used, if its feature is not built.
    not_built: str = ""
    # What the dialect says about a key of another system that is no setting here.
    answer: Any = None
    # The key that it answers, in its own section.
    spelled: str = ""


_ROLES = ("actor_rollout_ref", "critic", "reward_model")


@dataclass(frozen=True)
class Spellings:
    """What the settings of one tree are called: their keys, other spellings, and those of other systems."""

    root: type[Section]
    # Name of the tree's main file in `trainer/config/`, which names the program too.
    main: str
    # Prefix -> prefix; applied before the renames. The first that fits is taken.
    own_moved: Mapping[str, str] = field(default_factory=dict)
    own_renamed: Mapping[str, str] = field(default_factory=dict)
    # Keys that set or check other settings, with their type.
    derived: Mapping[str, Any] = field(default_factory=dict)
    # Key, or prefix that ends in a dot -> what is said about it.
    not_built: Mapping[str, str] = field(default_factory=dict)
    free_dicts: Mapping[str, FreeDict] = field(default_factory=dict)
    # Settings of all programs -> (what the program is called, the command that lists them).
    programs: Mapping[type[Section], tuple[str, str]] = field(default_factory=dict)

    @property
    def leaves(self) -> dict[str, Leaf]:
        return leaves(self.root)

    @property
    def sections(self) -> dict[str, type[Section]]:
        return sections(self.root)

    @property
    def dialect(self) -> Dialect:
        return dialect(self.main)

    @cached_property
    def moved(self) -> Mapping[str, str]:
        return {**self.own_moved, **self.dialect.moved}

    @cached_property
    def renamed(self) -> Mapping[str, str]:
        return {**self.own_renamed, **self.dialect.renamed}

    def leaf_of(self, key: str) -> Leaf | None:
        """The setting that a key names: itself, or the free-form dict that it lies in."""
        if key in self.leaves:
            return self.leaves[key]
        parts = key.split(".")
        around = (self.leaves.get(".".join(parts[:end])) for end in range(len(parts) - 1, 1, -1))
        return next((leaf for leaf in around if leaf is not None and leaf.free_keys), None)

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
        # Known keys are never moved: a prefix of another system may begin one of ours.
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
        # A hint at another role's key would be followed and change the wrong model.
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


# -- merging -------------------------------------------------------------------------------------------------------
@dataclass
class Entry:
    """A value, and where it was written."""

    value: Any
    # The key as it was written.
    spelling: str
    # For messages: "command line", "conf/my.yaml", "flag --lr", ...
    source: str
    # The value of the highest rank counts.
    rank: int = -1
    # Whether what it says counts as set by the user.
    explicit: bool = True
    is_file: bool = False
    # What the dialect says about a key of another system that is no setting here.
    answer: Any = None

    def where(self, key: str) -> str:
        """The place for a message."""
        return self.source if self.spelling == key else f"{self.source}, written `{self.spelling}`"


# What is empty there is so on purpose: a tool without a key may do something else than one that was given none.
_TOOLS_OWN = ".tool_config."


@dataclass
class Merged:
    """Entries by canonical (or derived) key, sections of the user's own, and what was found on the way."""

    # What the keys of this tree are called.
    names: Spellings
    entries: dict[str, Entry] = field(default_factory=dict)
    # Keys of other systems that are no settings here; the dialect's `apply` answers them.
    elsewhere: dict[str, Entry] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # Keys whose value could not be read; checks of them are skipped.
    bad: set[str] = field(default_factory=set)
    # Prefixes under which a file that could not be imported may have declared settings.
    undeclared: tuple[str, ...] = ()
    # Which machine of the run this is.
    node_rank: int = 0
    # Whether the run is only looked at.
    dry_run: bool = False

    # -- what is in it --------------------------------------------------------------------------------------------
    def value(self, key: str) -> Any:
        """The value in force: an entry's, else the default."""
        entry = self.entries.get(key)
        return entry.value if entry is not None else self.names.leaves[key].default

    def is_set(self, key: str) -> bool:
        """Whether the user set this key."""
        return key in self.entries and self.entries[key].explicit

    def where(self, key: str) -> str:
        return self.entries[key].where(key) if key in self.entries else "default"

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def refuse(self, what: str, where: str, do: str, *keys: str) -> None:
        self.problems.append(Problem(what, where, do, keys))

    # -- settings that follow from others -------------------------------------------------------------------------
    def take(self, key: str) -> Entry | None:
        """The entry of a derived key, taken out: what it means is set instead."""
        return self.entries.pop(key, None)

    def put(self, key: str, value: Any, by: Entry) -> None:
        """Set a key on behalf of a derived one, by the same ranks as if it had been written itself."""
        old = self.entries.get(key)
        # What the user wrote at a higher rank wins over a key that only implies the setting.
        if old is not None and old.explicit and old.rank > by.rank:
            return
        if old is not None and old.explicit and old.rank == by.rank and old.value != value:
            what = f"`{by.spelling}={by.value}` means `{key}={value}`, but `{old.spelling}={old.value}` is set too."
            where = old.source if old.source == by.source else f"{by.source}, and {old.source}"
            self.refuse(what, where, "keep one of them", key)
        self.entries[key] = replace(by, value=value, answer=None)

    def set_default(self, key: str, value: Any, why: str) -> None:
        """A default that depends on the run; it does not count as set by the user."""
        self.entries[key] = Entry(value, key, f"default ({why})", explicit=False)

    # -- values as they are written -------------------------------------------------------------------------------
    def add(self, entry: Entry) -> None:
        """Take in one value under any spelling."""
        spelling, value = entry.spelling, entry.value
        # Scripts write `key=$VAR` with a variable that is not set; that must not become an empty path.
        if value == "" and isinstance(value, str) and not entry.is_file and _TOOLS_OWN not in spelling:
            self.note(f"`{spelling}=` ({entry.source}) is empty and counts as not given.")
            return
        if spelling in self.extra:
            self.extra[spelling] = value
            return
        found = self.names.canonical(spelling)
        if found.answer is not None and not self._is_section(spelling, value):
            old = self.elsewhere.get(found.spelled)
            # Kept for later: what such a key means can depend on others that are not in yet.
            if old is None or old.rank <= entry.rank:
                self.elsewhere[found.spelled] = replace(entry, answer=found.answer)
        elif found.key is None:
            self._add_section(entry, found.not_built)
        else:
            if found.note:
                self.note(found.note)
            self._add_setting(found.key, entry)

    def _add_setting(self, key: str, entry: Entry) -> None:
        """Take in the value of a setting or of a derived key."""
        free = self.names.free_dicts.get(key)
        if free is not None:
            if (inside := free.split(entry.value)) is not None:  # what other spellings have put into it stays
                for inner, value in inside.items():
                    self.add(replace(entry, spelling=f"{key}.{inner}", value=value))
                return
            key += free.inner_name(entry.value)
        leaf = self.names.leaf_of(key)
        if leaf is not None and leaf.key != key:
            try:
                entry.value = self._with_inner_key(leaf.key, key, entry.value)
            except ValueError as error:
                self._refuse_yaml(entry, error)
                return
            key = leaf.key
        if not self._counts_as_unset(key, entry, leaf is not None and split_hint(leaf.hint)[1]):
            self._enter(key, entry)

    def _counts_as_unset(self, key: str, entry: Entry, optional: bool) -> bool:
        """Whether a null, where the type has none, says that nothing was set."""
        if optional:
            return False
        if (key != entry.spelling or key in self.names.free_dicts) and str(entry.value).lower() in NULLS:
            return True  # in verl the other name is then unset, and the setting counts
        if entry.value is None and entry.is_file:
            self.note(f"`{entry.spelling}:` in {entry.source} is empty and counts as not given.")
            return True
        return False

    def _enter(self, key: str, entry: Entry) -> None:
        """The value of the higher rank counts; two of the same rank must not contradict each other."""
        old = self.entries.get(key)
        if old is not None and old.rank > entry.rank:
            return
        if old is not None and self._contradicts(key, old, entry):
            what = f"`{old.spelling}` and `{entry.spelling}` are two spellings of `{key}` with different values: "
            what += f"{shown(key, old.value)} and {shown(key, entry.value)}."
            where = old.source if old.source == entry.source else f"{old.source}, and {entry.source}"
            self.refuse(what, where, f"keep one of them; the canonical spelling is `{key}`", key)
        self.entries[key] = entry

    def remove(self, spelling: str, source: str) -> None:
        """`~key`: what files say about a key does not count, and it has its default."""
        found = self.names.canonical(spelling)
        if found.key is None and found.answer is None:
            self.refuse(f"`~{spelling}` removes an unknown key.", source, self.names.nearest(spelling))
            return
        self.entries.pop(found.key or "", None)
        self.elsewhere.pop(found.spelled, None)
        self.note(f"`~{spelling}`: no setting can be removed; it has its default.")

    def _contradicts(self, key: str, old: Entry, new: Entry) -> bool:
        if old.rank != new.rank or old.spelling == new.spelling or not (old.explicit and new.explicit):
            return False
        leaf = self.names.leaf_of(key)
        # Two spellings that write into one free dict add to it; they do not contradict each other.
        if leaf is not None and leaf.free_keys:
            return False
        hint = leaf.hint if leaf is not None else self.names.derived[key]
        try:
            return convert(old.value, hint) != convert(new.value, hint)
        except WrongValue:
            return old.value != new.value

    def _with_inner_key(self, leaf_key: str, key: str, value: Any) -> dict[str, Any]:
        """A free-form dict setting with one inner key set."""
        # A copy of what is there: the default's own dict must not be changed.
        before = self.value(leaf_key)
        whole = dict(before if isinstance(before, dict) else parse_yaml(str(before)) or {})
        *path, last = key[len(leaf_key) + 1 :].split(".")
        inner = whole
        for part in path:
            inner[part] = dict(inner.get(part) or {})
            inner = inner[part]
        inner[last] = parse_yaml(value) if isinstance(value, str) and value and not value.startswith("$") else value
        return whole

    def _refuse_yaml(self, entry: Entry, error: ValueError) -> None:
        reason = " ".join(str(error).split())[:200]
        do = "close every bracket and quote, and quote the whole in the shell: 'key={a: [1, 2]}'"
        what = f"`{entry.spelling}={str(entry.value)[:80]}` cannot be read as YAML: {reason}."
        self.refuse(what, entry.source, do)

    # -- keys that are no settings --------------------------------------------------------------------------------
    def _names_section(self, key: str) -> bool:
        return key in self.names.sections or f"{key}." in self.names.moved

    def _is_section(self, key: str, value: Any) -> bool:
        """Whether a whole section is given, and not a choice of verl's under the section's name (`optim=fsdp`)."""
        return self._names_section(key) and (value in (None, {}) or str(value).startswith("{"))

    def _add_section(self, entry: Entry, reason: str) -> None:
        """A section that is given whole; else a problem: a feature that is not built, or an unknown key."""
        key, value = entry.spelling, entry.value
        if not self._names_section(key):
            why, _, do = reason.partition("; ")
            if reason:
                self.refuse(f"`{key}` cannot be used: {why}.", entry.source, do or "remove the key")
            # The file that would declare the key could not be imported, which is reported; a second problem about it
            # would mislead.
            elif not (self.undeclared and key.startswith(self.undeclared)):
                self.refuse(f"Unknown key `{key}`.", entry.source, self.names.nearest(key))
        elif isinstance(value, str) and value.startswith("{"):
            try:
                inside = self.names.flatten(parse_yaml(value), f"{key}.")
            except ValueError as error:
                self._refuse_yaml(entry, error)
                return
            for inner, inner_value in inside.items():
                self.add(replace(entry, spelling=inner, value=inner_value, is_file=False))
        elif value not in (None, {}):
            inside = [leaf for leaf in self.names.leaves if leaf.startswith(f"{key}.")]
            do = f"set a key inside it, for example `{inside[0]}`" if inside else "set a key inside it"
            self.refuse(f"`{key}` is a section, not a setting.", entry.source, do)
