// Overview: the curves of one or more runs, where their time goes, and the settings in which they differ.

import {ask} from "./api.js";
import {lineChart, stackedChart} from "./charts.js";
import {choice, h, put} from "./dom.js";
import {columns} from "./history.js";
import {dashOf, runTints, tintName} from "./palette.js";
import {familiesOf, meanAndBand} from "./seeds.js";
import {settingsTable} from "./settings.js";
import {smoothed} from "./smooth.js";
import {chosenRuns, go, place, withRun} from "./state.js";
import {explainMetricsOf} from "./tips.js";
import {zoomed, zoomOut} from "./zoom.js";

const PANELS = [
  ["Reward", ["reward_mean", "right/mean"]],
  ["Validation", [/^val\/.*(mean@|loss|accuracy)/]],
  ["Loss", ["train/loss"]],
  ["KL to the reference", ["kl_loss", "actor/reward_kl_penalty"]],
  ["Entropy", ["actor/entropy"]],
  ["Clip fraction", ["actor/pg_clipfrac"]],
  ["Response length", ["response_length", "response_length/right/mean", "response_length/wrong/mean"]],
  ["Cut off at the length limit", ["response_length/clip_ratio"]],
  ["Groups without signal", ["groups/no_signal", "groups/all_right", "groups/all_wrong"]],
  ["Rollout against trainer", ["mismatch/logp_mean", "mismatch/logp_max", "mismatch/k3_kl"]],
  ["Staleness", [/stale/]],
  ["Gradient norm", ["actor/grad_norm", "train/grad_norm"]],
  ["Tokens per second", ["perf/throughput"]],
  ["Memory, GB", ["perf/memory_gb", /^perf\/max_memory/]],
];
const USUAL = ["time", "timing_s/*", "val/*", "perf/*", ...PANELS.flatMap(([, rules]) => rules.filter((rule) => typeof rule === "string" && !rule.startsWith("perf/")))];
const SMOOTH_FROM = 50;
const STAGE = /^timing_s\/(?!step$)/;

