"""Writes items of a task of reasoning-gym with their answers, for SFT.

python examples/environments/reasoning_gym_rows.py 'reasoning_gym:TASK?size=4000' FILE
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed serves too

from posttrain.data.rows import load_rows


def main(name: str, file: str) -> None:
    rows = load_rows(name).rows
    answers = [{"prompt": row["prompt"], "response": f"<answer>{row['ground_truth']}</answer>"} for row in rows]
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in answers), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
