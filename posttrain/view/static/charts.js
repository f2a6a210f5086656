// Charts by uPlot, in the page's colours, as wide as their place, each with a name that can be read aloud.

import {h, short} from "./dom.js";

export const COLOURS = ["#3b7dd8", "#d9782d", "#2f9e63", "#b8479b", "#8a6fd1", "#a8862b", "#2a9d9d", "#d0504f"];
const HEIGHT = 190;

/** A colour of the theme, asked for once: every question makes the browser lay the page out first. */
const colours = new Map();
function colourOf(name) {
  const key = `${document.documentElement.dataset.theme} ${name}`;
  if (!colours.has(key)) colours.set(key, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return colours.get(key);
}

/** Steps are whole: no tick stands between two of them. */
const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((ten) => [ten, 2 * ten, 5 * ten]);

function axes(time = false) {
  const look = {stroke: colourOf("--soft"), grid: {stroke: colourOf("--line"), width: 1}, ticks: {stroke: colourOf("--line"), width: 1}};
  const values = (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick)));
  return [{...look, size: 32, ...(time ? {} : {incrs: WHOLE})}, {...look, size: 56, values}];
}

/** {element, set(make, {log, time})}; make() gives [{label, x, y, colour, faint, dots, smooth}], each with steps of its
 *  own. What is `smooth` stands behind the faint line of what was recorded, whose values are the ones told. */
export function lineChart(title, {onpick} = {}) {
  const place = h("div", {class: "plot"});
  const words = h("span", {class: "last"});
  const element = h("figure", {class: "chart", "aria-label": title}, h("figcaption", {}, h("b", {}, title), " ", words), place);
  let plot = null, drawn = "", wide = 0;
  const set = whenVisible(place, draw, resize);

  function draw(make, {log = false, time = false} = {}) {
    const series = make();
    const [data, spans] = joined(series);
    const key = JSON.stringify([series.map(({label, colour, faint, dots}) => [label, colour, faint, dots]), log, time, document.documentElement.dataset.theme]);
    const recorded = (one, i) => lastOf((one.smooth ? series[i - 1] : one).y);
    const ends = series.flatMap((one, i) => (one.faint || one.dots ? [] : [`${one.label} ${short(recorded(one, i))}`]));
    words.textContent = ends.slice(0, 4).join(", ");
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", `${title} over ${time ? "time" : "steps"}; last values: ${ends.join(", ") || "none"}`);
    if (plot && key === drawn) return plot.setData(data);
    if (plot) plot.destroy();
    drawn = key;
    plot = new uPlot(options(series, spans, log, time), data, place);
  }

  function options(series, spans, log, time) {
    return {
      width: wide,
      height: HEIGHT,
      scales: {x: {time}, y: log ? {distr: 3} : {range: heights}},
      axes: axes(time),
      cursor: {sync: {key: time ? "time" : "step"}, drag: {x: true, y: false}},
      legend: {live: true},
      series: [{label: time ? "time" : "step"}, ...series.map((one) => ({
        label: one.label,
        stroke: one.faint ? `${one.colour}55` : one.colour,
        width: one.dots ? 0 : one.faint ? 1 : 1.8,
        spanGaps: true,
        points: {show: one.dots || spans.get(one) < 40, size: 5, fill: one.dots ? one.colour : undefined},
        value: (self, value, number, at) => (one.smooth && at !== null && at !== undefined ? `${short(self.data[number - 1][at])} (smoothed ${short(value)})` : short(value)),
      }))],
      hooks: {ready: [(self) => {
        for (const row of self.root.querySelectorAll(".u-legend .u-series")) if (row.textContent.startsWith("raw ")) row.hidden = true;
        if (onpick) self.over.addEventListener("dblclick", () => onpick(self.data[0][self.cursor.idx]));
      }]},
    };
  }

  function resize(width) {
    wide = Math.max(width, 200);
    if (plot && plot.width !== wide) plot.setSize({width: wide, height: HEIGHT});
  }

  return {element, set};
}

