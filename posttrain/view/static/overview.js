// Overview: the curves of one or more runs, where their time goes, and what they were set to.

import {ask} from "./api.js";
import {COLOURS, lineChart, stackedChart} from "./charts.js";
import {choice, h, put} from "./dom.js";
import {columns} from "./history.js";
import {settingsTable} from "./settings.js";
import {smoothed} from "./smooth.js";
import {chosenRuns, go, place} from "./state.js";

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
  const controls = h("div", {class: "bar"}), grid = h("div", {class: "grid"}), below = h("div");
  put(root, h("h1", {class: "visually-hidden"}, "Overview"), controls, grid, below);
  let shownSettings = "";

  async function show(runs) {
    const names = chosenRuns(runs), state = place();
    drawControls(runs, names);
    const stamp = (name) => runs.filter((run) => run.name === name).map((run) => `${run.step} ${run.status}`)[0];
    const first = await Promise.all(names.map((name) => columns(name, USUAL, stamp(name))));
    const wanted = new Set();
    const all = [...new Set(first.flatMap((one) => one.names))];
    const panels = [...PANELS, ...(state.more || "").split("\t").filter(Boolean).map((name) => [name, [name]])];
    const found = panels.map(([title, rules]) => [title, all.filter((name) => rules.some((rule) => (rule instanceof RegExp ? rule.test(name) : rule === name)))]);
    const stages = all.filter((name) => STAGE.test(name));
    for (const name of [...found.flatMap(([, list]) => list), ...stages]) if (first.some((one) => !(name in one.values))) wanted.add(name);
    const data = wanted.size ? await Promise.all(names.map((name) => columns(name, [...wanted], stamp(name)))) : first;
    for (const [title, list] of found) if (list.length) drawPanel(title, list, names, data, state);
    if (stages.length) drawStages(names, data, stages);
    for (const [key, chart] of charts) chart.element.hidden = !found.some(([title, list]) => list.length && key === title) && !key.startsWith("stages|");
    await drawSettings(names, all);
  }

  function drawControls(runs, names) {
    const state = place();
    if (controls.dataset.drawn === JSON.stringify([runs.map((run) => run.name), state])) return;
    controls.dataset.drawn = JSON.stringify([runs.map((run) => run.name), state]);
    const picked = (name, on) => go({runs: runs.map((run) => run.name).filter((one) => (one === name ? on : names.includes(one))).join("\t")});
    const boxes = runs.slice().reverse().map((run) => h("label", {class: "pick"},
      h("input", {type: "checkbox", checked: names.includes(run.name), onchange: (event) => picked(run.name, event.target.checked)}),
      h("span", {class: "dot"}), run.name, " ", h("small", {}, `${run.status}, step ${run.step ?? "?"}`)));
    for (const [i, box] of boxes.entries()) {
      const at = names.indexOf(runs[runs.length - 1 - i].name);
      if (at >= 0) box.querySelector(".dot").style.background = COLOURS[at % COLOURS.length];
    }
    const slider = h("input", {type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth || 0.6, oninput: () => go({smooth: slider.value}, true)});
    const metric = h("input", {list: "metric-names", placeholder: "any metric", size: 18, onchange: () => {
      if (metric.value) go({more: [...new Set([...(place().more || "").split("\t").filter(Boolean), metric.value])].join("\t")});
    }});
    put(controls,
      h("details", {class: "runs", open: runs.length < 2 ? false : names.length > 1}, h("summary", {}, `Runs: ${names.join(", ") || "none"}`), h("div", {class: "picks"}, boxes)),
      h("label", {class: "field"}, h("span", {}, "Smoothing"), slider),
      h("label", {class: "field check"}, h("input", {type: "checkbox", checked: state.log === "1", onchange: (event) => go({log: event.target.checked ? "1" : null})}), h("span", {}, "Log scale")),
      choice("Over", [["step", "steps"], ["time", "time"]], state.x || "step", (value) => go({x: value === "step" ? null : value})),
      h("label", {class: "field"}, h("span", {}, "Add a chart"), metric, h("datalist", {id: "metric-names"})));
  }

  function drawPanel(title, list, names, data, state) {
    const log = state.log === "1", time = state.x === "time";
    if (!charts.has(title)) {
      const onpick = (step) => place().x !== "time" && go({page: "samples", run: names[0], step});
      charts.set(title, lineChart(title, {onpick}));
      grid.insertBefore(charts.get(title).element, grid.querySelector(".wide"));
    }
    charts.get(title).set(() => seriesOf(list, names, data, Number(state.smooth || 0.6), {log, time}), {log, time});
  }

  function seriesOf(list, names, data, weight, {log, time}) {
    const series = [];
    for (const [i, run] of names.entries()) {
      for (const [j, metric] of list.entries()) {
        const one = data[i];
        const kept = one.steps.map((_, at) => at).filter((at) => one.values[metric][at] !== null && (!time || one.values.time[at]) && (!log || one.values[metric][at] > 0));
        if (!kept.length) continue;
        const x = kept.map((at) => (time ? one.values.time[at] : one.steps[at])), y = kept.map((at) => one.values[metric][at]);
        const colour = COLOURS[(names.length > 1 ? i + (list.length > 1 ? j * names.length : 0) : j) % COLOURS.length];
        const label = names.length > 1 ? (list.length > 1 ? `${run} ${metric}` : run) : metric;
        const many = weight && kept.length >= SMOOTH_FROM;
        if (many) series.push({label: `raw ${label}`, x, y, colour, faint: true});
        series.push({label, x, y: many ? smoothed(y, weight) : y, colour, smooth: Boolean(many)});
      }
    }
    return series;
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
      const parts = stages.map((name) => ({label: name.slice(9), y: bins.map((bin) => mean(one.values[name], bin))})).filter((part) => part.y.some((value) => value > 0));
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
    } else if (names.length) {
      const settings = await ask("config", {run: names[0]});
      const rows = Object.entries(settings).map(([key, value]) => ({key, values: [value]}));
      put(below, h("details", {}, h("summary", {}, `Settings of ${names[0]} (${rows.length})`), settingsTable(names, rows)));
    }
  }

  return {show};
}
