"""Passages of a local corpus: a .jsonl, .json, .parquet or .txt file, a folder of text files, or the embedded facts.

Those are forty facts about an island that does not exist: no model knows them, so a right answer was searched for. Each
has a question with one short answer, for examples and tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.errors import UserError

TEXTS = ("contents", "text", "content", "snippet", "passage")
_TEXT_FILES = (".txt", ".md")
_KINDS = "give a .jsonl, .json, .parquet or .txt file, a folder of text files, or `embedded`"


@dataclass(frozen=True)
class Passage:
    """What a search finds."""

    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.title}\n{self.text}" if self.title else self.text


def read_corpus(place: str) -> list[Passage]:
    """The passages of a file or folder; UserError in words."""
    path = Path(place).expanduser()
    if not path.exists():
        raise UserError(f"the corpus {place} does not exist.\n  to do:  {_KINDS}")
    try:
        passages = [one for one in _passages(path) if one.text.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the corpus {place} cannot be read: {error}") from error
    if not passages:
        raise UserError(f"the corpus {place} has no passages in it.\n  to do:  {_KINDS}")
    return passages


def passage_of(row: Mapping[str, Any]) -> Passage | None:
    """A passage from `title` and `text` or `contents` (Search-R1: the title in quotes on the first line)."""
    text = next((row[key] for key in TEXTS if isinstance(row.get(key), str)), None)
    if text is None:
        return None
    title = row.get("title")
    first, _, rest = text.partition("\n")
    if not title and rest.strip() and len(first) > 2 and first[0] == first[-1] == '"':
        return Passage(first[1:-1], rest.strip())
    return Passage(title.strip() if isinstance(title, str) else "", text.strip())


def _passages(path: Path) -> Iterator[Passage]:
    if path.is_dir():
        for file in sorted(one for one in path.rglob("*") if one.suffix in _TEXT_FILES and one.is_file()):
            yield from (Passage(file.stem, text) for text in _paragraphs(file))
    elif path.suffix == ".txt":
        yield from (Passage("", text) for text in _paragraphs(path))
    elif path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            yield from _from_rows(path, (_parsed(path, n, line) for n, line in enumerate(lines, 1) if line.strip()))
    elif path.suffix == ".json":
        rows = _parsed(path, 1, path.read_text(encoding="utf-8"))
        yield from _from_rows(path, rows if isinstance(rows, list) else [rows])
    elif path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.read_table(path)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
            raise UserError(f"the corpus {path} is no parquet file: {error}") from error
        kept = [name for name in table.column_names if name in (*TEXTS, "title")]
        yield from _from_rows(path, table.select(kept).to_pylist())
    else:
        raise UserError(f"the corpus {path} is of no kind that is known here.\n  to do:  {_KINDS}")


def _paragraphs(path: Path) -> list[str]:
    return [part.strip() for part in path.read_text(encoding="utf-8").split("\n\n") if part.strip()]


def _parsed(path: Path, line: int, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"the corpus {path} is no JSON in line {line}: {error}") from None


def _from_rows(path: Path, rows: Iterable[Any]) -> Iterator[Passage]:
    for number, row in enumerate(rows, 1):
        passage = Passage("", row) if isinstance(row, str) else passage_of(row) if isinstance(row, dict) else None
        if passage is None:
            raise UserError(
                f"row {number} of the corpus {path} has no text.\n"
                f"  to do:  name its field `text` or `contents`, and its title, if it has one, `title`"
            )
        yield passage


EMBEDDED = "embedded"


class Fact(NamedTuple):
    """A passage, and what can be asked about it."""

    title: str
    text: str
    question: str
    answer: str


def facts() -> list[Fact]:
    """The facts of the embedded corpus."""
    lines = Path(__file__).with_name("facts.txt").read_text(encoding="utf-8").splitlines()
    return [Fact(*line.split("|")) for line in lines]


def passages() -> list[Passage]:
    """The corpus `embedded`."""
    return [Passage(fact.title, fact.text) for fact in facts()]
