"""What a reader does with several runs, done in a real browser for check_view.py: sorting the table of runs, comparing,
seeds as a band, zooming, explanations, files of a chart, addresses that lead back, settings, samples with signal."""

from __future__ import annotations

import csv
import shutil
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from synthetic_run import make_run

BOUND = 1000
"""Milliseconds: whether it happens matters here; what must be quick is timed by check_view.py on large runs."""
STEPS = 120
SEEDS = ("grpo-seed-1", "grpo-seed-2")
OTHER, DAMAGED = "grpo-lr3e-6", "copied"
CHARTS = "[...document.querySelectorAll('.grid > .chart:not([hidden])')]"
DRAWN = "document.documentElement.dataset.drawn === location.hash"


def make_runs(folder: Path) -> Path:
    """Two seeds of one run, one with another learning rate, and one whose status is broken."""
    shutil.rmtree(folder, ignore_errors=True)  # lines of metrics would be added to those of another time
    for seed, name in enumerate(SEEDS, 1):
        make_run(folder, steps=STEPS, responses=32, seed=seed, name=name)
    make_run(folder, steps=STEPS, responses=32, seed=1, name=OTHER, lr=3e-6)
    damaged = make_run(folder, steps=5, responses=16, seed=7, name=DAMAGED, lr=1e-7)
    (damaged / "status.json").write_text('{"status": [')
    return folder


def check_features(check: Any, out: Path) -> None:
    """`check` is check_view.py's: each of these is one of its rows, and one that never happens fails."""
    _table(check)
    _comparing(check)
    _zooming(check)
    _explaining(check)
    _alone(check)
    _files(check, out / "downloads")
    _samples(check)
    _settings(check)


def _open(check: Any, page: str, condition: str, **query: str) -> None:
    check.browser.open("about:blank")
    check.browser.open(f"{check.address.split('?')[0]}#/{page}?{urlencode(query)}")
    time.sleep(0.05)
    waited = check.browser.timed("", condition)
    check.rows.append((page, "opened at its address", waited, 10 * BOUND))


def _compared(check: Any, **query: str) -> None:
    _open(check, "overview", f"{CHARTS}.length > 5 && {DRAWN}", runs="\t".join([*SEEDS, OTHER]), **query)


def _button(text: str) -> str:
    return f"[...document.querySelectorAll('button')].find((b) => b.textContent.startsWith('{text}')).click()"


def _table(check: Any) -> None:
    _open(check, "runs", "document.querySelectorAll('.runs-table tbody tr').length === 4")
    first = "document.querySelector('.runs-table tbody a').textContent"
    for column, falling, rising in (("reward", OTHER, DAMAGED), ("run", DAMAGED, SEEDS[1])):
        sort = _button(column)
        check.time(f"sorted by {column}", BOUND, sort, f"{first} === '{falling}'", page="runs")
        check.time(f"sorted by {column}, again", BOUND, sort, f"{first} === '{rising}'", page="runs")
    said = "document.querySelector('tr.damaged .problem').textContent.startsWith('status.json')"
    check.time("a damaged run is one entry with a sentence", BOUND, "", said, page="runs")
    check.browser.run("for (let n = 0; n < 4; n++) document.querySelector('tbody input:not(:checked)')?.click()")
    runs = "document.querySelectorAll('.pick input:checked').length === 4"
    check.time("ticked runs are compared", BOUND, _button("Compare 4"), f"{runs} && {CHARTS}.length > 5", page="runs")


def _comparing(check: Any) -> None:
    _compared(check)
    seeds = f"{CHARTS}[0].querySelector('.key').textContent.includes('grpo-seed (mean of 2 seeds)')"
    check.time("seeds as mean and band", BOUND, "", seeds, page="overview")
    apart = f"{CHARTS}.every((c) => !c.textContent.includes('mean of'))"
    switch = "[...document.querySelectorAll('.check')].find((l) => l.textContent.startsWith('Seeds')).click()"
    check.time("seeds one by one", BOUND, switch, f"location.hash.includes('seeds=0') && {apart}", page="overview")
    same = f"""[{",".join(f"'{name}'" for name in (*SEEDS, OTHER))}].every((name) => {{
      const dot = [...document.querySelectorAll('.pick')].find((one) => one.textContent.startsWith(name));
      const all = {CHARTS}.flatMap((c) => [...c.querySelectorAll('.key')]);
      const keys = all.filter((k) => k.textContent.startsWith(name));
      const colours = new Set(keys.map((k) => k.querySelector('line')?.style.stroke).filter(Boolean));
      return keys.length > 5 && colours.size === 1 && colours.has(dot.querySelector('.dot').style.background);
    }})"""
    check.time("a run has one colour in every chart", BOUND, "", same, page="overview")
    whole = f"""{CHARTS}.every((c) => [...c.querySelectorAll('.key')].every((k) => {{
      const inner = k.getBoundingClientRect(), outer = c.getBoundingClientRect();
      return inner.right <= outer.right && inner.bottom <= outer.bottom && k.scrollWidth <= k.clientWidth + 1;
    }}))"""
    for width in (1280, 800, 390):
        check.browser.size(width, 900)
        check.time(f"legends are whole at {width} px", BOUND, "", whole, page="overview")
    check.browser.size(1280, 900)


RANGES = "new Set([...document.querySelectorAll('.plot[data-range]')].map((p) => p.dataset.range))"


