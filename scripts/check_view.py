"""Opens every page of `posttrain view` in a real Chromium: how long it takes, whether it can be used by everybody, and
pictures to look at.

    python scripts/check_view.py OUT --real RUN [--synthetic RUN] [--axe axe.min.js] [--chromium PROGRAM]

RUN is a real run; without --synthetic one of 1,000 steps x 1,024 responses is made in OUT. With --features-only only
what view_features.py does is looked at, which takes a minute and no RUN. axe.min.js is from the npm package axe-core.
Writes OUT/timings.md, OUT/axe.json and pictures; the exit status is 1 if a bound is missed, a serious finding of axe
remains, the page threw an error, its policy was broken, or it asked another host.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from devtools import Browser
from synthetic_run import make_run
from view_features import check_features, make_runs

from posttrain.tracking.samples import sample_files, step_of

FIRST_PAINT, INTERACTION, FIRST_HITS = 1000, 200, 1000
LOCAL = ("http://127.0.0.1:", "blob:http://127.0.0.1:", "data:", "about:")
CHARTS = "document.querySelectorAll('.chart:not([hidden]) .u-wrap').length > 5"
DRAWN = "document.documentElement.dataset.drawn === location.hash"
CARDS = "document.querySelectorAll('.card').length > 0"
PAGES = {
    "overview": ("#/overview", CHARTS),
    "samples": ("#/samples?colour=logprob", "document.querySelector('.tokens')"),
    "health": ("#/health", "document.querySelector('.facts')"),
    "timeline": ("#/timeline", "document.querySelector('.timeline')"),
    "runs": ("#/runs", "document.querySelector('.runs-table td')"),
    "settings": ("#/settings", "document.querySelector('.settings td')"),
}


@dataclass
class Check:
    """The browser at one run, and what was measured there."""

    browser: Browser
    address: str
    rows: list[tuple[str, str, float | None, int]] = field(default_factory=list)

    def time(self, what: str, bound: int, act: str, condition: str, *, page: str) -> None:
        measured = self.browser.timed(act, condition)
        self.rows.append((page, what, measured, bound))
        self.browser.run("new Promise((done) => setTimeout(done, 150))")

    def first_paint(self, page: str, hash_: str, condition: str) -> None:
        """From navigating until the page's own content stands."""
        self.browser.open("about:blank")
        self.browser.open(self.address.split("?")[0] + hash_)
        time.sleep(0.01)
        self.browser.run(f"({WAIT_READY})(() => {condition}, 30000)")
        painted = self.browser.run("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null")
        content = self.browser.run("window.__ready")
        self.rows.append((page, "first paint", painted, FIRST_PAINT))
        self.rows.append((page, "content", content, FIRST_PAINT))


WAIT_READY = """(condition, limit) => new Promise((done) => {
  const look = () => {
    let met = false;
    try { met = condition(); } catch { met = false; }
    if (!met && performance.now() < limit) return requestAnimationFrame(look);
    window.__ready = performance.now();
    requestAnimationFrame(() => done(true));
  };
  look();
})"""


def key(name: str) -> str:
    return f"document.body.dispatchEvent(new KeyboardEvent('keydown', {{key: {json.dumps(name)}, bubbles: true}}))"


def select(label: str, value: str) -> str:
    """Choose an option of the select with that label."""
    return (
        f"const l = {json.dumps(label)}, all = [...document.querySelectorAll('label.field')];"
        "const s = all.find((one) => one.querySelector('span').textContent === l).querySelector('select');"
        f"s.value = {json.dumps(value)}; s.dispatchEvent(new Event('change'))"
    )


def search(words: str) -> str:
    found = "const i = document.querySelector('.bar input[type=search]')"
    return f"{found}; i.value = {json.dumps(words)}; i.dispatchEvent(new Event('change'))"


def overview(check: Check, run: Path) -> None:
    page = "overview"
    check.first_paint(page, "#/overview", CHARTS)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["reward_mean"]
    told = f"document.querySelector('.chart .key').textContent === 'reward_mean{last:.4g}'"
    check.time("the last recorded value, not a smoothed one", INTERACTION, "", told, page=page)
    slide = "const s = document.querySelector('input[type=range]'); s.value = 0.9; s.dispatchEvent(new Event('input'))"
    check.time("smoothing", INTERACTION, slide, f"location.hash.includes('smooth=0.9') && {DRAWN}", page=page)
    log = "document.querySelector('.check input').click()"
    check.time("log scale", INTERACTION, log, f"location.hash.includes('log=1') && {DRAWN}", page=page)
    check.time(
        "over time", INTERACTION, select("Over", "time"), f"location.hash.includes('x=time') && {DRAWN}", page=page
    )


