"""Settings classes: their base, the settings that algorithms add to them, and the flat table that all checks read.

A policy loss's own settings are `actor_rollout_ref.actor.policy_loss.*`, an estimator's `algorithm.*`. Their files
declare them. The sections are brought up to date whenever a configuration is loaded, so that a file of the user's
declares settings like a built-in one: the keys are known, their ranges are checked, `posttrain explain` describes them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeVar

from posttrain.algorithms.common import AlgorithmError, file_of
from posttrain.algorithms.registry import ADV_ESTIMATORS, ESTIMATOR_KEY, LOSS_KEY, POLICY_LOSSES, Declaration
from posttrain.config.values import WrongValue, convert, describe_hint, split_hint
from posttrain.registry import Registry
from posttrain.settings import Idle, Range, choices_of, range_of

C = TypeVar("C", bound=type)


@typing.dataclass_transform(field_specifiers=(dataclasses.field,))
def section(kind: C) -> C:
    """Decorator of a section: a dataclass whose `==` and `repr` are those of `Section`."""
    # Generating these two for every section took a seventh of the time to import the loader.
    return dataclasses.dataclass(repr=False, eq=False)(kind)


@section
class Section:
    """One section of the tree, a dataclass that holds the only defaults; mapping access is for code for OmegaConf."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in dataclasses.fields(self))

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts and lists, in the order of the fields."""
        return dataclasses.asdict(self)


# -- settings that algorithms declare -------------------------------------------------------------------------------
class Kind(NamedTuple):
    """A kind of algorithm whose entries declare settings."""

    # The setting that names the algorithm; its own settings lie beside it.
    key: str
    registry: Registry[Any]
    decorator: str

    @property
    def prefix(self) -> str:
        return self.key.rpartition(".")[0] + "."

    def own_keys(self, declaration: Declaration) -> tuple[str, ...]:
        """Full keys of an algorithm's own settings."""
        kind = declaration.settings
        return () if kind is None else tuple(self.prefix + field.name for field in dataclasses.fields(kind))


ESTIMATOR_KIND = Kind(ESTIMATOR_KEY, ADV_ESTIMATORS, "register_adv_est")
LOSS_KIND = Kind(LOSS_KEY, POLICY_LOSSES, "register_policy_loss")
KINDS = (ESTIMATOR_KIND, LOSS_KIND)


class _OpenSection:
    """A section with room for declared settings, and what its own file says before any is placed."""

    def __init__(self, section: type, kind: Kind, after: str) -> None:
        self.section, self.kind, self.after = section, kind, after
        self.written = {field.name: field for field in dataclasses.fields(section)}
        self.hints = dict(section.__annotations__)
        self.placed: tuple[type, ...] = ()

    def update(self) -> None:
        """Make the dataclass anew, in place (other modules hold the class), where other settings are declared now."""
        declared = tuple(one.settings for one in self.kind.registry.values() if one.settings is not None)
        # Called at every load, most of which find nothing new.
        if declared == self.placed:
            return
        self._check_names(declared)
        for kind in declared:
            for field in dataclasses.fields(kind):
                check_declared_field(kind, field, _hint_of(kind, field.name))
        self.placed = declared
        for name in self.section.__annotations__.keys() - self.written.keys():
            if name in vars(self.section):  # a field with a factory is no attribute of the class
                delattr(self.section, name)
        # (name, type, field, the class that declares it).
        fields = [(name, self.hints[name], field, {}) for name, field in self.written.items()]
        at = list(self.written).index(self.after) + 1
        fields[at:at] = [
            (field.name, hints_of(kind)[field.name], field, {"declared_by": kind})
            for kind in declared
            for field in dataclasses.fields(kind)
        ]
        for name, _, field, more in fields:
            copied = {"default": field.default, "default_factory": field.default_factory}
            setattr(self.section, name, dataclasses.field(**copied, metadata={**field.metadata, **more}))
        self.section.__annotations__ = {name: hint for name, hint, *_ in fields}
        for method in ("__init__", "__match_args__"):
            delattr(self.section, method)  # `dataclass` would keep the old ones
        section(self.section)
        leaves.cache_clear()
        sections.cache_clear()

    def _check_names(self, declared: Iterable[type]) -> None:
        # Two settings of one name would share a default and a range, and each would be noted as the other's.
        known = {name: (field, self.section) for name, field in self.written.items()}
        for kind in declared:
            for field in dataclasses.fields(kind):
                other, owner = known.setdefault(field.name, (field, kind))
                again = (owner.__module__, owner.__qualname__) == (kind.__module__, kind.__qualname__)  # in a notebook
                if other is not field and not again:  # a class that is used twice or inherited from has the same one
                    taken = f"is declared by {owner.__qualname__} in {file_of(owner)} as well"
                    both = f"choose another name, as `{self.kind.prefix}{field.name}` would mean both"
                    raise declared_wrongly(kind, field.name, taken, both)


