"""Several sources of values become one: spellings turned canonical, higher ranks win, contradictions are problems."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from posttrain.config.aliases import JOINED, NAMED_BY, SWITCHES, canonical, nearest, spellings
from posttrain.config.compose import Composed, Layer, flatten
from posttrain.config.problem import Problem
from posttrain.config.schema import leaf_of, leaves, sections
from posttrain.config.values import NULLS, WrongValue, convert, parse_yaml, shown, split_hint


@dataclass
class Entry:
    """A value, and who set it."""

    value: Any
    source: str
    spelling: str
    rank: int
    explicit: bool
    answer: Any = None
    """What the dialect says about a key of another system that is no setting here."""

    def where(self, key: str) -> str:
        """The place for a message."""
        return self.source if self.spelling == key else f"{self.source}, written `{self.spelling}`"


@dataclass
class Merged:
    """Entries by canonical (or derived) key, sections of the user's own, and what was found on the way."""

    entries: dict[str, Entry] = field(default_factory=dict)
    elsewhere: dict[str, Entry] = field(default_factory=dict)
    """Keys of other systems that are no settings here; the dialect's `apply` answers them."""
    extra: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)
    """Keys whose value could not be read; checks of them are skipped."""
    node_rank: int = 0
    """Which machine of the run this is."""
    dry_run: bool = False
    """Whether the run is only looked at."""

    def value(self, key: str) -> Any:
        """The value in force: an entry's, else the default."""
        entry = self.entries.get(key)
        return entry.value if entry is not None else leaves()[key].default

    def is_set(self, key: str) -> bool:
        """Whether the user set this key."""
        return key in self.entries and self.entries[key].explicit

    def where(self, key: str) -> str:
        return self.entries[key].where(key) if key in self.entries else "default"

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


_TOOLS_OWN = ".tool_config."
"""What is empty there is so on purpose: a tool without a key may do something else than one that was given none."""


def merge_files(merged: Merged, composed: Composed) -> None:
    """Take in what the files say."""
    for key, value in composed.values.items():
        rank = composed.layer_of(key)
        layer = composed.layers[rank] if composed.layers else Layer("default", {}, explicit=False)
        leaf = leaf_of(key)
        unchanged = key in layer.copied and leaf is not None and leaf.key == key and value == leaf.default
        in_package = layer.label.startswith("posttrain/trainer/config/")
        source = "default" if unchanged and in_package else layer.label
        found = canonical(key)
        if found.key is None and found.answer is None and _own_section(merged, key, value, layer):
            continue
        add(merged, key, value, source, rank, explicit=layer.explicit and not unchanged, from_file=True)


def _own_section(merged: Merged, key: str, value: Any, layer: Layer) -> bool:
    """Whether the key belongs to a group of the user's own, which is kept for `${...}` references."""
    section = layer.own_section
    if not section or not key.startswith(section + ".") or section.split(".")[0] in sections():
        return False
    inner = key[len(section) + 1 :]
    if canonical(inner).key is not None:
        what = f"`{inner}` stands in a group file, so that it becomes `{key}`, which nothing reads."
        merged.problems.append(Problem(what, layer.label, "put `# @package _global_` in the file's first line"))
    else:
        merged.extra[key] = value
    return True


def add(
    merged: Merged, spelling: str, value: Any, source: str, rank: int, *, explicit: bool, from_file: bool = False
) -> None:
    """Take in one value under any spelling."""
    if isinstance(value, str) and value == "" and not from_file and _TOOLS_OWN not in spelling:
        merged.note(f"`{spelling}=` ({source}) is empty and counts as not given.")
        return
    if spelling in merged.extra:
        merged.extra[spelling] = value
        return
    found = canonical(spelling)
    if found.answer is not None and not _is_section(spelling, value):
        old = merged.elsewhere.get(found.spelled)
        if old is None or old.rank <= rank:
            merged.elsewhere[found.spelled] = Entry(value, source, spelling, rank, explicit, found.answer)
        return
    if found.key is None:
        _not_a_setting(merged, spelling, value, source, rank, explicit, found.not_built)
        return
    if found.note:
        merged.note(found.note)
    key, leaf = found.key, leaf_of(found.key)
    if key in SWITCHES and str(value).lower() in ("true", "false"):
        key = f"{key}.enable"
    elif key in NAMED_BY and isinstance(value, str) and value.lower() not in NULLS and not value.startswith("{"):
        key = f"{key}.{NAMED_BY[key]}"
    elif key in JOINED and (inside := _whole_dict(value)) is not None:  # what other spellings have put into it stays
        for inner, inner_value in inside.items():
            add(merged, f"{key}.{inner}", inner_value, source, rank, explicit=explicit, from_file=from_file)
        return
    if leaf is not None and leaf.key != key:
        try:
            key, value = leaf.key, _inside(merged, leaf.key, key, value)
        except ValueError as error:
            _not_yaml(merged, spelling, value, source, error)
            return
    optional = leaf is not None and split_hint(leaf.hint)[1]
    if (key != spelling or key in JOINED) and not optional and str(value).lower() in NULLS:
        return  # in verl the other name is then unset, and the setting counts
    if value is None and from_file and not optional:
        merged.note(f"`{spelling}:` in {source} is empty and counts as not given.")
        return
    new, old = Entry(value, source, spelling, rank, explicit), merged.entries.get(key)
    if old is not None and old.rank > rank:
        return
    if old is not None and _contradicts(key, old, new):
        what = f"`{old.spelling}` and `{spelling}` are two spellings of `{key}` with different values: "
        what += f"{shown(key, old.value)} and {shown(key, value)}."
        where = old.source if old.source == source else f"{old.source}, and {source}"
        merged.problems.append(Problem(what, where, f"keep one of them; the canonical spelling is `{key}`", (key,)))
    merged.entries[key] = new


