// Timeline: the stages of some steps as bars over time, one lane per worker (or one for the whole loop).

import {ask} from "./api.js";
import {h, put, seconds, short, svg} from "./dom.js";
import {tintName} from "./palette.js";

const WIDTH = 1000, LANE = 26, LEFT = 90;

/** There are more stages than colours: later ones are pale. */
const PALE = 8;
function painted(element, property, i) {
  element.style[property] = `var(${tintName(i)})`;
  if (i >= PALE) element.style.opacity = 0.53;
  return element;
}

export async function timelineSection(element, run, last, goTo) {
  const found = await ask("timeline", {run, last});
  put(element, h("h2", {}, "Stages in time"));
  if (!found.steps.length) return element.append(h("p", {class: "soft"}, "This run did not record when its stages began."));
  const spans = found.steps.flatMap((line) => line.stages.map(([stage, begin, spent, worker]) => ({step: line.step, stage, begin, spent, lane: worker ?? "loop"})));
  const begin = Math.min(...spans.map((span) => span.begin)), end = Math.max(...spans.map((span) => span.begin + span.spent));
  const lanes = [...new Set(spans.map((span) => span.lane))], stages = [...new Set(spans.map((span) => span.stage))];
  const x = (time) => LEFT + (WIDTH - LEFT - 10) * (time - begin) / Math.max(1e-6, end - begin);
  const words = `stages of steps ${found.steps[0].step} to ${found.steps[found.steps.length - 1].step}, ${seconds(end - begin)}`;
  const drawing = svg("svg", {viewBox: `0 0 ${WIDTH} ${lanes.length * LANE + 24}`, role: "img", "aria-label": words, class: "timeline"},
    lanes.map((lane, i) => svg("text", {x: 0, y: i * LANE + 17, class: "lane"}, lane)),
    spans.map((span) => {
      const bar = svg("rect", {x: x(span.begin).toFixed(1), y: lanes.indexOf(span.lane) * LANE + 3, width: Math.max(0.6, x(span.begin + span.spent) - x(span.begin)).toFixed(1), height: LANE - 6},
        svg("title", {}, `step ${span.step}, ${span.stage}: ${short(span.spent, 3)} s`));
      return painted(bar, "fill", stages.indexOf(span.stage));
    }),
    [0, 0.25, 0.5, 0.75, 1].map((share) => svg("text", {x: x(begin + share * (end - begin)), y: lanes.length * LANE + 18, class: "tick", "text-anchor": share === 1 ? "end" : share ? "middle" : "start"}, seconds(share * (end - begin)))));
  const legend = h("p", {class: "legend"}, stages.map((stage, i) => {
    return h("span", {}, painted(h("span", {class: "dot"}), "background", i), stage);
  }));
  const [first, newest] = found.range, shownLast = found.steps[found.steps.length - 1].step;
  element.append(h("div", {class: "bar"},
    h("button", {disabled: found.steps[0].step <= first, onclick: () => goTo(found.steps[0].step - 1)}, "earlier"),
    h("span", {}, words),
    h("button", {disabled: shownLast >= newest, onclick: () => goTo(Math.min(newest, shownLast + found.steps.length))}, "later")), drawing, legend);
}
