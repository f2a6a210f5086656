// Health: how the run stands, what the diagnosis said and the metric behind it, failures, weight sync, memory.

import {ask} from "./api.js";
import {lineChart} from "./charts.js";
import {choice, h, put, seconds, short} from "./dom.js";
import {columns} from "./history.js";
import {memorySection} from "./memory.js";
import {chosenRuns, go, place} from "./state.js";
import {explainMetricsOf} from "./tips.js";

export function healthPage(root) {
  const bar = h("div", {class: "bar"}), status = h("section"), advice = h("section"), failures = h("section"), sync = h("section"), memory = h("section");
  put(root, h("h1", {class: "visually-hidden"}, "Health"), bar, status, advice, failures, sync, memory);
  const drawn = new Map();
  let again = 0;

  async function show(runs) {
    const run = place().run || chosenRuns(runs)[0], about = runs.find((one) => one.name === run);
    if (!about) throw new Error(`There is no run ${run} here.`);
    if (!place().run) return go({run}, true);
    explainMetricsOf([run]);
    put(bar, choice("Run", runs.map((one) => [one.name, one.name]), run, (name) => go({run: name})));
    drawStatus(about);
    const key = JSON.stringify([run, about.step, about.status]);
    await Promise.all([once("advice", key, () => drawAdvice(run)), once("failures", key, () => drawFailures(run)), once("sync", key, () => drawSync(run)), once("memory", key, () => memorySection(memory, run))]);
  }

  async function once(name, key, act) {
    if (drawn.get(name) === key) return;
    drawn.set(name, key);
    await act();
  }

  function drawStatus(about) {
    const facts = [["status", about.status], ["step", `${about.step ?? "?"} of ${about.total_steps ?? "?"}`], ["stage", about.stage], ["done", about.of ? `${about.done} of ${about.of} ${about.unit || ""}` : null], ["tokens per second", about.tokens_per_s], ["time left", about.seconds_left ? seconds(about.seconds_left) : null], ["written", about.time ? `${seconds(about.age_s)} ago` : null], ["process", about.pid ? `${about.pid} on ${about.host}` : null], ["folder", about.folder]];
    put(status, h("h2", {}, about.name), about.problem && h("p", {class: "problem"}, about.problem), h("dl", {class: "facts"}, facts.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
  }

  async function drawAdvice(run) {
    const lines = await ask("diagnosis", {run});
    const kinds = new Map();
    for (const line of lines) {
      const key = line.rule || line.metric || line.text;
      if (!kinds.has(key)) kinds.set(key, {...line, steps: []});
      Object.assign(kinds.get(key), {text: line.text, step: line.step});
      kinds.get(key).steps.push(line.step);
    }
    const metrics = [...new Set([...kinds.values()].map((kind) => kind.metric).filter(Boolean))];
    const data = await columns(run, metrics);
    const entries = [...kinds.values()].sort((a, b) => b.step - a.step).map((kind, i) => adviceEntry(kind, data, i, run));
    put(advice, h("h2", {}, "Diagnosis"), entries.length ? entries.map((entry) => entry.element) : h("p", {class: "soft"}, "Nothing was said about this run."));
    for (const entry of entries) entry.draw();
  }

  function adviceEntry(kind, data, i, run) {
    const values = kind.metric && data.values[kind.metric];
    const chart = values && lineChart(kind.metric, {onpick: (step) => go({page: "samples", run, step})});
    const said = new Set(kind.steps);
    const element = h("article", {class: "advice"},
      h("p", {}, h("b", {}, `step ${kind.step}: `), kind.text),
      h("p", {class: "soft"}, kind.steps.length === 1 ? "said at this step alone" : `said at ${kind.steps.length} steps, from ${kind.steps[0]} to ${kind.step}`),
      chart && chart.element);
    const draw = () => chart && chart.set(() => [
      {label: kind.metric, x: data.steps, y: values, metric: kind.metric, colour: 0},
      {label: "said here", x: data.steps, y: values.map((value, at) => (said.has(data.steps[at]) ? value : null)), colour: 1, dots: true},
    ]);
    return {element, draw};
  }

  async function drawFailures(run) {
    clearTimeout(again);
    const [found, metrics] = await Promise.all([ask("failures", {run}), columns(run, ["reward/failures"])]);
    const all = metrics.values["reward/failures"].reduce((sum, value) => sum + (value || 0), 0);
    const rest = found.read < found.files;
    if (rest) again = setTimeout(() => root.isConnected && drawFailures(run), 1500);
    put(failures, h("h2", {}, "Failures of the reward"),
      h("p", {class: "soft"}, all > found.count && !rest
        ? `${all} responses of all steps; the samples hold ${found.count} of them (tracking.samples_freq, tracking.samples_max_gb).`
        : `${found.count} responses${rest ? ` in the ${found.read} of ${found.files} files that were read` : ""}`),
      found.kinds.map((kind) => h("article", {class: "advice"},
        h("pre", {class: "problem", tabindex: 0, role: "region", "aria-label": "error"}, kind.error),
        h("p", {class: "soft"}, `${kind.count} times among the newest 500; the newest: `, h("button", {class: "link", onclick: () => go({page: "samples", run, step: kind.step, uid: kind.uid, sample: kind.sample})}, `step ${kind.step} › ${kind.uid} › ${kind.sample}`)),
        h("dl", {class: "facts"}, [["prompt", kind.prompt], ["response", kind.response], ["reference answer", kind.ground_truth]].map(([name, value]) => [h("dt", {}, name), h("dd", {dir: "auto"}, value)])))));
  }

  async function drawSync(run) {
    const names = ["sync/probe_max", "mismatch/logp_max", "mismatch/logp_mean", "timing_s/sync"];
    const data = await columns(run, names);
    const has = (name) => data.values[name].some((value) => value !== null);
    const gaps = names.slice(0, 3).filter(has);
    const chart = lineChart("Log-probs, rollout − trainer"), time = lineChart("Seconds of a weight sync");
    const probes = data.values["sync/probe_max"].filter((value) => value !== null);
    put(sync, h("h2", {}, "Weight sync"),
      h("p", {class: "soft"}, probes.length ? `${probes.length} syncs were proved on fixed tokens; the largest difference was ${short(Math.max(...probes))}.` : "No sync was proved yet."),
      h("div", {class: "grid"}, gaps.length > 0 && chart.element, has("timing_s/sync") && time.element));
    const series = (name, i) => {
      const kept = data.steps.map((_, at) => at).filter((at) => data.values[name][at] !== null && (name === "timing_s/sync" || data.values[name][at] > 0));
      return {label: name, x: kept.map((at) => data.steps[at]), y: kept.map((at) => data.values[name][at]), metric: name, colour: i};
    };
    if (gaps.length) chart.set(() => gaps.map(series), {log: true});
    if (has("timing_s/sync")) time.set(() => [series("timing_s/sync", 3)]);
  }

  return {show, leave: () => clearTimeout(again)};
}