def samples(check: Check, steps: list[int]) -> None:
    page = "samples"
    check.first_paint(page, "#/samples", CARDS)
    time.sleep(8)  # the catalogue and the index of letters are made meanwhile
    moved = "document.querySelector('.group h2').textContent.startsWith('Step ' + {})"
    check.time("step before", INTERACTION, key("["), moved.format(steps[-2]), page=page)
    check.time(
        "next group",
        INTERACTION,
        key("j"),
        f"location.hash.includes('uid=') && {DRAWN}",
        page=page,
    )
    far = steps[len(steps) // 3]
    check.time("a far step", INTERACTION, f"location.hash = '#/samples?step={far}'", moved.format(far), page=page)
    check.time(
        "tokens by log-prob", INTERACTION, key("c"), "document.querySelectorAll('.tokens').length > 0", page=page
    )
    check.time(
        "a token",
        INTERACTION,
        "document.querySelector('.tokens span').click()",
        "document.querySelector('.inspector dd')",
        page=page,
    )
    check.time(
        "by ratio",
        INTERACTION,
        key("c"),
        "location.hash.includes('colour=ratio') && document.querySelectorAll('.tokens').length > 0",
        page=page,
    )
    check.browser.run("location.hash = '#/samples'")
    time.sleep(0.5)
    check.time(
        "best of the step",
        INTERACTION,
        select("Show", "best"),
        "document.querySelector('.note').textContent.includes('responses')",
        page=page,
    )
    wide = "document.querySelector('.check input').click()"
    for which in ("best", "worst", "truncated", "mismatch"):
        check.browser.run(f"location.hash = '#/samples?filter={which}'")
        time.sleep(0.4)
        check.browser.run("window.__note = document.querySelector('.note').textContent")
        check.time(
            f"{which} of all steps",
            INTERACTION,
            wide,
            "document.querySelector('.note').textContent !== window.__note && document.querySelectorAll('.row').length",
            page=page,
        )
    check.browser.run("location.hash = '#/samples'")
    time.sleep(0.4)
    check.time(
        "this prompt at all steps",
        INTERACTION,
        "[...document.querySelectorAll('button')].find((b) => b.textContent.startsWith('This prompt')).click()",
        "document.querySelectorAll('.steps li').length > 0",
        page=page,
    )
    check.time(
        "validation",
        INTERACTION,
        select("Of", "val"),
        "document.querySelector('.group h2').textContent.startsWith('Validation')",
        page=page,
    )


def searches(check: Check, words: dict[str, str]) -> None:
    for what, text in words.items():
        check.browser.run("location.hash = '#/samples'")
        time.sleep(0.4)
        check.time(
            f"search: {what}",
            FIRST_HITS,
            search(text),
            "document.querySelectorAll('.row mark').length > 0",
            page="samples",
        )


def first_search(check: Check, words: str) -> None:
    """Before anything was read: the server has just started."""
    check.first_paint("samples", "#/samples", CARDS)
    check.time(
        "search just after the start",
        FIRST_HITS,
        search(words),
        "document.querySelectorAll('.row mark').length > 0",
        page="samples",
    )


def health(check: Check) -> None:
    check.first_paint("health", "#/health", "document.querySelectorAll('.facts').length > 0")
    check.first_paint("timeline", "#/timeline", "document.querySelectorAll('.timeline').length > 0")
    check.time(
        "earlier stages",
        INTERACTION,
        "[...document.querySelectorAll('button')].find((b) => b.textContent === 'earlier').click()",
        "location.hash.includes('last=')",
        page="timeline",
    )


def compare(check: Check, count: int) -> None:
    check.first_paint("compare", "#/overview", CHARTS)
    check.browser.run("document.querySelector('details.runs').open = true")
    act = "document.querySelector('.pick input:not(:checked)').click()"
    check.time(
        f"a second run of {count}",
        INTERACTION,
        act,
        "document.querySelectorAll('.scroll td').length > 0",
        page="compare",
    )


AXE = """axe.run(document).then((found) => found.violations.map((one) => ({
  id: one.id, impact: one.impact, help: one.help, count: one.nodes.length,
  nodes: one.nodes.slice(0, 3).map((node) => node.html.slice(0, 160)),
})))"""


def axe(check: Check, source: str, results: list[dict[str, Any]], about: str) -> None:
    for name, (hash_, condition) in PAGES.items():
        for dark in (False, True):
            check.browser.size(1280, 900, dark=dark)
            check.browser.open("about:blank")
            check.browser.open(check.address.split("?")[0] + hash_)
            time.sleep(0.05)
            check.browser.run(f"({WAIT_READY})(() => {condition}, 20000)")
            time.sleep(0.5)
            check.browser.run(source)
            found = check.browser.run(AXE)
            results.append({"run": about, "page": name, "theme": "dark" if dark else "light", "violations": found})


def pictures(check: Check, out: Path, about: str) -> None:
    for name, (hash_, condition) in PAGES.items():
        for size, width, height, dark in (
            ("", 1280, 900, False),
            ("-dark", 1280, 900, True),
            ("-small", 390, 780, False),
        ):
            check.browser.size(width, height, dark=dark)
            check.browser.open("about:blank")
            check.browser.open(check.address.split("?")[0] + hash_)
            time.sleep(0.05)
            check.browser.run(f"({WAIT_READY})(() => {condition}, 20000)")
            if name == "samples":
                check.browser.run("document.querySelector('.tokens span')?.click()")
            time.sleep(0.6)
            check.browser.shot(out / f"{about}-{name}{size}.png")
    check.browser.size(1280, 900)


def serve(*runs: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "posttrain.cli", "view", *map(str, runs), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


def check_run(
    out: Path, run: Path, browser: Browser, options: argparse.Namespace, words: dict[str, str], found: list[Any]
) -> list[Any]:
    steps = [step_of(path) for path in sample_files(run / "samples")]
    process, address = serve(run)
    check = Check(browser, address)
    try:
        browser.size(1280, 900)
        browser.open(address)
        time.sleep(1)
        first_search(check, next(iter(words.values())))
        overview(check, run)
        samples(check, steps)
        searches(check, words)
        health(check)
        if options.axe:
            axe(check, options.axe.read_text(), found, run.name)
        pictures(check, out, run.name)
    finally:
        browser.open("about:blank")
        process.terminate()
        process.wait()
    return check.rows


def check_comparing(out: Path, browser: Browser, options: argparse.Namespace, found: list[Any]) -> list[Any]:
    """Several runs: seeds, other settings, one that is damaged; everything that a reader can do with them."""
    process, address = serve(make_runs(out / "several"))
    check = Check(browser, address)
    try:
        browser.size(1280, 900)
        browser.open(address)
        time.sleep(1)
        check_features(check, out)
        if options.axe:
            axe(check, options.axe.read_text(), found, "several")
        pictures(check, out, "several")
    finally:
        browser.open("about:blank")
        process.terminate()
        process.wait()
    return check.rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--real", type=Path, help="a real run; needed but for --features-only")
    parser.add_argument("--features-only", action="store_true")
    parser.add_argument("--synthetic", type=Path)
    parser.add_argument("--axe", type=Path)
    parser.add_argument("--chromium", default="chromium")
    options = parser.parse_args()
    if options.real is None and not options.features_only:
        parser.error("give --real RUN, or --features-only")
    options.out.mkdir(parents=True, exist_ok=True)
    browser, results, tables = Browser(options.chromium), [], {}
    try:
        if options.features_only:
            tables["several small"] = check_comparing(options.out, browser, options, results)
        else:
            tables = check_all(options, browser, results)
        problems = browser.problems()
        hosts = {url for url in browser.requests() if not url.startswith(LOCAL)}
    finally:
        browser.close()
    return report(options.out, tables, results, problems, hosts)


def check_all(options: argparse.Namespace, browser: Browser, results: list[Any]) -> dict[str, Any]:
    made, tables = options.synthetic or make_run(options.out, steps=1000, responses=1024), {}
    tables["real"] = check_run(options.out, options.real, browser, options, {"common": "1"}, results)
    words = {
        "common": "boxed",
        "Chinese": "答案是",
        "once, at step 3": "needle-3-0",
        "once, at step 990": "needle-990-128",
    }
    tables["1,000 x 1,024"] = check_run(options.out, made, browser, options, words, results)
    process, address = serve(options.real, made)
    check = Check(browser, address)
    browser.open(address)
    time.sleep(1)
    compare(check, 2)
    process.terminate()
    tables["both"] = check.rows
    tables["several small"] = check_comparing(options.out, browser, options, results)
    return tables


def report(out: Path, tables: dict[str, Any], results: list[Any], problems: list[str], hosts: set[str]) -> int:
    lines, late = ["| run | page | what | ms | bound |", "|---|---|---|---|---|"], []
    for run, rows in tables.items():
        for page, what, measured, bound in rows:
            shown = "never" if measured is None else f"{measured:.0f}"
            lines.append(f"| {run} | {page} | {what} | {shown} | {bound} |")
            if measured is None or measured > bound:
                late.append(f"{run}, {page}, {what}: {shown} ms")
    serious = [
        (one["run"], one["page"], one["theme"], v)
        for one in results
        for v in one["violations"]
        if v["impact"] in ("serious", "critical")
    ]
    (out / "timings.md").write_text("\n".join(lines) + "\n")
    (out / "axe.json").write_text(json.dumps(results, indent=1))
    print("\n".join(lines))
    for title, found in (
        ("over the bound", late),
        ("serious findings of axe", serious),
        ("errors", problems),
        ("other hosts", sorted(hosts)),
    ):
        print(f"{title}: {len(found)}", *found, sep="\n  ")
    return 1 if late or serious or problems or hosts else 0


if __name__ == "__main__":
    sys.exit(main())
