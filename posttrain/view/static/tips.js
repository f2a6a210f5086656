// Explanations on hovering or focusing: of metrics what `posttrain explain` says, of anything else what `data-tip` says.

import {ask} from "./api.js";
import {h} from "./dom.js";

const texts = new Map(), learnt = new Set();
let explainedRuns = [], over = null;
const bubble = h("div", {id: "tip", role: "tooltip", hidden: true});

/** The runs whose metrics are on the page. */
export function explainMetricsOf(runs) {
  explainedRuns = runs;
}

/** A mark behind a name that tells what these metrics are. */
export function metricTip(metrics) {
  return h("button", {class: "info", type: "button", "data-metrics": metrics.join("\t"), "aria-label": `What is ${metrics.join(", ")}?`}, "i");
}

async function learn() {
  for (const run of explainedRuns.filter((name) => !learnt.has(name))) {
    learnt.add(run);
    try {
      for (const [metric, text] of Object.entries(await ask("explain", {run}))) texts.set(metric, text);
    } catch { learnt.delete(run); }
  }
}

async function show(target) {
  if (target === over) return;
  over = target;
  if (!target) return void (bubble.hidden = true);
  const metrics = (target.dataset.metrics || "").split("\t").filter(Boolean);
  if (metrics.some((metric) => !texts.has(metric))) await learn();
  if (over !== target) return;
  const lines = metrics.map((metric) => h("p", {}, h("b", {}, metric), " ", texts.get(metric) || "There is no explanation of this metric: it is the run's own."));
  if (target.dataset.tip) lines.push(h("p", {}, target.dataset.tip));
  bubble.replaceChildren(...lines);
  bubble.hidden = !lines.length;
  place(target.getBoundingClientRect());
  target.setAttribute("aria-describedby", "tip");

  function place({left, bottom, top}) {
    bubble.style.left = `${Math.max(8, Math.min(left, innerWidth - bubble.offsetWidth - 8))}px`;
    const below = bottom + 6;
    bubble.style.top = `${below + bubble.offsetHeight < innerHeight ? below : Math.max(8, top - bubble.offsetHeight - 6)}px`;
  }
}

const tipped = (event) => event.target.closest?.("[data-tip], [data-metrics]") || null;
document.body.append(bubble);
document.addEventListener("mouseover", (event) => show(tipped(event)));
document.addEventListener("focusin", (event) => show(tipped(event)));
document.addEventListener("focusout", () => show(null));
document.addEventListener("scroll", () => show(null), true);
document.addEventListener("keydown", (event) => event.key === "Escape" && show(null));