def _zooming(check: Any) -> None:
    _compared(check)
    left, top, width, height = check.browser.place_of(".u-over")
    at = top + height / 2
    check.browser.mouse((left + width * 0.25, at), (left + width * 0.4, at), (left + width * 0.5, at), press=True)
    zoomed = f"{RANGES}.size === 1 && !{RANGES}.has('all') && /from=\\d+&to=\\d+/.test(location.hash)"
    check.time("a range selected in one chart is shown by all", BOUND, "", zoomed, page="overview")
    check.browser.run("document.querySelector('main').scrollTop = 600")
    check.time("also by those drawn later", BOUND, "", f"{RANGES}.size === 1", page="overview")
    whole = f"{RANGES}.size === 1 && {RANGES}.has('all')"
    check.time("Back leaves the zoom", BOUND, "history.back()", whole, page="overview")
    check.time("Forward returns to it", BOUND, "history.forward()", zoomed, page="overview")
    check.time("reset", BOUND, _button("Reset zoom"), f"{whole} && !location.hash.includes('from=')", page="overview")
    _compared(check, **{"from": "30", "to": "60"})
    check.time("a zoom in the address", BOUND, "", f"{RANGES}.size === 1 && {RANGES}.has('30 60')", page="overview")


def _explaining(check: Any) -> None:
    _compared(check)
    left, top, width, height = check.browser.place_of(".info")
    check.browser.mouse((left + width / 2, top + height / 2))
    told = (
        "!document.getElementById('tip').hidden && document.getElementById('tip').textContent.includes('Mean reward')"
    )
    check.time("a metric explained", 20 * BOUND, "", told, page="overview")


def _alone(check: Any) -> None:
    _compared(check)
    one = f"{CHARTS}.length === 1 && {CHARTS}[0].textContent.includes('Entropy') && {DRAWN}"
    check.time("a chart alone", BOUND, _button("Entropy"), one, page="overview")
    check.time("Back to all charts", BOUND, "history.back()", f"{CHARTS}.length > 5", page="overview")
    check.browser.open("about:blank")
    _open(check, "overview", one, runs=OTHER, chart="Entropy")


def _files(check: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    check.browser.save_downloads_in(folder)
    _compared(check, **{"from": "30", "to": "60"})
    for kind in ("SVG", "CSV"):
        check.browser.run(f"document.querySelector('[aria-label=\"Reward as {kind}\"]').click()")
        deadline = time.time() + 20
        while not (folder / f"reward.{kind.lower()}").exists() and time.time() < deadline:
            time.sleep(0.1)
    picture, table = folder / "reward.svg", folder / "reward.csv"
    shapes = {element.tag.rpartition("}")[2] for element in ET.parse(picture).iter()} if picture.exists() else set()
    check.rows.append(("overview", "a chart as SVG", 0.0 if {"polyline", "polygon", "text"} <= shapes else None, BOUND))
    rows = list(csv.DictReader(table.open())) if table.exists() else []
    right = [row["step"] for row in rows] == [str(step) for step in range(30, 61)]
    mean, other = "grpo-seed (mean of 2 seeds) · reward_mean", f"{OTHER} · reward_mean"
    right = right and all(
        float(row[f"{mean} lowest"]) <= float(row[mean]) <= float(row[f"{mean} highest"]) and row[other] for row in rows
    )
    check.rows.append(("overview", "its numbers as CSV", 0.0 if right else None, BOUND))


def _samples(check: Any) -> None:
    """The first group of every step that synthetic_run.py makes has no signal."""
    second = "document.querySelector('.row[aria-selected=true]').getAttribute('aria-posinset') === '2'"
    _open(check, "samples", f"{second} && /uid=/.test(location.hash) && /step={STEPS}/.test(location.hash)", run=OTHER)
    place = "window.__place = location.hash"
    moved = f"location.hash !== window.__place && {DRAWN}"
    key = "document.body.dispatchEvent(new KeyboardEvent('keydown', {{key: '{}', bubbles: true}}))"
    check.time("next group", BOUND, f"{place}; {key.format('j')}", moved, page="samples")
    check.time("Back to the group before", BOUND, "history.back()", "location.hash === window.__place", page="samples")
    chosen = "document.querySelector('.card.chosen')?.dataset.sample === '3'"
    response = "[...document.querySelectorAll('.card button')].find((b) => b.textContent === 'response 3').click()"
    check.time(
        "a response has an address", BOUND, response, f"{chosen} && /sample=3/.test(location.hash)", page="samples"
    )
    again = check.browser.run("location.hash")
    check.browser.open("about:blank")
    check.browser.open(check.address.split("?")[0] + again)
    time.sleep(0.05)
    check.rows.append(("samples", "and opens there", check.browser.timed("", chosen), 10 * BOUND))


def _settings(check: Any) -> None:
    first = "document.querySelector('.settings tbody').textContent"
    _open(check, "settings", f"{first}.includes('algorithm.adv_estimatorgrpogae')", run=OTHER)
    has = "document.querySelector('{}').textContent.includes('{}')"
    made = f"{has.format('.command', 'python')} && {has.format('main', 'torch')}"
    check.time("command and versions", BOUND, "", made, page="settings")
    words = "const i = document.querySelector('input[type=search]'); i.value = 'Learning'"
    narrow = (
        "document.querySelectorAll('.settings tbody tr').length > 0 &&"
        "[...document.querySelectorAll('.settings tbody tr')].every((row) => (row.textContent + "
        "row.querySelector('span').dataset.tip).toLowerCase().includes('learning'))"
    )
    typed = f"{words}; i.dispatchEvent(new Event('input'))"
    check.time("search", BOUND, typed, f"{narrow} && location.hash.includes('find=Learning')", page="settings")
