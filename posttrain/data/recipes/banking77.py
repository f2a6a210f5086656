"""Banking77 (Casanueva et al. 2020, arXiv 2003.04807): classifies a bank customer's request as one of 77.

The prompt lists the labels of the data set; they are also in `extra_info["labels"]`, so that a response that names
several is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.data.recipes.recipe import Recipe, Row, Split, text_of
from posttrain.data.rows import RowTable

COLUMNS = "text and category (or label_text)"


def banking77_rows(table: RowTable, split: str) -> Iterator[Row]:
    answers = [text_of(table, number, COLUMNS, "category", "label_text").strip() for number in range(len(table))]
    labels = sorted(set(answers))
    for number, answer in enumerate(answers):
        message = text_of(table, number, COLUMNS, "text").strip()
        yield {
            "prompt": f"A bank's customer writes: {message}\n"
            f"Answer with the one label that fits, out of: {', '.join(labels)}.",
            "ground_truth": answer,
            "response": answer,
            "data_source": "banking77",
            "extra_info": {"index": number, "split": split, "labels": labels},
        }


RECIPE = Recipe(
    name="banking77",
    sentence="customers' messages to be sorted into 77 labels; scored by the label",
    splits=(Split("train"), Split("test")),
    columns=COLUMNS,
    rows=banking77_rows,
    hub_id="mteb/banking77",
)
