// A table of settings, one column per run, that can be narrowed by a word.

import {h} from "./dom.js";

export function settingsTable(names, rows) {
  const body = h("tbody", {}, rows.map(({key, values}) => h("tr", {}, h("th", {scope: "row"}, key), values.map((value) => h("td", {}, value ?? "–")))));
  const narrow = (event) => {
    for (const row of body.children) row.hidden = !row.textContent.toLowerCase().includes(event.target.value.toLowerCase());
  };
  return h("div", {},
    rows.length > 20 && h("label", {class: "field"}, h("span", {}, "Narrow"), h("input", {type: "search", oninput: narrow})),
    h("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "settings"},
      h("table", {}, h("thead", {}, h("tr", {}, h("th", {scope: "col"}, "setting"), names.map((name) => h("th", {scope: "col"}, name)))), body)));
}