/** From where to where the y axis goes; a number that never changes would otherwise be drawn on 0 to 100. */
function heights(_, low, high) {
  if (low === null || low !== high) return uPlot.rangeNum(low ?? 0, high ?? 1, 0.1, true);
  return low === 0 ? [0, 1] : [low - 0.1 * Math.abs(low), low + 0.1 * Math.abs(low)];
}

/** Stacked bars: {element, set(make)}; make() gives [x, [{label, y}]]. */
export function stackedChart(title, unit) {
  const place = h("div", {class: "plot", role: "img", "aria-label": title});
  const element = h("figure", {class: "chart wide", "aria-label": title}, h("figcaption", {}, h("b", {}, title)), place);
  let plot = null, drawn = "", wide = 0;
  const set = whenVisible(place, draw, resize);

  function draw(make) {
    const [x, parts] = make();
    const sums = x.map(() => 0);
    const heaps = parts.map((part) => part.y.map((value, i) => (sums[i] += value || 0)));
    const data = [x, ...heaps.slice().reverse()];
    const key = JSON.stringify([parts.map((part) => part.label), document.documentElement.dataset.theme]);
    place.setAttribute("aria-label", `${title}; at the last step: ${parts.map((part) => `${part.label} ${short(lastOf(part.y), 3)} ${unit}`).join(", ")}`);
    if (plot && key === drawn) return plot.setData(data);
    if (plot) plot.destroy();
    drawn = key;
    const bars = uPlot.paths.bars({size: [1, 40], gap: 0});
    const reversed = parts.map((part, i) => ({part, i})).reverse();
    plot = new uPlot({
      width: wide,
      height: HEIGHT + 30,
      scales: {x: {time: false}, y: {range: (_, low, high) => [0, high || 1]}},
      axes: axes(),
      cursor: {sync: {key: "step"}},
      series: [{label: "step"}, ...reversed.map(({part, i}) => ({
        label: part.label,
        fill: COLOURS[i % COLOURS.length],
        width: 0,
        paths: bars,
        points: {show: false},
        value: (self, value, number, at) => (at === null ? "–" : `${short(part.y[at], 3)} ${unit}`),
      }))],
    }, data, place);
    plot.parts = parts;
  }

  function resize(width) {
    wide = Math.max(width, 200);
    if (plot && plot.width !== wide) plot.setSize({width: wide, height: HEIGHT + 30});
  }

  return {element, set};
}

const drawers = new WeakMap();
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) drawers.get(entry.target)?.seen(entry.isIntersecting, entry.boundingClientRect.width);
}, {rootMargin: "150px"});
const resizer = new ResizeObserver((entries) => {
  for (const entry of entries) if (entry.target.isConnected && entry.contentRect.width) drawers.get(entry.target)?.resize(Math.round(entry.contentRect.width));
});

/** `draw` with the newest arguments as soon as the place is on the screen: what nobody sees costs nothing. Widths are
 *  those that the browser tells: a chart that asked for its own would have the page laid out again for each. */
function whenVisible(place, draw, resize) {
  let visible = false, waiting = null;
  drawers.set(place, {resize, seen: (now, width) => {
    visible = now;
    if (!visible || !waiting) return;
    resize(Math.round(width));
    draw(...waiting);
    waiting = null;
  }});
  watcher.observe(place);
  resizer.observe(place);
  return (...given) => {
    if (visible) draw(...given);
    else waiting = given;
  };
}

function joined(series) {
  const spans = new Map(series.map((one) => [one, one.y.filter((value) => value !== null && value !== undefined).length]));
  const same = series.every((one) => one.x === series[0].x || (one.x.length === series[0].x.length && one.x.every((x, i) => x === series[0].x[i])));
  if (!series.length) return [[[]], spans];
  if (same) return [[series[0].x, ...series.map((one) => one.y)], spans];
  return [uPlot.join(series.map((one) => [one.x, one.y])), spans];
}

export function lastOf(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return values[i];
  return null;
}
