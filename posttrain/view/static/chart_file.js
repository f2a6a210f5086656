// A chart as a file: the picture as SVG with its title and legend, the recorded numbers as CSV.

import {h, short, svg} from "./dom.js";
import {themeColour} from "./palette.js";

const WIDE = 720, HIGH = 360, PAD_LEFT = 64, PAD_RIGHT = 16, PAD_TOP = 34, PAD_BOTTOM = 34;

export function saveAs(name, kind, text) {
  const address = URL.createObjectURL(new Blob([text], {type: kind}));
  h("a", {href: address, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

export const fileName = (title) => title.replace(/[^\p{L}\p{N}]+/gu, "_").replace(/^_+|_+$/g, "").toLowerCase() || "chart";

/** One row per x within `range`, one column per line: [{label, x, y, band}], bands as two columns more. */
export function csvOf(across, lines, range) {
  const columns = lines.flatMap(({label, x, y, band}) => [[label, x, y], ...(band ? [[`${label} lowest`, x, band.low], [`${label} highest`, x, band.high]] : [])]);
  const rows = new Map();
  for (const [i, [, x, y]] of columns.entries()) {
    for (const [at, value] of x.entries()) {
      if (range && (value < range[0] || value > range[1])) continue;
      if (!rows.has(value)) rows.set(value, columns.map(() => ""));
      rows.get(value)[i] = y[at] ?? "";
    }
  }
  const quoted = (text) => (/[",\n]/.test(text) ? `"${String(text).replaceAll('"', '""')}"` : text);
  const all = [[across, ...columns.map(([label]) => label)], ...[...rows].sort(([a], [b]) => a - b).map(([x, values]) => [x, ...values])];
  return all.map((row) => row.map(quoted).join(",")).join("\n") + "\n";
}

/** The picture; lines are [{label, x, y, stroke, dash, band, faint, fill}], scales are [low, high]. */
export function svgOf(title, across, lines, {x: [left, right], y: [low, high], log, time}) {
  const flat = (value) => (log ? Math.log10(value) : value);
  const px = (value) => PAD_LEFT + (WIDE - PAD_LEFT - PAD_RIGHT) * (value - left) / (right - left || 1);
  const py = (value) => HIGH - PAD_BOTTOM - (HIGH - PAD_BOTTOM - PAD_TOP) * (flat(value) - flat(low)) / (flat(high) - flat(low) || 1);
  const inside = ({x}) => x.map((_, i) => i).filter((i) => x[i] >= left && x[i] <= right);
  const points = (one, ys) => inside(one).filter((i) => ys[i] !== null && ys[i] !== undefined && (!log || ys[i] > 0)).map((i) => `${px(one.x[i]).toFixed(1)},${py(ys[i]).toFixed(1)}`);
  const text = themeColour("--text"), soft = themeColour("--soft"), rule = themeColour("--line");
  const shown = lines.filter((one) => !one.faint), legend = Math.ceil(shown.length / 2) * 18;
  const picture = svg("svg", {xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${WIDE} ${HIGH + 22 + legend}`, width: WIDE, height: HIGH + 22 + legend, "font-family": "system-ui, sans-serif", "font-size": 12},
    svg("rect", {width: "100%", height: "100%", fill: themeColour("--back")}),
    svg("text", {x: PAD_LEFT, y: 20, fill: text, "font-size": 15, "font-weight": 600}, title),
    ticks(flat(low), flat(high)).map((at) => (log ? 10 ** at : at)).map((value) => [svg("line", {x1: PAD_LEFT, x2: WIDE - PAD_RIGHT, y1: py(value), y2: py(value), stroke: rule}), svg("text", {x: PAD_LEFT - 8, y: py(value) + 4, fill: soft, "text-anchor": "end"}, short(value))]),
    ticks(left, right).map((value) => svg("text", {x: px(value), y: HIGH - PAD_BOTTOM + 18, fill: soft, "text-anchor": "middle"}, time ? new Date(value * 1000).toISOString().slice(5, 16).replace("T", " ") : short(value))),
    svg("text", {x: (PAD_LEFT + WIDE) / 2, y: HIGH + 4, fill: soft, "text-anchor": "middle"}, across),
    lines.map((one) => [
      one.band && svg("polygon", {points: [...points(one, one.band.high), ...points(one, one.band.low).reverse()].join(" "), fill: one.stroke, "fill-opacity": 0.2}),
      svg("polyline", {points: points(one, one.y).join(" "), fill: "none", stroke: one.stroke, "stroke-width": one.faint ? 1 : 2, "stroke-opacity": one.faint ? 0.35 : 1, "stroke-dasharray": one.dash.join(" ") || null, "stroke-linejoin": "round"})]),
    shown.map((one, i) => {
      const x = PAD_LEFT + (i % 2) * (WIDE - PAD_LEFT) / 2, y = HIGH + 26 + 18 * Math.floor(i / 2);
      return [svg("line", {x1: x, x2: x + 22, y1: y - 4, y2: y - 4, stroke: one.stroke, "stroke-width": 3, "stroke-dasharray": one.dash.join(" ") || null}), svg("text", {x: x + 30, y, fill: text}, one.label)];
    }));
  return new XMLSerializer().serializeToString(picture);
}

/** Some five round numbers from `low` to `high`. */
function ticks(low, high) {
  const rough = (high - low || 1) / 5, ten = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((by) => by * ten).find((one) => one >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}
