#!/usr/bin/env python3
"""Pictures of a run as a terminal shows it: terminal_pictures.py [NAME ...], into docs/images/terminal-NAME.svg.

Each command below runs in tmux, in a window of its size; when the last row shows what is waited for, the window is kept
as it stands, colours included, and the command is ended. Looked at by people: nothing here judges.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
TRAIN = f"{sys.executable} -m posttrain.cli"
SMALL = "trainer.device=cpu trainer.default_local_dir=runs"
LONG = "data.max_response_length=448 actor_rollout_ref.rollout.ignore_eos=true data.train_batch_size=64"
CELL, LINE, EDGE, SIZE = 8.43, 18, 12, 14  # of DejaVu Sans Mono and its like
INKS = {30: "#1f2328", 31: "#cf222e", 32: "#116329", 33: "#9a6700", 34: "#0969da", 35: "#8250df", 36: "#1b7c83"}
SGR = re.compile(r"\x1b\[([\d;]*)m")


@dataclass(frozen=True)
class Scene:
    """A command, the window it runs in, and the pattern in its last rows that the picture waits for."""

    width: int
    command: str
    until: str
    height: int = 24


SCENES = {
    "80": Scene(80, f"{TRAIN} train preset=embedded trainer.total_training_steps=40 {SMALL}", r"step 1[2-9]/40 .*\d"),
    "120": Scene(120, f"{TRAIN} train preset=embedded trainer.total_training_steps=40 {SMALL}", r"step 1[2-9]/40 .*\d"),
    "long-step": Scene(120, f"{TRAIN} train preset=embedded {LONG} {SMALL}", r"step 1/.*rollout .*tok/s, \S+ left", 14),
    "sft": Scene(
        80,
        f"{TRAIN} sft model.path=./model data.train_files=train.json data.response_key=ground_truth data.max_length=64 "
        f"data.train_batch_size=512 data.max_token_len_per_gpu=256 trainer.total_training_steps=6 {SMALL}",
        r"step [2-5]/6 .*update [1-9]\d*/",
        16,
    ),
}


def picture(lines: list[str], width: int) -> str:
    """An SVG of a window's rows, with their colours."""
    right, bottom = round(width * CELL + 2 * EDGE), len(lines) * LINE + 2 * EDGE
    found = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right} {bottom}" width="{right}" height="{bottom}" '
        f'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="{SIZE}">',
        f'<rect width="{right}" height="{bottom}" fill="white" stroke="#d0d7de"/>',
    ]
    for number, pieces in enumerate(_styled(lines)):
        y, column = EDGE + number * LINE + SIZE, 0
        for style, text in pieces:
            x, length = EDGE + column * CELL, len(text) * CELL
            column += len(text)
            if text.strip():
                found.append(
                    f'<text x="{x:.1f}" y="{y}" textLength="{length:.1f}" lengthAdjust="spacingAndGlyphs" '
                    f'xml:space="preserve" {style}>{escape(text)}</text>'
                )
    return "\n".join([*found, "</svg>", ""])


def _styled(lines: list[str]) -> Iterator[list[tuple[str, str]]]:
    """Every row cut where its colour changes: attributes of a text, and the text. A colour lasts until the next one,
    also over the end of a row."""
    ink, bold, dim = INKS[30], False, False
    for line in lines:
        pieces = []
        for at, text in enumerate(SGR.split(line)):
            if at % 2 == 0:
                weight, faint = ' font-weight="bold"' * bold, ' opacity="0.6"' * dim
                pieces += [(f'fill="{ink}"{weight}{faint}', text)] if text else []
                continue
            for code in (int(code or 0) for code in text.split(";")):
                if code in (0, 22):
                    bold = dim = False
                bold, dim = bold or code == 1, dim or code == 2
                ink = INKS[30] if code in (0, 39) else INKS.get(code, INKS.get(code - 60, ink))
        yield pieces


def play(scene: Scene, folder: Path, limit: float = 300) -> list[str]:
    """The rows of the window when what is waited for is there."""
    server = ["tmux", "-L", f"pictures-{folder.name}"]
    size = ["-x", str(scene.width), "-y", str(scene.height)]
    run = f"cd {folder} && PYTHONPATH={shlex.quote(str(ROOT))} {scene.command}"
    subprocess.run([*server, "new-session", "-d", *size, "bash", "--norc", "-c", f"{run}; sleep 60"], check=True)
    try:
        for _ in range(int(limit / 0.05)):
            shown = subprocess.run([*server, "capture-pane", "-p", "-e"], capture_output=True, text=True).stdout
            if re.search(scene.until, SGR.sub("", shown)):
                return shown.rstrip().split("\n")
            time.sleep(0.05)
        sys.exit(f"{scene.command}: no {scene.until!r} within {limit:.0f} s; the window:\n{shown}")
    finally:
        shell = subprocess.run([*server, "display", "-p", "#{pane_pid}"], capture_output=True, text=True).stdout
        with suppress(OSError, ValueError):  # a run outlives its terminal
            os.killpg(int(shell), signal.SIGKILL)
        subprocess.run([*server, "kill-server"], capture_output=True)


def lay_out(folder: Path) -> None:
    """The embedded model and its data, by names that are the same on every machine."""
    from posttrain.trainer.embedded import ensure_embedded

    found = ensure_embedded(print)
    for name in ("model", "train.json"):
        (folder / name).symlink_to(found / name)


def main() -> None:
    sys.path.insert(0, str(ROOT))
    for name in sys.argv[1:] or SCENES:
        scene = SCENES[name]
        with tempfile.TemporaryDirectory(prefix="pictures-") as folder:
            lay_out(Path(folder))
            lines = play(scene, Path(folder))
        (IMAGES / f"terminal-{name}.svg").write_text(picture(lines, scene.width))
        print(f"docs/images/terminal-{name}.svg", flush=True)


if __name__ == "__main__":
    main()
