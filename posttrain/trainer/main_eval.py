"""`python -m posttrain.trainer.main_eval data.path=...`: the scores of generated responses, in verl's spelling.

Reads a file with a column `responses` (a list per prompt) and prints `test_score/DATA_SOURCE` beside the table of
`posttrain eval`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from posttrain.errors import UserError
from posttrain.trainer.main_generation import cli, read_pairs

# Key that names a column -> the name under which it is read here.
COLUMNS = {
    "data.data_source_key": "data_source",
    "data.reward_model_key": "reward_model",
    "data.prompt_key": "prompt",
}
KNOWN = ("data.path", "data.response_key", *COLUMNS, "custom_reward_function", "reward")


def main(args: Sequence[str]) -> int:
    values = read_pairs(args, KNOWN, "main_eval")
    if not values.get("data.path"):
        raise UserError("data.path is missing: set it to the file with the responses")
    from posttrain.commands.generation.settings import USED_BY_REWARDS, read_settings
    from posttrain.data.rows import load_rows

    rewards = [arg for arg in args if arg.startswith(("custom_reward_function.", "reward."))]
    settings = read_settings(argparse.Namespace(n=None, temperature=None), rewards, used=USED_BY_REWARDS)
    table = load_rows(values["data.path"], setting="data.path")
    for key, ours in COLUMNS.items():
        if values.get(key) not in (None, ours):
            table.rows = [
                {ours if name == values[key] else name: value for name, value in row.items() if name != ours}
                for row in table.rows
            ]
    from posttrain.commands.evaluation.evaluate import evaluate_responses
    from posttrain.commands.evaluation.report import table as lines

    report = evaluate_responses(table, settings, None, response_key=values.get("data.response_key"))
    print(lines(report))
    print({f"test_score/{name}": found["metrics"]["reward"]["value"] for name, found in report["results"].items()})
    return 0


if __name__ == "__main__":
    sys.exit(cli(main))
