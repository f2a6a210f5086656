// Memory: the measured peaks of each stage over the steps, beside what was planned.

import {ask} from "./api.js";
import {lineChart} from "./charts.js";
import {h, put, short} from "./dom.js";
import {columns} from "./history.js";
import {dashOf} from "./palette.js";

const MEMORY = /^perf\/.*memory/;

export async function memorySection(element, run) {
  const names = (await columns(run, [])).names.filter((name) => MEMORY.test(name));
  const data = await columns(run, names);
  const place = h("div");
  put(element, h("h2", {}, "Memory"), place);
  if (!names.length) put(place, h("p", {class: "soft"}, "This run did not measure its memory."));
  else {
    const chart = lineChart("Peaks, GB");
    put(place, chart.element);
    chart.set(() => names.map((name, i) => ({label: name, metric: name, x: data.steps, y: data.values[name], colour: i, dash: dashOf(Math.floor(i / 8))})));
  }
  const peaks = Object.fromEntries(names.map((name) => [name, Math.max(...data.values[name].filter((value) => value !== null), 0)]));
  place.append(planned(run, peaks));
}

function planned(run, peaks) {
  const out = h("div");
  const button = h("button", {onclick: async () => {
    button.disabled = true;
    put(out, h("p", {class: "soft"}, "planning … (this loads no weights)"));
    try {
      const plan = await ask("plan", {run});
      put(out, h("p", {}, plan.words), table(plan, peaks));
    } catch (error) {
      put(out, h("p", {class: "problem"}, error.message));
    }
    button.disabled = false;
  }}, "Compare with the plan");
  return h("div", {}, button, out);
}

function table(plan, peaks) {
  const measured = (stages) => Math.max(0, ...stages.map((stage) => peaks[`perf/memory_gb/${stage}`] || 0)) || null;
  const rows = plan.stages.map(({stage, gb, measured: stages}) => h("tr", {}, h("th", {scope: "row"}, stage), h("td", {}, short(gb, 3)), h("td", {}, short(measured(stages), 3))));
  const whole = Math.max(0, ...Object.values(peaks));
  return h("table", {}, h("thead", {}, h("tr", {}, ["stage", "planned, GB", "measured, GB"].map((text) => h("th", {scope: "col"}, text)))),
    h("tbody", {}, rows, h("tr", {}, h("th", {scope: "row"}, "largest"), h("td", {}, short(plan.peak_gb, 3)), h("td", {}, short(whole || null, 3)))));
}