def remove(merged: Merged, spelling: str, source: str) -> None:
    """`~key`: what files say about a key does not count, and it has its default."""
    found = canonical(spelling)
    if found.key is None and found.answer is None:
        merged.problems.append(Problem(f"`~{spelling}` removes an unknown key.", source, nearest(spelling)))
        return
    merged.entries.pop(found.key or "", None)
    merged.elsewhere.pop(found.spelled, None)
    merged.note(f"`~{spelling}`: no setting can be removed; it has its default.")


def _contradicts(key: str, old: Entry, new: Entry) -> bool:
    if old.rank != new.rank or old.spelling == new.spelling or not (old.explicit and new.explicit):
        return False
    leaf = leaf_of(key)
    if leaf is not None and leaf.free_keys:
        return False
    hint = leaf.hint if leaf is not None else spellings().derived[key]
    try:
        return convert(old.value, hint) != convert(new.value, hint)
    except WrongValue:
        return old.value != new.value


def _inside(merged: Merged, leaf_key: str, key: str, value: Any) -> dict[str, Any]:
    """A free-form dict setting with one inner key set."""
    before = merged.value(leaf_key)
    whole = dict(before if isinstance(before, dict) else parse_yaml(str(before)) or {})
    *path, last = key[len(leaf_key) + 1 :].split(".")
    inner = whole
    for part in path:
        inner[part] = dict(inner.get(part) or {})
        inner = inner[part]
    inner[last] = parse_yaml(value) if isinstance(value, str) and value and not value.startswith("$") else value
    return whole


def _whole_dict(value: Any) -> dict[str, Any] | None:
    """A dict, also one that is written out; None for all else, which is judged where its type is known."""
    if isinstance(value, str) and value.startswith("{") and "${" not in value:
        try:
            value = parse_yaml(value)
        except ValueError:
            return None
    return value if isinstance(value, dict) else None


def _not_yaml(merged: Merged, key: str, value: Any, source: str, error: ValueError) -> None:
    reason = " ".join(str(error).split())[:200]
    do = "close every bracket and quote, and quote the whole in the shell: 'key={a: [1, 2]}'"
    merged.problems.append(Problem(f"`{key}={str(value)[:80]}` cannot be read as YAML: {reason}.", source, do))


def _names_section(key: str) -> bool:
    return key in sections() or f"{key}." in spellings().moved


def _is_section(key: str, value: Any) -> bool:
    """Whether a whole section is given, and not a choice of verl's under the section's name (`optim=fsdp`)."""
    return _names_section(key) and (value in (None, {}) or str(value).startswith("{"))


def _not_a_setting(merged: Merged, key: str, value: Any, source: str, rank: int, explicit: bool, reason: str) -> None:
    """A key that is no setting: a section, a feature that is not built, or unknown."""
    is_section = _names_section(key)
    if is_section and value in (None, {}):
        return
    if is_section and isinstance(value, str) and value.startswith("{"):
        try:
            inside = flatten(parse_yaml(value), f"{key}.")
        except ValueError as error:
            _not_yaml(merged, key, value, source, error)
            return
        for inner, inner_value in inside.items():
            add(merged, inner, inner_value, source, rank, explicit=explicit)
    elif is_section:
        inside = [leaf for leaf in leaves() if leaf.startswith(f"{key}.")]
        do = f"set a key inside it, for example `{inside[0]}`" if inside else "set a key inside it"
        merged.problems.append(Problem(f"`{key}` is a section, not a setting.", source, do))
    elif reason:
        why, _, do = reason.partition("; ")
        merged.problems.append(Problem(f"`{key}` cannot be used: {why}.", source, do or "remove the key"))
    else:
        merged.problems.append(Problem(f"Unknown key `{key}`.", source, nearest(key)))