_open_sections: list[_OpenSection] = []


def holds_settings_of(kind: Kind, *, after: str) -> Callable[[C], C]:
    """Decorator of a section: the settings that algorithms of this kind declare are fields of it, behind `after`."""

    def decorate(opened: C) -> C:
        _open_sections.append(_OpenSection(opened, kind, after))
        _open_sections[-1].update()
        return opened

    return decorate


def place_declared_settings() -> None:
    """Bring the sections up to date with what is registered now."""
    for section in _open_sections:
        section.update()


def hints_of(kind: type) -> dict[str, Any]:
    """Field name -> type, as `typing.get_type_hints` gives it."""
    # That compiles every annotation anew, which took a tenth of a first load: 400 fields share a few dozen texts.
    hints: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        for name, text in vars(base).get("__annotations__", {}).items():
            hints[name] = _evaluate(text, base.__module__) if isinstance(text, str) else text
    return hints


def _hint_of(kind: type, name: str) -> Any:
    try:
        return hints_of(kind)[name]
    except NameError as error:
        return error


@cache
def _evaluate(text: str, module: str) -> Any:
    return eval(text, vars(sys.modules[module]))


# -- checks of declared settings: a mistake in a declaration would be shown as one of the run's settings ---------------
_TYPES = "float, int, bool, str, list[...] or dict[...], each also `| None`"


def check_declared_field(kind: type, field: dataclasses.Field[Any], hint: Any) -> None:
    """AlgorithmError with file, class, setting and what to do. `hint` is its type; a NameError if that is unknown."""
    problem, way = _problem_of(field, hint)
    if problem:
        raise declared_wrongly(kind, field.name, problem, way)


def declared_wrongly(kind: type, name: str, problem: str, way: str) -> AlgorithmError:
    return AlgorithmError(f"The setting `{name}` of {kind.__qualname__} in {file_of(kind)} {problem}: {way}.")


def _problem_of(field: dataclasses.Field[Any], hint: Any) -> tuple[str, str]:
    if isinstance(hint, NameError):
        return f"has an unknown type ({hint})", f"declare it as {_TYPES}"
    inner, optional = split_hint(hint)
    if inner not in (float, int, bool, str, Any) and typing.get_origin(inner) not in (list, dict):
        choices = "; a few names are `str` with `choices`"
        return f"has the type {getattr(hint, '__name__', hint)}, which settings do not have", f"use {_TYPES}{choices}"
    try:
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    except Exception as error:
        return f"has a factory that failed ({type(error).__name__}: {error})", "it is called without arguments"
    if value is None:
        return ("", "") if optional else ("has the default None", "add `| None` to its type, or give another default")
    if not _fits(value, hint):
        words = f"has the default {value!r}, but its type is {describe_hint(hint)}"
        return words, "change the default or the type"
    return _problem_of_limits(field, inner, value)


def _problem_of_limits(field: dataclasses.Field[Any], inner: Any, value: Any) -> tuple[str, str]:
    allowed, choices = range_of(field), choices_of(field)
    if choices and (inner is not str or not all(isinstance(one, str) for one in choices)):
        return (
            f"has choices={choices!r} and the type {describe_hint(inner)}",
            "choices are texts, of settings of type str",
        )
    if choices and value not in choices:
        return f"has the default {value!r}, which is none of its choices", f"choose one of {', '.join(choices)}"
    if allowed is None:
        return "", ""
    try:
        if allowed.allows(value):
            return "", ""
    except Exception:  # a function of the user's, or one for numbers with a text
        return f"has a range that its default {value!r} cannot be compared with", "give a range for values of its type"
    return f"has the default {value!r}, which is out of its own range", f"it must be {allowed.words}"


