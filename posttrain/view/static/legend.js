// Legends: every line of a chart with its whole name, its value at the cursor (else the last one), and a switch.

import {h, put, svg} from "./dom.js";
import {tintName} from "./palette.js";

/** {element, set(entries), tell(valueOf)}; an entry is {label, colour, dash, metric, toggle(on), on}. */
export function chartLegend() {
  const element = h("div", {class: "keys"});
  let values = [];

  function set(entries) {
    values = entries.map(() => h("span", {class: "value"}));
    put(element, entries.map((entry, i) => {
      const button = h("button", {type: "button", class: "key", "aria-pressed": "true", "data-metrics": entry.metric, onclick: () => {
        entry.on = !entry.on;
        button.setAttribute("aria-pressed", String(entry.on));
        entry.toggle(entry.on);
      }}, swatch(entry), h("span", {class: "label"}, entry.label), values[i]);
      return button;
    }));
  }

  function tell(valueOf) {
    for (const [i, place] of values.entries()) {
      const text = valueOf(i);
      if (place.textContent !== text) place.textContent = text;
    }
  }

  return {element, set, tell};
}

function swatch({colour, dash, filled, dots, pale}) {
  const mark = filled ? svg("rect", {x: 4, y: 0, width: 10, height: 10, rx: 2}) : dots ? svg("circle", {cx: 11, cy: 5, r: 4}) : svg("line", {x1: 0, y1: 5, x2: 22, y2: 5, "stroke-width": 3, "stroke-dasharray": dash.join(" ")});
  mark.style[filled || dots ? "fill" : "stroke"] = `var(${tintName(colour)})`;
  if (pale) mark.style.opacity = 0.53;
  return svg("svg", {width: filled ? 16 : 22, height: 10, "aria-hidden": "true"}, mark);
}
