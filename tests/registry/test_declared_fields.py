"""A field says what it takes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from posttrain.settings import POSITIVE, POSITIVE_SHARE, above, at_least, choices_of, range_of, setting


@dataclass
class Settings:
    size: float = setting(2.0, range=POSITIVE)
    mode: str = setting("fast", choices=("fast", "exact"))
    names: list[str] = setting(factory=list)
    plain: int = 3


def test_defaults_are_those_of_a_plain_dataclass() -> None:
    assert Settings() == Settings(2.0, "fast", [], 3)
    assert Settings().names is not Settings().names


def test_ranges_and_choices_are_read_from_the_fields() -> None:
    size, mode, names, plain = fields(Settings)
    assert [range_of(field) for field in (size, mode, names, plain)] == [POSITIVE, None, None, None]
    assert [choices_of(field) for field in (size, mode, names, plain)] == [(), ("fast", "exact"), (), ()]


def test_ranges_say_what_they_allow() -> None:
    assert [limits.words for limits in (POSITIVE, at_least(16), above(1), POSITIVE_SHARE)] == [
        "above 0",
        "16 or more",
        "above 1",
        "above 0 and at most 1",
    ]
    assert POSITIVE.allows(0.1) and not POSITIVE.allows(0) and at_least(16).allows(16) and not above(1).allows(1)
    assert POSITIVE_SHARE.allows(1) and not POSITIVE_SHARE.allows(1.01)
