// Charts by uPlot, in the page's colours, as wide as their place, each with a name that can be read aloud. A range that is
// selected in one of them is shown by all.

import {csvOf, fileName, saveAs, svgOf} from "./chart_file.js";
import {h, short} from "./dom.js";
import {chartLegend} from "./legend.js";
import {paleTint, themeColour, tint} from "./palette.js";
import {metricTip} from "./tips.js";
import {zoomed, zoomTo} from "./zoom.js";

const HEIGHT = 190, TALL = 420, PALE_FROM = 8;

/** Steps are whole: no tick stands between two of them. */
const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((ten) => [ten, 2 * ten, 5 * ten]);

function axes(time = false) {
  const look = {stroke: themeColour("--soft"), grid: {stroke: themeColour("--line"), width: 1}, ticks: {stroke: themeColour("--line"), width: 1}};
  const values = (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick)));
  return [{...look, size: 32, ...(time ? {} : {incrs: WHOLE})}, {...look, size: 56, values}];
}

/** What all charts share: a selected range is where all go, and the cursor stands at one place in all of them. */
function shared(time) {
  const moves = new Set(["mousemove", "mouseleave", "mouseenter"]);
  return {
    drag: {x: true, y: false, setScale: false},
    sync: {key: time ? "time" : "step", filters: {pub: (kind) => moves.has(kind)}},
    bind: {dblclick: () => null},
  };
}

