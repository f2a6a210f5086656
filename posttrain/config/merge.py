"""Several sources of values become one: spellings turned canonical, higher ranks win, contradictions are problems."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from posttrain.config.problem import Problem
from posttrain.config.values import NULLS, WrongValue, convert, shown, split_hint
from posttrain.yaml_text import parse_yaml

if TYPE_CHECKING:
    from posttrain.config.aliases import Spellings
    from posttrain.config.compose import Composed, Layer


@dataclass(frozen=True)
class Source:
    """Where a value was written."""

    label: str
    """For messages: "command line", "conf/my.yaml", "flag --lr", ..."""
    rank: int
    """The value of the highest rank counts."""
    explicit: bool = True
    """Whether what it says counts as set by the user."""
    is_file: bool = False


@dataclass
class Entry:
    """A value, and who set it."""

    value: Any
    origin: Source
    spelling: str
    answer: Any = None
    """What the dialect says about a key of another system that is no setting here."""

    @property
    def source(self) -> str:
        return self.origin.label

    @property
    def rank(self) -> int:
        return self.origin.rank

    @property
    def explicit(self) -> bool:
        return self.origin.explicit

    def where(self, key: str) -> str:
        """The place for a message."""
        return self.source if self.spelling == key else f"{self.source}, written `{self.spelling}`"


_TOOLS_OWN = ".tool_config."
"""What is empty there is so on purpose: a tool without a key may do something else than one that was given none."""


@dataclass
class Merged:
    """Entries by canonical (or derived) key, sections of the user's own, and what was found on the way."""

    names: Spellings
    """What the keys of this tree are called."""
    entries: dict[str, Entry] = field(default_factory=dict)
    elsewhere: dict[str, Entry] = field(default_factory=dict)
    """Keys of other systems that are no settings here; the dialect's `apply` answers them."""
    extra: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)
    """Keys whose value could not be read; checks of them are skipped."""
    undeclared: tuple[str, ...] = ()
    """Prefixes under which a file that could not be imported may have declared settings."""
    node_rank: int = 0
    """Which machine of the run this is."""
    dry_run: bool = False
    """Whether the run is only looked at."""

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
        if old is not None and old.explicit and old.rank > by.rank:
            return
        if old is not None and old.explicit and old.rank == by.rank and old.value != value:
            what = f"`{by.spelling}={by.value}` means `{key}={value}`, but `{old.spelling}={old.value}` is set too."
            where = old.source if old.source == by.source else f"{by.source}, and {old.source}"
            self.refuse(what, where, "keep one of them", key)
        self.entries[key] = replace(by, value=value, answer=None)

    def set_default(self, key: str, value: Any, why: str) -> None:
        """A default that depends on the run; it does not count as set by the user."""
        self.entries[key] = Entry(value, Source(f"default ({why})", -1, explicit=False), key)

    # -- values as they are written -------------------------------------------------------------------------------
    def add_files(self, composed: Composed) -> None:
        """Take in what the files say."""
        ranks = composed.ranks()
        for key, value in composed.values.items():
            rank = ranks[key]
            layer = composed.layers[rank] if composed.layers else None
            found = self.names.canonical(key)
            if found.key is None and found.answer is None and self._keep_own_section(key, value, layer):
                continue
            self.add(key, value, self._file_source(key, value, layer, rank))

    def _file_source(self, key: str, value: Any, layer: Layer | None, rank: int) -> Source:
        if layer is None:
            return Source("default", rank, explicit=False, is_file=True)
        leaf = self.names.leaves.get(key)
        unchanged = key in layer.copied and leaf is not None and value == leaf.default
        in_package = layer.label.startswith("posttrain/trainer/config/")
        label = "default" if unchanged and in_package else layer.label
        return Source(label, rank, explicit=layer.explicit and not unchanged, is_file=True)

    def _keep_own_section(self, key: str, value: Any, layer: Layer | None) -> bool:
        """Whether the key belongs to a group of the user's own, which is kept for `${...}` references."""
        section = layer.own_section if layer is not None else ""
        if layer is None or not key.startswith(f"{section}.") or section.split(".")[0] in self.names.sections:
            return False
        inner = key[len(section) + 1 :]
        if self.names.canonical(inner).key is not None:
            what = f"`{inner}` stands in a group file, so that it becomes `{key}`, which nothing reads."
            self.refuse(what, layer.label, "put `# @package _global_` in the file's first line")
        else:
            self.extra[key] = value
        return True

    def add(self, spelling: str, value: Any, source: Source) -> None:
        """Take in one value under any spelling."""
        if value == "" and isinstance(value, str) and not source.is_file and _TOOLS_OWN not in spelling:
            self.note(f"`{spelling}=` ({source.label}) is empty and counts as not given.")
            return
        if spelling in self.extra:
            self.extra[spelling] = value
            return
        found, entry = self.names.canonical(spelling), Entry(value, source, spelling)
        if found.answer is not None and not self._is_section(spelling, value):
            old = self.elsewhere.get(found.spelled)
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
                    self.add(f"{key}.{inner}", value, entry.origin)
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
        if entry.value is None and entry.origin.is_file:
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
        if leaf is not None and leaf.free_keys:
            return False
        hint = leaf.hint if leaf is not None else self.names.derived[key]
        try:
            return convert(old.value, hint) != convert(new.value, hint)
        except WrongValue:
            return old.value != new.value

    def _with_inner_key(self, leaf_key: str, key: str, value: Any) -> dict[str, Any]:
        """A free-form dict setting with one inner key set."""
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
            elif not (self.undeclared and key.startswith(self.undeclared)):
                self.refuse(f"Unknown key `{key}`.", entry.source, self.names.nearest(key))
        elif isinstance(value, str) and value.startswith("{"):
            try:
                inside = self.names.flatten(parse_yaml(value), f"{key}.")
            except ValueError as error:
                self._refuse_yaml(entry, error)
                return
            for inner, inner_value in inside.items():
                self.add(inner, inner_value, replace(entry.origin, is_file=False))
        elif value not in (None, {}):
            inside = [leaf for leaf in self.names.leaves if leaf.startswith(f"{key}.")]
            do = f"set a key inside it, for example `{inside[0]}`" if inside else "set a key inside it"
            self.refuse(f"`{key}` is a section, not a setting.", entry.source, do)
