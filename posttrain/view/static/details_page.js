// Settings: what a run was set to, what differs from the defaults first, and by which command, versions and machine it
// was made.

import {ask} from "./api.js";
import {announce, choice, h, put} from "./dom.js";
import {chosenRuns, go, place} from "./state.js";

export function detailsPage(root) {
  const bar = h("div", {class: "bar"}), made = h("section", {class: "made"}), changed = h("section"), usual = h("section");
  put(root, h("h1", {class: "visually-hidden"}, "Settings"), bar, h("div", {class: "beside"}, changed, made, usual));
  let drawn = "", found = null;

  async function show(runs) {
    const run = place().run || chosenRuns(runs)[0], about = runs.find((one) => one.name === run);
    if (!about) throw new Error(`There is no run ${run} here.`);
    if (!place().run) return go({run}, true);
    const key = JSON.stringify([run, about.status]);
    if (key !== drawn) {
      drawn = key;
      drawBar(runs, run);
      found = await ask("details", {run});
      drawMade();
    }
    if (found) drawTable((place().find || "").trim().toLowerCase());
  }

  function drawBar(runs, run) {
    const words = h("input", {type: "search", size: 30, placeholder: "key, value or meaning", value: place().find || "", oninput: () => go({find: words.value || null}, true)});
    put(bar, choice("Run", runs.map((one) => [one.name, one.name]), run, (name) => go({run: name})), h("label", {class: "field"}, h("span", {}, "Search"), words));
  }

  function drawTable(words) {
    const kept = found.settings.filter((one) => `${one.key} ${one.value} ${one.sentence}`.toLowerCase().includes(words));
    const others = kept.filter((one) => one.changed), same = kept.filter((one) => !one.changed);
    put(changed,
      found.problem && h("p", {class: "problem"}, found.problem),
      !found.settings.length && !found.problem && h("p", {class: "soft"}, "This run left no settings behind."),
      others.length > 0 && [h("h2", {}, `Changed from the default (${others.length})`), settings(others, true)],
      words && !kept.length && h("p", {class: "soft"}, "No setting has these words."));
    put(usual, same.length > 0 && [h("h2", {}, `Left at the default (${same.length})`), settings(same, false)]);
  }

  function settings(rows, beside) {
    return h("table", {class: "settings"}, h("thead", {}, h("tr", {}, ["setting", "value", beside && "default"].filter(Boolean).map((text) => h("th", {scope: "col"}, text)))),
      h("tbody", {}, rows.map((one) => h("tr", {},
        h("th", {scope: "row"}, h("span", {tabindex: one.sentence ? 0 : null, "data-tip": one.sentence || null, class: one.sentence ? "explained" : ""}, one.key)),
        h("td", {}, one.value === "" ? h("span", {class: "soft"}, "null") : one.value),
        beside && h("td", {class: "soft"}, one.default === null ? "none" : one.default === "" ? "null" : one.default)))));
  }

  function drawMade() {
    const starts = found.starts;
    if (!starts.length) return put(made, h("h2", {}, "Command, versions, machine"), h("p", {class: "soft"}, "This run recorded none: it has no run.json, which earlier versions did not write."));
    const [newest, ...before] = starts.slice().reverse();
    put(made, h("h2", {}, "Command"), command(newest), facts([["started", newest.time], ["from step", newest.step === "0" ? null : newest.step], ["in", newest.folder], ["on", newest.host]]),
      h("h2", {}, "Machine"), facts(Object.entries(newest.hardware)),
      h("h2", {}, "Versions"), facts(Object.entries(newest.versions)),
      before.length > 0 && h("details", {}, h("summary", {}, `${before.length} earlier ${before.length === 1 ? "start" : "starts"}`), before.map((start) => h("article", {class: "advice"}, command(start), facts([["started", start.time], ["from step", start.step], ["on", start.host], ...Object.entries(start.hardware), ...Object.entries(start.versions)])))));
  }

  function command(start) {
    const text = start.command || "";
    return h("div", {class: "command"}, h("pre", {class: "code", tabindex: 0, role: "region", "aria-label": "command"}, text.replaceAll(/ (?=[\w.+]+=)/g, " \\\n  ")),
      h("button", {onclick: async () => { await navigator.clipboard?.writeText(text); announce("copied"); }}, "Copy"));
  }

  const facts = (pairs) => h("dl", {class: "facts"}, pairs.filter(([, value]) => value).map(([name, value]) => [h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, value)]));
  return {show, keys: {"/": () => bar.querySelector("input[type=search]")?.focus()}};
}
