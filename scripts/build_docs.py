"""The documentation as a site, its links and anchors checked.

    python scripts/build_docs.py [OUT]

Needs the extra `docs` (zensical). Pages are docs/*.md; the READMEs of the project and of compat/ become pages too, with
their links turned. Any warning is an error: a link to a page, file or anchor that is not there. OUT: where the site
goes (default: site/).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from needs import need

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {"README.md": "overview.md", "README.zh.md": "zh/overview.md", "compat/README.md": "posttrain_verl.md"}
"""Pages that lie outside of docs/ -> their place in the site."""
LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s#:]+)((?:#[^)\s]*)?)\)")


def place_of(file: Path) -> Path | None:
    """Where a file of the project stands in the site; None for one that is no page."""
    name = file.relative_to(ROOT).as_posix()
    if name in OUTSIDE:
        return Path(OUTSIDE[name])
    return file.relative_to(ROOT / "docs") if file.is_relative_to(ROOT / "docs") else None


def turned(text: str, page: Path) -> str:
    """The page's text with each relative link leading from its place in the site; code keeps its words."""
    here = place_of(page)
    assert here is not None

    def turn(match: re.Match[str]) -> str:
        there = (page.parent / match[2]).resolve()
        place = place_of(there) if there.is_relative_to(ROOT) else None
        if place is None:
            return match[1] if there.exists() else match[0]  # a file of the source is named, not linked
        up = Path(*[".."] * (len(here.parts) - 1))
        return f"[{match[1]}]({(up / place).as_posix()}{match[3]})"

    return LINK.sub(turn, text)


def stage(folder: Path) -> None:
    """The site's source: pages, pictures and the configuration."""
    shutil.copytree(ROOT / "docs", folder / "docs")
    for page in [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in OUTSIDE)]:
        place = place_of(page)
        assert place is not None
        target = folder / "docs" / place
        target.write_text(turned(page.read_text(encoding="utf-8"), page), encoding="utf-8")
    (folder / "mkdocs.yml").write_text(configuration(folder / "docs"), encoding="utf-8")


def configuration(docs: Path) -> str:
    """mkdocs.yml; pages that its menu does not name come last in it."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").rstrip("\n")
    named = set(re.findall(r": ([\w/]+\.md)$", text, re.M))
    more = sorted(page for path in docs.rglob("*.md") if (page := path.relative_to(docs).as_posix()) not in named)
    return "\n".join([text, "  - More:", *(f"      - {page}" for page in more), ""])


def build(out: Path) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stage(folder)
        done = subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=folder, check=False)
        if done.returncode == 0:
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(folder / "site", out)
            print(f"written: {out} ({sum(1 for _ in out.rglob('*.html'))} pages); open {out / 'README.html'}")
        return done.returncode


if __name__ == "__main__":
    need("zensical", get=f"{sys.executable} -m pip install -e '.[docs]'")
    sys.exit(build(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site").resolve()))
