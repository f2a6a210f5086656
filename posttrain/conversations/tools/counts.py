"""How often each tool was called and which errors it had: for metrics, and for a warning when no call succeeds."""

from __future__ import annotations

import threading
from collections import Counter

# Calls of tools that do not exist are counted together, because a model may invent any number of names.
UNKNOWN = "(unknown)"
# Kinds of errors of a call. `close` and `reward` are errors of conversations, `shutdown` of the run.
ERRORS = ("arguments", "ended", "open", "raised", "said", "timeout", "unknown")


class Counts:
    """By tool: `calls`, and each kind of error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.by_tool: dict[str, Counter[str]] = {}
        # By tool and kind; the kind `calls` has the last error of any call.
        self.last_error: dict[tuple[str, str], str] = {}

    def add(self, tool: str, kind: str, words: str = "") -> None:
        with self._lock:
            self.by_tool.setdefault(tool, Counter())[kind] += 1
            if words:
                self.last_error[tool, kind] = words
                if kind in ERRORS:
                    self.last_error[tool, "calls"] = words

    def failed(self, tool: str) -> int:
        """Calls of a tool that ended in an error."""
        counts = self.by_tool.get(tool, Counter())
        return sum(counts[kind] for kind in ERRORS)

    def troubles(self) -> list[str]:
        """One sentence for each tool of which no call has succeeded, and for errors at the end of conversations."""
        said = list[str]()
        for tool, counts in sorted(self.by_tool.items()):
            calls = counts["calls"]
            if tool != UNKNOWN and calls and self.failed(tool) >= calls:
                kinds = ", ".join(f"{counts[kind]} {kind}" for kind in ERRORS if counts[kind])
                said.append(f"all {calls} calls of the tool {tool} failed ({kinds}); the last: {self._last(tool)}")
            for kind in ("close", "reward", "shutdown"):
                if counts[kind]:
                    said.append(
                        f"`{kind}` of the tool {tool} failed {counts[kind]} times; the last: {self._last(tool, kind)}"
                    )
        return said

    def _last(self, tool: str, kind: str = "calls") -> str:
        return self.last_error.get((tool, kind), "")