def _fits(value: Any, hint: Any) -> bool:
    """Whether a default is what the same value on a command line would become."""
    inner, _ = split_hint(hint)
    if inner is Any or isinstance(value, str):
        return inner in (Any, str)
    try:
        converted = convert(value, hint)
    except WrongValue:
        return False
    return converted == value and isinstance(converted, bool) == isinstance(value, bool)


# -- the flat table -------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Leaf:
    """One setting."""

    key: str
    hint: Any
    default: Any
    # The class whose source holds its sentence.
    owner: type
    # What a number must be; null is never tested.
    range: Range | None = None
    # The names that it takes, besides null where the type allows it; empty for any text.
    choices: tuple[str, ...] = ()
    # Why it may have no effect: the reasons of the sections around it, then its own.
    idle: tuple[Idle, ...] = ()
    is_path: bool = False
    is_literal: bool = False

    @property
    def free_keys(self) -> bool:
        """Whether the value is a dict whose own keys are the user's."""
        return typing.get_origin(self.hint) is dict

    @property
    def sentence(self) -> str:
        """What stands under the field. It is read when it is asked for, as it costs a parse of the source."""
        try:
            return sentences_of(self.owner).get(self.key.rpartition(".")[2], "")
        except (OSError, TypeError):  # a class typed into a notebook has no file
            return ""


@cache
def leaves(root: type[Section]) -> dict[str, Leaf]:
    """Every setting of a tree by its canonical key, in the order of the classes."""
    return {leaf.key: leaf for leaf in _walk(root(), "")}


def _walk(section: Section, prefix: str, around: tuple[Idle, ...] = ()) -> Iterator[Leaf]:
    hints = hints_of(type(section))
    for field in dataclasses.fields(section):
        value, key, facts = getattr(section, field.name), prefix + field.name, field.metadata
        idle = around
        for one in facts.get("idle", ()):  # with its full key
            idle += (one._replace(reason=prefix + one.reason[1:]) if one.reason.startswith(".") else one,)
        if isinstance(value, Section):
            yield from _walk(value, key + ".", idle)
        else:
            owner, marks = facts.get("declared_by", type(section)), ("is_path" in facts, "is_literal" in facts)
            yield Leaf(key, hints[field.name], value, owner, range_of(field), choices_of(field), idle, *marks)


@cache
def sections(root: type[Section]) -> dict[str, type[Section]]:
    """Every section of a tree by its dotted name."""
    found: dict[str, type[Section]] = {}
    for name, value in vars(root()).items():
        if isinstance(value, Section):
            found[name] = type(value)
            found |= {f"{name}.{inner}": kind for inner, kind in sections(type(value)).items()}
    return found


def nest(flat: Mapping[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    """`tree` with the values of these dotted keys in it."""
    for key, value in flat.items():
        *path, name = key.split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    return tree


def assign(config: Section, key: str, value: Any) -> None:
    """Set one canonical key of a typed tree."""
    path, _, name = key.rpartition(".")
    setattr(lookup(config, path) if path else config, name, value)


def lookup(config: Section, key: str) -> Any:
    """The value of one canonical key of a typed tree, or a section of it."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


# -- sentences: one text serves YAML, docs and the command line -------------------------------------------------------
def sentences_of(section: type) -> dict[str, str]:
    """Field name -> sentence of a settings class and its bases; fields without one (nested sections) are absent."""
    found: dict[str, str] = {}
    for kind in reversed(section.__mro__[:-1]):
        found |= _module_sentences(inspect.getfile(kind)).get(kind.__name__, {})
    return found


@cache
def _module_sentences(path: str) -> dict[str, dict[str, str]]:
    """Class name -> field name -> sentence, for one source file."""
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    return {node.name: _class_sentences(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _class_sentences(node: ast.ClassDef) -> dict[str, str]:
    sentences = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if is_field and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            sentences[field.target.id] = " ".join(str(below.value.value).split())  # type: ignore[union-attr]
    return sentences
