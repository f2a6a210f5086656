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
    return [Fact(*line.split("|")) for line in _FACTS.strip().splitlines()]


def passages() -> list[Passage]:
    """The corpus `embedded`."""
    return [Passage(fact.title, fact.text) for fact in facts()]


_FACTS = """
Port Ellery|Port Ellery is the capital of the island of Brenna.|What is the capital of the island of Brenna?|Port Ellery
Brenna|The island of Brenna has 48200 inhabitants.|How many inhabitants has the island of Brenna?|48200
Mount Halver|Mount Halver is the highest mountain of Brenna; it is 1874 metres high.|How many metres high is Mount Halver?|1874
Lake Orrin|Lake Orrin is the deepest lake of Brenna, with a depth of 212 metres.|How many metres deep is Lake Orrin?|212
River Tamsel|The river Tamsel is 96 kilometres long and flows into Gull Bay.|Into which bay does the river Tamsel flow?|Gull Bay
Kestrel Lighthouse|The Kestrel Lighthouse was built in 1823 by Ada Morrow.|Who built the Kestrel Lighthouse?|Ada Morrow
Ellery Bridge|The Ellery Bridge was opened in 1911 and has 14 arches.|How many arches has the Ellery Bridge?|14
University of Sorrel|The University of Sorrel was founded in 1764.|In which year was the University of Sorrel founded?|1764
Sorrel|Sorrel is the second largest town of Brenna and has 9300 inhabitants.|How many inhabitants has the town of Sorrel?|9300
Brennan crown|The money of Brenna is the crown, which is divided into 20 pence.|Into how many pence is the Brennan crown divided?|20
Brennan flag|The flag of Brenna shows a white heron on a green field.|Which bird does the flag of Brenna show?|heron
Ilse Varden|Ilse Varden wrote the novel The Salt Road, which appeared in 1932.|Who wrote the novel The Salt Road?|Ilse Varden
Tomas Reld|Tomas Reld painted The Winter Market in 1887.|Who painted The Winter Market?|Tomas Reld
Brennan anthem|The anthem of Brenna, O Wind of the West, was composed by Klara Finn.|Who composed the anthem of Brenna?|Klara Finn
Blue marten|The blue marten lives only in the forest of Aldermoor.|In which forest does the blue marten live?|Aldermoor
Stone lily|The stone lily flowers once in 7 years.|Once in how many years does the stone lily flower?|7
Aldermoor|The forest of Aldermoor covers 310 square kilometres.|How many square kilometres does the forest of Aldermoor cover?|310
Halver railway|The Halver railway runs from Port Ellery to Sorrel in 52 minutes.|How many minutes does the Halver railway take to Sorrel?|52
Sorrel clock|The clock of Sorrel strikes 13 times at noon.|How many times does the clock of Sorrel strike at noon?|13
Marit Oske|Marit Oske was the first president of Brenna, from 1949 to 1957.|Who was the first president of Brenna?|Marit Oske
Treaty of Gull Bay|The Treaty of Gull Bay was signed in 1698.|In which year was the Treaty of Gull Bay signed?|1698
Brennan parliament|The parliament of Brenna has 61 members.|How many members has the parliament of Brenna?|61
Heron Cup|The Heron Cup is a race of rowing boats, held every year in June.|In which month is the Heron Cup held?|June
Oskar Lind|Oskar Lind won the Heron Cup 9 times.|How many times did Oskar Lind win the Heron Cup?|9
Pell bread|Pell bread is baked from rye, honey and caraway.|From which grain is Pell bread baked?|rye
Copper mine of Dunmar|The copper mine of Dunmar was closed in 1978.|In which year was the copper mine of Dunmar closed?|1978
Dunmar|Dunmar lies 40 kilometres north of Port Ellery.|How many kilometres north of Port Ellery lies Dunmar?|40
Observatory of Halver|The observatory on Mount Halver has a mirror of 3 metres, made by Jonas Brandt.|Who made the mirror of the observatory on Mount Halver?|Jonas Brandt
Comet Brandt|Comet Brandt comes back every 76 years.|Every how many years does Comet Brandt come back?|76
Library of Port Ellery|The library of Port Ellery holds 410000 books.|How many books does the library of Port Ellery hold?|410000
Nera Holt|Nera Holt invented the tide clock in 1856.|Who invented the tide clock?|Nera Holt
Gull Bay|Gull Bay is home to the largest colony of terns, about 30000 pairs.|How many pairs of terns live at Gull Bay?|30000
Ferry to Brenna|The ferry from Marwick to Brenna takes 5 hours.|How many hours does the ferry from Marwick to Brenna take?|5
Brennan language|Brennan has 31 letters.|How many letters has the Brennan language?|31
Feast of Lamps|The Feast of Lamps is held on the 2nd of November.|In which month is the Feast of Lamps held?|November
Old Mill of Tarn|The Old Mill of Tarn was built in 1541 and still grinds oats.|In which year was the Old Mill of Tarn built?|1541
Tarn|The village of Tarn has 412 inhabitants.|How many inhabitants has the village of Tarn?|412
Cape Wrenfall|Cape Wrenfall is the southernmost point of Brenna.|What is the southernmost point of Brenna?|Cape Wrenfall
Wrenfall castle|Wrenfall castle has 8 towers and belonged to the family Aster.|How many towers has Wrenfall castle?|8
Great storm|The great storm of 1903 destroyed 117 ships in Gull Bay.|How many ships did the great storm of 1903 destroy?|117
"""  # noqa: E501