export function overviewPage(root) {
  const charts = new Map();
  const controls = h("div", {class: "bar"}), damage = h("div"), grid = h("div", {class: "grid"}), below = h("div");
  put(root, h("h1", {class: "visually-hidden"}, "Overview"), controls, damage, grid, below);
  let shownSettings = "";

  async function show(runs) {
    const names = chosenRuns(runs), state = place();
    if (!state.runs && names.length) return go({runs: names.join("\t")}, true); // the address names what it shows
    drawControls(runs, names);
    const broken = runs.filter((run) => run.problem && names.includes(run.name)), gone = (state.runs || "").split("\t").filter((name) => name && !runs.some((run) => run.name === name));
    put(damage, broken.map((run) => h("p", {class: "problem"}, `${run.name}: ${run.problem}`)), gone.map((name) => h("p", {class: "problem"}, `There is no run ${name} here.`)));
    explainMetricsOf(names);
    const stamp = (name) => runs.filter((run) => run.name === name).map((run) => `${run.step} ${run.status}`)[0];
    const first = await Promise.all(names.map((name) => columns(name, USUAL, stamp(name))));
    const wanted = new Set();
    const all = [...new Set(first.flatMap((one) => one.names))];
    const panels = [...PANELS, ...(state.more || "").split("\t").filter(Boolean).map((name) => [name, [name]])];
    const found = panels.map(([title, rules]) => [title, all.filter((name) => rules.some((rule) => (rule instanceof RegExp ? rule.test(name) : rule === name)))]);
    const stages = all.filter((name) => STAGE.test(name));
    for (const name of [...found.flatMap(([, list]) => list), ...stages]) if (first.some((one) => !(name in one.values))) wanted.add(name);
    const data = wanted.size ? await Promise.all(names.map((name) => columns(name, [...wanted], stamp(name)))) : first;
    const lines = linesOf(runs, names, state), titles = found.filter(([, list]) => list.length).map(([title]) => title);
    const alone = titles.includes(state.chart) ? state.chart : null;
    for (const [title, list] of found) if (list.length && (!alone || alone === title)) drawPanel(title, list, lines, data, state, alone !== null);
    if (stages.length && !alone) drawStages(names, data, stages);
    for (const [key, chart] of charts) chart.element.hidden = alone ? key !== alone : !titles.includes(key) && !key.startsWith("stages|");
    grid.classList.toggle("alone", alone !== null);
    below.hidden = alone !== null;
    await drawSettings(names, all);
  }

  /** What is drawn as one line: a run, or the runs that differ in their seed alone; {name, members, tint}. */
  function linesOf(runs, names, state) {
    const tints = runTints(runs, names), whole = state.seeds !== "0" && state.x !== "time";
    const groups = whole ? familiesOf(runs, names) : names.map((name, i) => ({name, members: [i]}));
    return groups.map((group) => ({...group, tint: tints.get(names[group.members[0]]), many: groups.length > 1}));
  }

  function drawControls(runs, names) {
    const state = place(), key = JSON.stringify([runs.map((run) => [run.name, run.status, run.step]), state]);
    const active = controls.contains(document.activeElement) ? document.activeElement : null;
    // a slider that is being moved and words that are being typed stay what they are, also while a run goes on
    if (controls.dataset.drawn === key || active?.matches("input[type=range]:active, input[list]")) return;
    const focused = active?.dataset.key;
    controls.dataset.drawn = key;
    const tints = runTints(runs, names);
    const boxes = runs.slice().reverse().map((run) => h("label", {class: "pick"},
      h("input", {type: "checkbox", "data-key": `run ${run.name}`, checked: names.includes(run.name), onchange: (event) => go({runs: withRun(runs, run.name, event.target.checked)})}),
      h("span", {class: "dot"}), run.name, " ", run.problem ? h("span", {class: "mark bad", "data-tip": run.problem}, "damaged") : h("small", {}, `${run.status}, step ${run.step ?? "?"}`)));
    for (const [i, box] of boxes.entries()) {
      const at = tints.get(runs[runs.length - 1 - i].name);
      if (at !== undefined) box.querySelector(".dot").style.background = `var(${tintName(at)})`;
    }
    const slider = h("input", {type: "range", "data-key": "smooth", min: 0, max: 0.98, step: 0.02, value: state.smooth || 0.6, oninput: () => go({smooth: slider.value}, true)});
    const metric = h("input", {list: "metric-names", placeholder: "any metric", size: 18, onchange: () => {
      const name = metric.value;
      metric.blur();
      if (name) go({more: [...new Set([...(place().more || "").split("\t").filter(Boolean), name])].join("\t"), chart: null});
    }});
    const seeds = familiesOf(runs, names).some((group) => group.members.length > 1);
    put(controls,
      h("details", {class: "runs", open: controls.querySelector("details.runs")?.open ?? names.length > 1}, h("summary", {}, names.length === 1 ? `Run: ${names[0]}` : `${names.length} runs`), h("div", {class: "picks"}, boxes)),
      h("label", {class: "field"}, h("span", {}, "Smoothing"), slider),
      h("label", {class: "field check"}, h("input", {type: "checkbox", "data-key": "log", checked: state.log === "1", onchange: (event) => go({log: event.target.checked ? "1" : null})}), h("span", {}, "Log scale")),
      choice("Over", [["step", "steps"], ["time", "time"]], state.x || "step", (value) => go({x: value === "step" ? null : value, from: null, to: null})),
      seeds && h("label", {class: "field check", "data-tip": "Runs whose settings differ in nothing but the seed are one line, their mean; the band goes from the lowest to the highest of them. Over time, runs are drawn one by one."},
        h("input", {type: "checkbox", "data-key": "seeds", checked: state.seeds !== "0" && state.x !== "time", disabled: state.x === "time", onchange: (event) => go({seeds: event.target.checked ? null : "0"})}), h("span", {}, "Seeds as mean and band")),
      h("label", {class: "field"}, h("span", {}, "Add a chart"), metric, h("datalist", {id: "metric-names"})),
      state.chart && h("button", {"data-key": "all", onclick: () => go({chart: null})}, "All charts"),
      zoomed(state.x === "time") && h("button", {"data-key": "zoom", onclick: zoomOut}, "Reset zoom"),
      h("span", {class: "soft hint"}, "Drag over a chart to zoom all of them; double-click a point for its samples."));
    if (focused) [...controls.querySelectorAll("[data-key]")].find((one) => one.dataset.key === focused)?.focus();
  }

  function drawPanel(title, list, lines, data, state, tall) {
    const log = state.log === "1", time = state.x === "time";
    if (!charts.has(title)) {
      const onpick = (step) => place().x !== "time" && go({page: "samples", run: (place().runs || "").split("\t")[0], step, uid: null, sample: null});
      charts.set(title, lineChart(title, {onpick, open: () => go({chart: place().chart === title ? null : title})}));
      grid.insertBefore(charts.get(title).element, grid.querySelector(".wide"));
    }
    charts.get(title).set(() => seriesOf(list, lines, data, Number(state.smooth || 0.6), {log, time}), {log, time, tall});
  }

  function seriesOf(list, lines, data, weight, {log, time}) {
    const series = [];
    for (const {name, members, tint, many} of lines) {
      for (const [j, metric] of list.entries()) {
        const curves = members.map((i) => curve(data[i], metric, {log, time})).filter(([x]) => x.length);
        if (!curves.length) continue;
        const several = lines.length > 1 || members.length > 1;
        const about = {metric, label: several ? (list.length > 1 ? `${name} · ${metric}` : name) : metric, colour: several ? tint : j, dash: dashOf(j)}; // dashes also where one line hides another
        const {x, mean, low, high} = members.length > 1 ? meanAndBand(curves) : {x: curves[0][0], mean: curves[0][1]};
        const smooth = Boolean(weight) && x.length >= SMOOTH_FROM, soften = (values) => (smooth ? smoothed(values, weight) : values);
        const band = low && {low: soften(low), high: soften(high)};
        const raw = smooth ? {...about, label: `raw ${about.label}`, dash: [], x, y: mean, faint: true, band: low && {low, high}} : null;
        if (raw && !band) series.push(raw);
        series.push({...about, x, y: soften(mean), raw, band});
      }
    }
    return series;
  }

  function curve(one, metric, {log, time}) {
    const kept = one.steps.map((_, at) => at).filter((at) => one.values[metric][at] !== null && (!time || one.values.time[at]) && (!log || one.values[metric][at] > 0));
    return [kept.map((at) => (time ? one.values.time[at] : one.steps[at])), kept.map((at) => one.values[metric][at])];
  }

  function drawStages(names, data, stages) {
    for (const [i, run] of names.entries()) {
      const key = `stages|${run}`;
      if (!charts.has(key)) {
        charts.set(key, stackedChart(`Time by stage: ${run}`, "s"));
        grid.append(charts.get(key).element);
      }
      const one = data[i], every = Math.max(1, Math.ceil(one.steps.length / 250));
      const bins = [];
      for (let at = one.steps[0] === 0 ? 1 : 0; at < one.steps.length; at += every) bins.push([at, Math.min(at + every, one.steps.length)]);
      const mean = (values, [a, b]) => values.slice(a, b).reduce((sum, value) => sum + (value || 0), 0) / (b - a);
      const parts = stages.map((name) => ({label: name.slice(9), metric: name, y: bins.map((bin) => mean(one.values[name], bin))})).filter((part) => part.y.some((value) => value > 0));
      charts.get(key).set(() => [bins.map(([a]) => one.steps[a]), parts]);
    }
    for (const [key, chart] of charts) if (key.startsWith("stages|") && !names.includes(key.slice(7))) (chart.element.remove(), charts.delete(key));
  }

  async function drawSettings(names, all) {
    const list = controls.querySelector("datalist");
    if (list && !list.children.length && names.length) put(list, all.map((name) => h("option", {value: name})));
    if (shownSettings === names.join("\t")) return;
    shownSettings = names.join("\t");
    if (names.length > 1) {
      const rows = await ask("compare", {runs: names.join("\t")});
      put(below, h("h2", {}, "Settings that differ"), rows.length ? settingsTable(names, rows) : h("p", {}, "None: all settings are the same."));
    } else put(below);
  }

  return {show, keys: {Escape: zoomOut}};
}
