"""One registry for all kinds of things: names, order, errors, and what is imported when."""

from __future__ import annotations

import subprocess
import sys
from enum import StrEnum

import pytest

from posttrain.errors import UserError
from posttrain.registry import Registry, built_in_names, nearest_name, unknown_name


class Shape(StrEnum):
    ROUND = "round"


def first() -> int:
    return 1


def second() -> int:
    return 2


def test_an_entry_is_found_by_its_name_or_by_an_enum_member() -> None:
    shapes: Registry = Registry("shape")
    assert shapes.register(Shape.ROUND)(first) is first
    shapes["square"] = second
    assert shapes.find("round") is shapes[Shape.ROUND] is first
    assert list(shapes) == ["round", "square"] and len(shapes) == 2


def test_an_unknown_name_is_answered_with_the_nearest_and_all_of_them() -> None:
    shapes: Registry = Registry("shape", hint="It is set by `shape`.")
    shapes["square"], shapes["circle"] = first, second
    with pytest.raises(UserError) as caught:
        shapes.find("sqaure")
    text = "Unknown shape `sqaure`. Did you mean `square`? Known: circle, square. It is set by `shape`."
    assert str(caught.value) == text
    with pytest.raises(UserError, match=r"^Unknown shape `line`\. Known: circle, square"):
        shapes.find("line")


def test_the_nearest_name_is_given_only_where_it_is_near() -> None:
    assert nearest_name("grop", ["grpo", "rloo"]) == "grpo"
    assert nearest_name("gspo", ["grpo", "rloo"]) is None
    assert unknown_name("loss", "x", ["b", "a"]) == "Unknown loss `x`. Known: a, b."


def test_a_name_that_is_taken_by_another_is_an_error_that_names_both() -> None:
    shapes: Registry = Registry("shape", error=ValueError)
    shapes.add("round", first)
    shapes.add("round", first)  # a cell of a notebook that runs twice
    here = r".*test_one_registry"
    text = rf"The shape `round` is already registered by {here}\.first, so {here}\.second cannot take"
    with pytest.raises(ValueError, match=text):
        shapes.add("round", second)
    assert shapes["round"] is first


def test_a_decorator_without_a_name_is_answered_in_words() -> None:
    with pytest.raises(UserError, match="needs a name in quotes"):
        Registry("shape").register(first)  # pyright: ignore[reportArgumentType]


def test_names_of_built_in_entries_are_read_without_an_import() -> None:
    script = """
import sys
from posttrain.registry import built_in_names
print(built_in_names("rollout/engines.py", "register_engine"), "torch" in sys.modules)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said == "('native', 'hf', 'vllm', 'sglang', 'server') False\n"
    assert built_in_names("data/sampler.py", "register_sampler") == ("default", "curriculum")


def test_the_files_of_a_package_are_found_when_the_registry_is_read() -> None:
    script = """
import sys
from posttrain.registry import Registry
pages = Registry("page", package="posttrain.machines")
pages.add("mine", print)
print("posttrain.machines.spawn" in sys.modules)
print(list(pages), "posttrain.machines.spawn" in sys.modules)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said == "False\n['mine'] True\n"
