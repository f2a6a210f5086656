"""Schemas from functions, and arguments held against them."""

from __future__ import annotations

from typing import Any, Literal, Optional

import pytest

from posttrain.conversations.tools.arguments import ArgumentError, convert_arguments
from posttrain.conversations.tools.schema import schema_of
from posttrain.errors import UserError


def weather(
    city: str,
    days: int = 3,
    unit: Literal["C", "F"] = "C",
    tags: list[str] | None = None,
    wind: Optional[float] = None,  # noqa: UP045
    extra: dict[str, Any] | None = None,
    loud: bool = False,
    *,
    api_key: str = "",
) -> str:
    """Says what the weather
    will be.

    More for readers of the code: not for the model.

    Args:
        city: Name of the city,
            in English
        days (int): How many days

    Returns:
        words: for the model
    """
    return f"{city} {days} {unit} {tags} {wind} {extra} {loud} {api_key}"


def test_a_schema_comes_from_hints_defaults_and_docstring():
    assert schema_of(weather, "weather") == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says what the weather will be.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name of the city, in English"},
                    "days": {"type": "integer", "description": "How many days", "default": 3},
                    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                    "tags": {"type": ["array", "null"], "items": {"type": "string"}},
                    "wind": {"type": ["number", "null"]},
                    "extra": {"type": ["object", "null"], "additionalProperties": {}},
                    "loud": {"type": "boolean", "default": False},
                },
                "required": ["city"],
            },
        },
    }


def no_docstring(x: int) -> int:
    return x


def no_hint(x) -> int:
    """Doubles."""
    return 2 * x


def star(*x: int) -> int:
    """Sums."""
    return sum(x)


def bytes_in(x: bytes) -> int:
    """Counts."""
    return len(x)


def wrong_args(x: int) -> int:
    """Doubles.

    Args:
        y: what to double
    """
    return x


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (no_docstring, "has no docstring"),
        (no_hint, "parameter x of the tool t has no type hint"),
        (star, "no schema can describe"),
        (bytes_in, "bytes, cannot be written in JSON"),
        (wrong_args, "describes y, which it does not take"),
    ],
)
def test_a_function_that_a_model_could_not_understand_is_refused(function, why):
    with pytest.raises(UserError, match=why):
        schema_of(function, "t")


PARAMETERS = schema_of(weather, "weather")["function"]["parameters"]


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"days": "3"}, 3),
        ({"days": 3.0}, 3),
        ({"days": " -12 "}, -12),
        ({"wind": 2}, 2),
        ({"wind": "2.5e1"}, 25.0),
        ({"wind": None}, None),
        ({"loud": "True"}, True),
        ({"loud": False}, False),
        ({"tags": '["a", "b"]'}, ["a", "b"]),
        ({"tags": [1]}, ["1"]),
        ({"tags": "['a', 'b']"}, ["a", "b"]),
        ({"extra": "{'a': [True, None, -1]}"}, {"a": [True, None, -1]}),
        ({"extra": '{"a": 1}'}, {"a": 1}),
        ({"unit": "F"}, "F"),
        ({"city": 12}, "12"),
    ],
)
def test_types_are_changed_where_nothing_is_lost(given, made):
    fitted = convert_arguments("weather", PARAMETERS, {"city": "Rome", **given})
    (key,) = given
    assert fitted[key] == made and type(fitted[key]) is type(made)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"days": 3.5}, "weather: days must be integer, not 3.5."),
        ({"days": "3.5"}, 'weather: days must be integer, not "3.5".'),
        ({"days": True}, "weather: days must be integer, not true."),
        ({"days": "9" * 5000}, "weather: days must be integer"),
        ({"wind": float("nan")}, "weather: wind must be number or null, not NaN."),
        ({"wind": "1e999"}, "weather: wind must be number or null"),
        ({"loud": "yes"}, 'weather: loud must be boolean, not "yes".'),
        ({"unit": "K"}, 'weather: unit must be one of "C", "F", not "K".'),
        ({"tags": "a"}, 'weather: tags must be array of string or null, not "a".'),
        ({"tags": "['a', open('x')]"}, "weather: tags must be array of string or null"),
        ({"tags": "('a',)"}, "weather: tags must be array of string or null"),
        ({"extra": "{1: {2}}"}, "weather: extra must be object"),
        ({"extra": "{'a': 1e999}"}, "weather: extra must be object"),
        ({"tags": "[" * 10_000}, "weather: tags must be array of string or null"),
        ({"tags": [{}]}, "weather: tags[0] must be string, not {}."),
        ({"city": None}, "weather: city must be string, not null."),
        ({"town": "Rome"}, 'weather has no parameter "town"; it takes city (string), days (integer)'),
        ({"api_key": "x"}, 'weather has no parameter "api_key"'),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_one_sentence(given, why):
    with pytest.raises(ArgumentError) as caught:
        convert_arguments("weather", PARAMETERS, {"city": "Rome", **given})
    assert str(caught.value).startswith(why) and "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_missing_arguments_and_arguments_that_are_no_object_are_refused():
    with pytest.raises(ArgumentError, match=r"weather was called without city; it takes city \(string\)"):
        convert_arguments("weather", PARAMETERS, {})
    with pytest.raises(ArgumentError, match="must be a JSON object"):
        convert_arguments("weather", PARAMETERS, ["Rome"])
