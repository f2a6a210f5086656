// A list of any length of which only the visible rows exist; moved through by keys, one row chosen.

import {h} from "./dom.js";

const SPARE = 8;

/** {element, set(items), choose(index, scroll)}; `row(item)` gives children, `pick(item, index)` is called on choosing. */
export function virtualList({label, height, row, pick, seen = () => {}}) {
  const inside = h("div", {class: "inside", role: "presentation"});
  const element = h("div", {class: "list", role: "listbox", tabindex: 0, "aria-label": label, onscroll: draw, onkeydown: key}, inside);
  let items = [], chosen = -1, drawn = new Map();

  function set(next, at = -1) {
    items = next;
    chosen = at;
    for (const node of drawn.values()) node.remove();
    drawn = new Map();
    inside.style.height = `${items.length * height}px`;
    draw();
  }

  function draw() {
    const first = Math.max(0, Math.floor(element.scrollTop / height) - SPARE);
    const last = Math.min(items.length, Math.ceil((element.scrollTop + (element.clientHeight || 600)) / height) + SPARE);
    for (const [i, node] of drawn) if (i < first || i >= last) (node.remove(), drawn.delete(i));
    for (let i = first; i < last; i++) if (!drawn.has(i)) drawn.set(i, make(i));
    if (items.length) seen(first, last);
  }

  function make(i) {
    const node = h("div", {class: "row", id: `${label}-${i}`.replace(/\W+/g, "-"), role: "option", "aria-selected": String(i === chosen), "aria-setsize": items.length, "aria-posinset": i + 1, onclick: () => choose(i)}, row(items[i], i));
    node.style.top = `${i * height}px`;
    node.style.height = `${height}px`;
    inside.append(node);
    return node;
  }

  /** Draw a row again whose item has changed. */
  function renew(i) {
    drawn.get(i)?.remove();
    if (drawn.delete(i)) drawn.set(i, make(i));
  }

  function mark(i, scroll = true) {
    drawn.get(chosen)?.setAttribute("aria-selected", "false");
    chosen = i;
    if (scroll && i >= 0) {
      if (i * height < element.scrollTop) element.scrollTop = i * height;
      if ((i + 1) * height > element.scrollTop + element.clientHeight) element.scrollTop = (i + 1) * height - element.clientHeight;
    }
    draw();
    drawn.get(i)?.setAttribute("aria-selected", "true");
    if (drawn.get(i)) element.setAttribute("aria-activedescendant", drawn.get(i).id);
  }

  function choose(i) {
    if (i < 0 || i >= items.length) return;
    mark(i);
    pick(items[i], i);
  }

  function key(event) {
    const moves = {ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10};
    if (event.key in moves) choose(Math.min(items.length - 1, Math.max(0, chosen + moves[event.key])));
    else if (event.key === "Home") choose(0);
    else if (event.key === "End") choose(items.length - 1);
    else return;
    event.preventDefault();
  }

  return {element, set, mark, renew, move: (by) => choose(Math.min(items.length - 1, Math.max(0, chosen + by))), get items() { return items; }, get chosen() { return chosen; }};
}