function selected(time) {
  return (plot) => {
    const {left, width} = plot.select;
    if (width < 5) return;
    plot.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
    zoomTo(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"), time);
  };
}

/** Plots that stand on the page -> whether they are over time. */
const standing = new Map();
function follow(plot, time) {
  const range = zoomed(time), x = plot.data[0];
  if (range) plot.setScale("x", {min: range[0], max: range[1]});
  else if (x.length) plot.setScale("x", {min: x[0], max: x[x.length - 1] > x[0] ? x[x.length - 1] : x[0] + 1});
  plot.root.parentElement.dataset.range = rangeName(time);
}
const rangeName = (time) => zoomed(time)?.join(" ") || "all";
window.addEventListener("hashchange", () => {
  for (const [plot, time] of standing) {
    if (!plot.root.isConnected) standing.delete(plot);
    else if (plot.root.parentElement.dataset.range !== rangeName(time)) follow(plot, time); // not for what else an address says
  }
});

/** The frame of a chart: its title (which may lead to the chart alone), what it shows, and its files. */
function frame(title, {wide, place, legend, files, open}) {
  const tools = h("span", {class: "tools"}, Object.entries(files).map(([kind, save]) => h("button", {type: "button", class: "tool", "aria-label": `${title} as ${kind}`, "data-tip": kind === "SVG" ? "Save this picture" : "Save the numbers that are shown", onclick: save}, kind)));
  const name = open ? h("button", {type: "button", class: "title", "data-tip": "This chart alone, or all of them", onclick: open}, title) : h("b", {}, title);
  const info = h("span");
  const element = h("figure", {class: wide ? "chart wide" : "chart", "aria-label": title}, h("figcaption", {}, name, info, tools), place, legend);
  return {element, explain: (metrics) => info.replaceChildren(...(metrics.length ? [metricTip(metrics)] : []))};
}

/** {element, set(make, {log, time, tall})}; make() gives [{label, metric, x, y, colour, dash, faint, dots, smooth, band}],
 *  each with steps of its own; `colour` is a number of the palette. What is `smooth` stands behind the faint line of what
 *  was recorded, whose values are the ones told; `band` is {low, high}. */
export function lineChart(title, {onpick, open} = {}) {
  const place = h("div", {class: "plot"}), legend = chartLegend();
  let plot = null, drawn = "", wide = 0, high = HEIGHT, kept = null;
  const {element, explain} = frame(title, {place, legend: legend.element, open, files: {SVG: () => savePicture(), CSV: () => saveNumbers()}});
  const set = whenVisible(place, draw, resize);

  function draw(make, {log = false, time = false, tall = false} = {}) {
    const series = make();
    const lines = series.flatMap((one) => (one.band ? [edge(one, "high"), edge(one, "low"), one] : [one]));
    const [data, spans] = joined(lines);
    kept = {lines, log, time};
    const key = JSON.stringify([lines.map(({label, colour, dash, faint, dots, hidden}) => [label, colour, dash, faint, dots, hidden]), log, time, tall, document.documentElement.dataset.theme]);
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", `${title} over ${time ? "time" : "steps"}; last values: ${lines.filter(isNamed).map((one) => `${one.label} ${short(lastOf(recorded(one).y))}`).join(", ") || "none"}`);
    if (plot && key === drawn) plot.batch(() => { plot.setData(data, false); follow(plot, time); });
    else {
      if (plot) (standing.delete(plot), plot.destroy());
      drawn = key;
      high = tall ? TALL : HEIGHT;
      plot = new uPlot(options(lines, spans, log, time), data, place);
      standing.set(plot, time);
      follow(plot, time);
      legend.set(named(lines));
      explain([...new Set(lines.map((one) => one.metric).filter(Boolean))]);
    }
    tell(plot);
  }

  const isNamed = (one) => !one.faint && !one.hidden;
  /** The line of what was recorded, for one that is smoothed. */
  const recorded = (one) => one.raw || one;

  function named(lines) {
    return lines.flatMap((one, i) => (isNamed(one) ? [{...one, dash: one.dash || [], on: true, toggle: (show) => {
      for (const [j, other] of lines.entries()) if (i === j || other.of === one || one.raw === other) plot.setSeries(j + 1, {show});
    }}] : []));
  }

  /** Values at the cursor, else the last recorded ones. */
  function tell(self) {
    const at = self.cursor.idx, {lines} = kept, shown = lines.flatMap((one, i) => (isNamed(one) ? [[one, i]] : []));
    legend.tell((n) => {
      const [one, i] = shown[n], source = one.raw ? lines.indexOf(one.raw) : i;
      if (at === null || at === undefined || self.cursor.left < 0) return short(lastOf(recorded(one).y));
      return short(self.data[source + 1]?.[at]);
    });
  }

  function options(lines, spans, log, time) {
    const bands = lines.flatMap((one, i) => (one.band ? [{series: [i - 1, i], fill: `${tint(one.colour)}33`}] : []));
    return {
      width: wide,
      height: high,
      scales: {x: {time}, y: log ? {distr: 3} : {range: heights}},
      axes: axes(time),
      cursor: shared(time),
      legend: {show: false},
      bands,
      series: [{label: time ? "time" : "step"}, ...lines.map((one) => ({
        label: one.label,
        stroke: one.hidden ? "transparent" : one.faint ? `${tint(one.colour)}55` : tint(one.colour),
        width: one.dots || one.hidden ? 0 : one.faint ? 1 : 2,
        dash: one.dash?.length ? one.dash : undefined,
        spanGaps: true,
        points: {show: !one.hidden && (one.dots || spans.get(one) < 40), size: 5, fill: one.dots ? tint(one.colour) : undefined},
      }))],
      hooks: {setCursor: [tell], setSelect: [selected(time)], ready: [(self) => {
        if (onpick) self.over.addEventListener("dblclick", () => onpick(self.data[0][self.cursor.idx]));
      }]},
    };
  }

  function savePicture() {
    const {lines, log, time} = kept, {x, y} = plot.scales;
    const visible = lines.filter((one, i) => !one.hidden && plot.series[i + 1].show).map((one) => ({...one, stroke: tint(one.colour), dash: one.dash || []}));
    saveAs(`${fileName(title)}.svg`, "image/svg+xml", svgOf(title, time ? "time (UTC)" : "step", visible, {x: [x.min, x.max], y: [y.min, y.max], log, time}));
  }

  function saveNumbers() {
    const {lines, time} = kept;
    saveAs(`${fileName(title)}.csv`, "text/csv", csvOf(time ? "time" : "step", lines.filter(isNamed).map((one) => ({...one, y: recorded(one).y, band: recorded(one).band})), zoomed(time)));
  }

  function resize(width) {
    wide = Math.max(width, 200);
    if (plot && plot.width !== wide) plot.setSize({width: wide, height: high});
  }

  return {element, set};
}

/** A border of a band, as a line that is not drawn. */
const edge = (one, side) => ({label: `${one.label} ${side}`, colour: one.colour, x: one.x, y: one.band[side], hidden: true, of: one});

/** From where to where the y axis goes; a number that never changes would otherwise be drawn on 0 to 100. */
function heights(_, low, high) {
  if (low === null || low !== high) return uPlot.rangeNum(low ?? 0, high ?? 1, 0.1, true);
  return low === 0 ? [0, 1] : [low - 0.1 * Math.abs(low), low + 0.1 * Math.abs(low)];
}

/** Stacked bars: {element, set(make)}; make() gives [x, [{label, metric, y}]]. */
export function stackedChart(title, unit) {
  const place = h("div", {class: "plot", role: "img", "aria-label": title}), legend = chartLegend();
  let plot = null, drawn = "", wide = 0, kept = null;
  const {element} = frame(title, {wide: true, place, legend: legend.element, files: {SVG: () => savePicture(), CSV: () => saveNumbers()}});
  const set = whenVisible(place, draw, resize);

  function draw(make) {
    const [x, parts] = make();
    kept = {x, parts};
    const key = JSON.stringify([parts.map((part) => part.label), document.documentElement.dataset.theme]);
    place.setAttribute("aria-label", `${title}; at the last step: ${parts.map((part) => `${part.label} ${short(lastOf(part.y), 3)} ${unit}`).join(", ")}`);
    const data = [x, ...heaps().reverse()];
    if (plot && key === drawn) plot.batch(() => { plot.setData(data, false); follow(plot, false); });
    else {
      if (plot) (standing.delete(plot), plot.destroy());
      drawn = key;
      plot = new uPlot(options(parts), data, place);
      standing.set(plot, false);
      follow(plot, false);
      legend.set(parts.map((part, i) => ({label: part.label, metric: part.metric, colour: i, filled: true, pale: i >= PALE_FROM, dash: [], on: true, toggle: (on) => {
        part.off = !on;
        plot.batch(() => { plot.setData([kept.x, ...heaps().reverse()], false); follow(plot, false); });
      }})));
    }
    tell(plot);
  }

  /** Each part on top of those before it. */
  function heaps() {
    const sums = kept.x.map(() => 0);
    return kept.parts.map((part) => part.y.map((value, i) => (sums[i] += part.off ? 0 : value || 0)));
  }

  function tell(self) {
    const at = self.cursor.idx, away = at === null || at === undefined || self.cursor.left < 0;
    legend.tell((i) => `${short(away ? lastOf(kept.parts[i].y) : kept.parts[i].y[at], 3)} ${unit}`);
  }

  function options(parts) {
    const bars = uPlot.paths.bars({size: [1, 40], gap: 0});
    return {
      width: wide,
      height: HEIGHT + 30,
      scales: {x: {time: false}, y: {range: (_, low, high) => [0, high || 1]}},
      axes: axes(),
      cursor: shared(false),
      legend: {show: false},
      series: [{label: "step"}, ...parts.map((part, i) => ({label: part.label, fill: paleTint(i), width: 0, paths: bars, points: {show: false}})).reverse()],
      hooks: {setCursor: [tell], setSelect: [selected(false)]},
    };
  }

  function savePicture() {
    const {x: across, y} = plot.scales, none = kept.x.map(() => 0), tops = heaps();
    const lines = kept.parts.map((part, i) => ({label: part.label, x: kept.x, y: tops[i], band: {low: i ? tops[i - 1] : none, high: tops[i]}, stroke: paleTint(i).slice(0, 7), dash: []}));
    saveAs(`${fileName(title)}.svg`, "image/svg+xml", svgOf(`${title}, ${unit}`, "step", lines, {x: [across.min, across.max], y: [y.min, y.max]}));
  }

  function saveNumbers() {
    saveAs(`${fileName(title)}.csv`, "text/csv", csvOf("step", kept.parts.map((part) => ({label: part.label, x: kept.x, y: part.y})), zoomed(false)));
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
