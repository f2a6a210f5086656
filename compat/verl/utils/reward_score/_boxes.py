"""`\\boxed{...}` in a text."""

from __future__ import annotations


def last_boxed(text: str, commands: tuple[str, ...] = ("\\boxed", "\\fbox")) -> str | None:
    """The last of these commands with its braces, or None where there is none or its braces never close."""
    start = next((place for place in (text.rfind(command) for command in commands) if place >= 0), -1)
    if start < 0:
        return None
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if text[place] == "}" and depth == 0:
            return text[start : place + 1]
    return None
