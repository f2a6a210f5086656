// Timeline: the stages of some steps as bars over time, one lane for the loop, each worker, and what works beside them.
// Lanes work at the same time: their times are drawn beside each other and never added up.

import {ask} from "./api.js";
import {choice, h, put, seconds, short, svg} from "./dom.js";
import {tintName} from "./palette.js";
import {chosenRuns, go, place} from "./state.js";

const WIDTH = 1200, LANE = 30, LEFT = 170, TOP = 22, CHARACTER = 6.5;
const COUNTS = ["1", "3", "10", "40"];
/** Stages in the order in which a step meets them, so that each has its colour in every run. */
const ORDER = ["gen", "update_actor", "sync", "reward", "old_log_prob", "agents", "validation", "save_checkpoint", "ref", "values", "adv", "update_critic"];
const WORDS = {gen: "rollout", reward: "rewards", old_log_prob: "old log-probs", ref: "reference", adv: "advantages", update_actor: "update", update_critic: "critic update", sync: "weight sync", save_checkpoint: "saving", reward_model: "reward model", agents: "agents and tools"};

/** There are more stages than colours: later ones are pale. */
const PALE = 8;
function painted(element, property, i) {
  element.style[property] = `var(${tintName(i)})`;
  if (i >= PALE) element.style.opacity = 0.53;
  return element;
}

export function timelinePage(root) {
  const bar = h("div", {class: "bar"}), element = h("section");
  put(root, h("h1", {class: "visually-hidden"}, "Timeline"), bar, element);
  let drawn = "";

  async function show(runs) {
    const run = place().run || chosenRuns(runs)[0], about = runs.find((one) => one.name === run);
    if (!about) throw new Error(`There is no run ${run} here.`);
    if (!place().run) return go({run}, true);
    const count = COUNTS.includes(place().steps) ? place().steps : "3";
    const key = JSON.stringify([run, about.step, about.status, place().last, count]);
    if (drawn === key) return;
    const found = await ask("timeline", {run, last: place().last});
    drawn = key;
    const steps = found.steps.slice(-count);
    const [first, newest] = found.range || [], shown = steps.map((line) => line.step);
    put(bar, choice("Run", runs.map((one) => [one.name, one.name]), run, (name) => go({run: name, last: null})),
      choice("Steps", COUNTS.map((one) => [one, one]), count, (steps) => go({steps})),
      h("button", {disabled: !steps.length || shown[0] <= first, onclick: () => go({last: shown[0] - 1})}, "earlier"),
      h("button", {disabled: !steps.length || shown[shown.length - 1] >= newest, onclick: () => go({last: Math.min(newest, shown[shown.length - 1] + Number(count))})}, "later"));
    put(element, ...(steps.length ? drawing(steps) : [h("p", {class: "soft"}, "This run did not record when its stages began.")]));
  }

  return {show};
}

function drawing(steps) {
  const spans = steps.flatMap((line) => line.stages.map(([stage, begin, spent, lane]) => ({step: line.step, stage, begin, end: begin + spent, lane: lane ?? "loop"})));
  const begin = Math.min(...spans.map((span) => span.begin)), end = Math.max(...spans.map((span) => span.end));
  const lanes = [...new Set(spans.map((span) => span.lane))];
  const known = new Set(spans.map((span) => span.stage)), all = [...ORDER, ...[...known].filter((stage) => !ORDER.includes(stage))];
  const x = (time) => LEFT + (WIDTH - LEFT - 10) * (time - begin) / Math.max(1e-6, end - begin);
  const bottom = TOP + lanes.length * LANE;
  const words = `Steps ${steps[0].step} to ${steps[steps.length - 1].step}: ${seconds(end - begin)}`;
  const label = (lane, i) => svg("text", {x: 0, y: TOP + i * LANE + 19, class: "lane"}, `${lane}, ${share(spans.filter((span) => span.lane === lane), end - begin)}`);
  return [h("h2", {}, words), svg("svg", {viewBox: `0 0 ${WIDTH} ${bottom + 24}`, role: "img", "aria-label": `${words}. Lanes: ${lanes.join("; ")}`, class: "timeline"},
    steps.map((line) => stepMark(line, x, bottom)), lanes.map(label),
    spans.map((span) => stageBar(span, x, TOP + lanes.indexOf(span.lane) * LANE + 4, all.indexOf(span.stage))),
    [0, 0.25, 0.5, 0.75, 1].map((part) => svg("text", {x: x(begin + part * (end - begin)), y: bottom + 18, class: "tick", "text-anchor": part === 1 ? "end" : part ? "middle" : "start"}, seconds(part * (end - begin))))),
  h("p", {class: "legend"}, all.filter((stage) => known.has(stage)).map((stage) => h("span", {}, painted(h("span", {class: "dot"}), "background", all.indexOf(stage)), WORDS[stage] || stage))),
  h("p", {class: "soft"}, "Lanes work at the same time. The percentage is the share of this time in which a lane was busy; the shares do not add up to a step.")];
}

/** The share of the time in which at least one of these went on. */
function share(spans, whole) {
  let busy = 0, until = -Infinity;
  for (const {begin, end} of [...spans].sort((a, b) => a.begin - b.begin)) {
    busy += Math.max(0, end - Math.max(begin, until));
    until = Math.max(until, end);
  }
  return `${Math.round(100 * busy / Math.max(1e-6, whole))}%`;
}

function stepMark(line, x, bottom) {
  const own = line.stages.filter((span) => span.length < 4).map((span) => span[1]);
  if (!own.length) return null;
  const at = x(Math.min(...own)).toFixed(1);
  return [svg("line", {x1: at, x2: at, y1: 4, y2: bottom, class: "step"}), svg("text", {x: Number(at) + 4, y: 14, class: "tick"}, `step ${line.step}`)];
}

function stageBar(span, x, y, i) {
  const width = Math.max(0.6, x(span.end) - x(span.begin)), name = WORDS[span.stage] || span.stage;
  const bar = painted(svg("rect", {x: x(span.begin).toFixed(1), y, width: width.toFixed(1), height: LANE - 8}), "fill", i);
  bar.append(svg("title", {}, `step ${span.step}, ${span.lane}, ${name}: ${short(span.end - span.begin, 3)} s`));
  const text = i < PALE && width > CHARACTER * name.length + 6 && svg("text", {x: (x(span.begin) + 4).toFixed(1), y: y + 15, class: "within"}, name);
  return [bar, text];
}
