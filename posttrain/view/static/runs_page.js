// Runs: a table of all of them that sorts by any column; what is ticked is drawn together.

import {h, put, seconds, short} from "./dom.js";
import {runTints, tintName} from "./palette.js";
import {chosenRuns, go, place, withRun} from "./state.js";
import {explainMetricsOf} from "./tips.js";

const when = (time) => (time ? new Date(time * 1000).toLocaleString("en-GB", {month: "short", day: "numeric", hour: "2-digit", minute: "2-digit"}).replace(",", "") : "–");
const last = (column) => (run) => run.reached?.[column]?.value ?? null;
/** Key, head, the value by which it sorts, how it is shown. */
const COLUMNS = [
  ["name", "run", (run) => run.name],
  ["status", "status", (run) => run.status],
  ["step", "step", (run) => run.step, (run) => (run.step === null ? "–" : `${run.step}${run.total_steps ? ` / ${run.total_steps}` : ""}`)],
  ["reward", "reward", last("reward")],
  ["accuracy", "accuracy", last("accuracy")],
  ["validation", "validation", last("validation")],
  ["loss", "loss", last("loss")],
  ["throughput", "tok/s", last("throughput")],
  ["spent", "time", (run) => (run.reached?.written && run.reached.started ? run.reached.written - run.reached.started : null), (run, value) => seconds(value)],
  ["started", "started", (run) => run.reached?.started ?? null, (run, value) => when(value)],
];
const ALWAYS = new Set(["name", "status", "step", "started"]);

export function runsPage(root) {
  const bar = h("div", {class: "bar"}), scroll = h("div", {class: "scroll whole", tabindex: 0, role: "region", "aria-label": "Runs"});
  put(root, h("h1", {class: "visually-hidden"}, "Runs"), bar, scroll);

  function show(runs) {
    const state = place(), chosen = chosenRuns(runs);
    explainMetricsOf(runs.map((run) => run.name).slice(-8));
    drawBar(runs, chosen, state);
    const columns = COLUMNS.filter(([key, , value]) => ALWAYS.has(key) || runs.some((run) => value(run) !== null));
    const words = (state.find || "").toLowerCase();
    const shown = sorted(runs.filter((run) => `${run.name} ${run.status} ${run.problem || ""}`.toLowerCase().includes(words)), state);
    const focused = scroll.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    put(scroll, h("table", {class: "runs-table"},
      h("thead", {}, h("tr", {}, h("th", {scope: "col"}, h("span", {class: "visually-hidden"}, "drawn")), columns.map((column) => head(column, runs, state)))),
      h("tbody", {}, shown.map((run) => row(run, columns, runs, chosen)))));
    if (focused) [...scroll.querySelectorAll("[data-key]")].find((one) => one.dataset.key === focused)?.focus();
    if (!shown.length) scroll.append(h("p", {class: "soft"}, "No run has these words."));
  }

  function drawBar(runs, chosen, state) {
    if (bar.contains(document.activeElement) && document.activeElement.type === "search") return drawCount();
    const words = h("input", {type: "search", placeholder: "name or status", value: state.find || "", oninput: () => go({find: words.value || null}, true)});
    put(bar, h("label", {class: "field"}, h("span", {}, "Narrow"), words), h("span", {class: "count"}));
    drawCount();

    function drawCount() {
      put(bar.querySelector(".count"), h("button", {class: "strong", onclick: () => go({page: "overview", runs: chosen.join("\t"), find: null, sort: null, order: null})}, chosen.length === 1 ? `Draw ${chosen[0]}` : `Compare ${chosen.length} runs`));
    }
  }

  function head([key, text], runs, state) {
    const {by, falling} = order(state), metrics = [...new Set(runs.map((run) => run.reached?.[key]?.metric).filter(Boolean))];
    return h("th", {scope: "col", class: ALWAYS.has(key) && key !== "step" ? "" : "number", "aria-sort": by === key ? (falling ? "descending" : "ascending") : null},
      h("button", {class: "sort", "data-key": `sort ${key}`, "data-metrics": metrics.join("\t") || null, onclick: () => go({sort: key, order: by === key && falling ? "up" : by === key ? "down" : FIRST_UP.has(key) ? "up" : "down"}, true)}, text, by === key ? (falling ? " ▾" : " ▴") : ""));
  }

  function row(run, columns, runs, chosen) {
    const tints = runTints(runs, chosen), at = tints.get(run.name), dot = h("span", {class: "dot"});
    if (at !== undefined) dot.style.background = `var(${tintName(at)})`;
    const tick = (event) => go({runs: withRun(runs, run.name, event.target.checked)}, true);
    return h("tr", {class: run.problem ? "damaged" : ""},
      h("td", {}, h("input", {type: "checkbox", "data-key": `tick ${run.name}`, "aria-label": `draw ${run.name}`, checked: chosen.includes(run.name), onchange: tick})),
      columns.map(([key, , value, words]) => {
        if (key === "name") return h("th", {scope: "row"}, dot, h("a", {href: `#/overview?${new URLSearchParams({runs: run.name, run: run.name})}`, "data-key": `run ${run.name}`}, run.name), run.problem && h("p", {class: "problem"}, run.problem));
        if (key === "status") return h("td", {}, h("span", {class: `status ${run.status}`}, run.status));
        const found = value(run), metric = run.reached?.[key]?.metric;
        return h("td", {class: key === "started" ? "" : "number", title: metric || (key === "started" && found ? new Date(found * 1000).toString() : null)}, words ? words(run, found) : short(found));
      }));
  }

  return {show};
}

const FIRST_UP = new Set(["name", "status", "loss"]);

function order(state) {
  const by = COLUMNS.some(([key]) => key === state.sort) ? state.sort : "started";
  return {by, falling: state.order ? state.order === "down" : !FIRST_UP.has(by)};
}

/** By the chosen column; what has no value there comes last either way. */
function sorted(runs, state) {
  const {by, falling} = order(state), value = COLUMNS.find(([key]) => key === by)[2];
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", {numeric: true}) : a - b);
  return runs.slice().sort((one, other) => {
    const a = value(one), b = value(other);
    if (a === null || b === null) return (a === null) - (b === null);
    return falling ? compare(b, a) : compare(a, b);
  });
}
