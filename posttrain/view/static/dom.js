// Elements. Texts come from models and are hostile: everything here becomes text, nothing is parsed as markup.

/** h("button", {class: "x", onclick: f, "aria-label": "y"}, "text", child, [more]) */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "selected") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

/** Put these children in place of what an element holds. */
export function put(element, ...children) {
  element.replaceChildren();
  return fill(element, {}, children);
}

/** A short number: 0.1235, 1.2e-5, 12,345. */
export function short(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size >= 10000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

/** Seconds as 3 s, 2 min, 4.5 h. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 120) return `${short(value, 3)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${short(value / 3600, 3)} h`;
}

/** A labelled select; `options` are [value, text]. */
export function choice(label, options, value, change) {
  const select = h("select", {onchange: () => change(select.value)},
    options.map(([key, text]) => h("option", {value: key, selected: key === value}, text)));
  return h("label", {class: "field"}, h("span", {}, label), select);
}

/** Tell it to those who listen instead of looking. */
export function announce(text) {
  document.getElementById("said").textContent = text;
}
