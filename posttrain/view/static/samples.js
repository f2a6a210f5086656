// Samples: choose a step, a filter or words to search for; the list leads to groups, these to responses and tokens.

import {ask, isExported} from "./api.js";
import {announce, choice, h, put, short} from "./dom.js";
import {groupView} from "./group.js";
import {searcher} from "./search.js";
import {chosenRuns, go, place} from "./state.js";
import {COLOURINGS} from "./tokens.js";
import {virtualList} from "./virtual.js";

const FILTERS = [["", "all groups of the step"], ["signal", "groups with signal"], ["best", "best responses"], ["worst", "worst responses"], ["longest", "longest"], ["truncated", "cut off"], ["failed", "reward failed"], ["mismatch", "rollout ≠ trainer"]];
const ROW = 58;

export function samplesPage(root) {
  const bar = h("div", {class: "bar"}), note = h("p", {class: "soft note"}), group = groupView();
  const list = virtualList({label: "Found", height: ROW, row: rowOf, pick: pickRow, seen: fetchPreviews});
  const search = searcher((hits, words) => { note.textContent = words; list.set(hits); }, (words) => { note.textContent = words; announce(words); });
  put(root, h("h1", {class: "visually-hidden"}, "Samples"), bar, h("div", {class: "split"}, h("div", {class: "side"}, note, list.element), group.element));
  let steps = {step: [], val: []}, listed = "", waiting = 0, previewing = 0;

  async function show(runs) {
    const state = place(), run = state.run || chosenRuns(runs)[0], kind = state.kind || "step";
    if (!run) return;
    if (!state.run) return go({run}, true);
    const about = runs.find((one) => one.name === run);
    const asked = JSON.stringify([run, about?.step, about?.status]);
    if (steps.asked !== asked) steps = {...(await ask("steps", {run, learn: 1})), asked};
    if (!steps[kind].length) {
      drawBar(runs, run, kind, null);
      listed = "";
      list.set([]);
      return put(group.element, h("p", {class: "soft"}, kind === "val" ? "This run holds no samples of validations." : "This run holds no samples of training yet: tracking.samples_freq says every how many steps they are kept. " + (steps.val.length ? "It holds some of validations." : "")));
    }
    const step = nearest(steps[kind], state.step);
    drawBar(runs, run, kind, step);
    await fillList({run, kind, step, filter: state.filter || "", words: state.words || "", wide: state.wide === "1"});
    const first = state.uid === undefined && (list.items[list.chosen] || list.items[0]);
    // what does not change any more gets the address of what is shown; a run that goes on is followed to its newest step
    if (first && about?.status !== "running") return go({step: first.step, uid: first.uid, sample: first.sample ?? null}, true);
    await group.show(first ? {run, kind, step: first.step, uid: first.uid, sample: first.sample} : {run, kind, step, uid: state.uid, sample: state.sample});
  }

  function drawBar(runs, run, kind, step) {
    const state = place(), all = steps[kind];
    const key = JSON.stringify([runs.map((one) => one.name), run, kind, step, all.length, state.filter, state.words, state.wide]);
    if (bar.dataset.drawn === key || bar.contains(document.activeElement) && document.activeElement.type === "search") return;
    const focused = bar.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    bar.dataset.drawn = key;
    const words = h("input", {type: "search", "data-key": "words", placeholder: isExported ? "not in an export" : "in prompts and responses", value: state.words || "", disabled: isExported, onchange: () => go({words: words.value.trim() || null, uid: null, sample: null})});
    const slider = h("input", {type: "range", "data-key": "slider", min: 0, max: Math.max(0, all.length - 1), value: all.indexOf(step), "aria-label": "Step", oninput: () => go({step: all[slider.value], uid: null, sample: null}, true)});
    put(bar,
      choice("Run", runs.map((one) => [one.name, one.name]), run, (name) => go({run: name, step: null, uid: null, sample: null})),
      choice("Of", [["step", "training"], ["val", "validation"]], kind, (value) => go({kind: value === "step" ? null : value, step: null, uid: null, sample: null})),
      h("div", {class: "field"}, h("span", {}, `Step ${step ?? "–"}`), h("div", {class: "stepper"},
        h("button", {"aria-label": "the step before", onclick: () => moveStep(-1)}, "‹"), slider, h("button", {"aria-label": "the next step", onclick: () => moveStep(1)}, "›"))),
      choice("Show", FILTERS.filter(([name]) => !isExported || !name || name === "signal"), state.filter || "", (value) => go({filter: value || null, uid: null, sample: null})),
      !isExported && h("label", {class: "field check"}, h("input", {type: "checkbox", checked: state.wide === "1", onchange: (event) => go({wide: event.target.checked ? "1" : null, uid: null, sample: null})}), h("span", {}, "of all steps")),
      h("label", {class: "field"}, h("span", {}, "Search"), words));
    if (focused) bar.querySelector(`[data-key="${focused}"]`)?.focus();
  }

  async function fillList({run, kind, step, filter, words, wide}) {
    const key = JSON.stringify([run, kind, wide || words ? null : step, filter, words, wide, steps.asked]);
    if (key === listed) return;
    listed = key;
    clearTimeout(waiting);
    search.stop();
    if (words && !isExported) return search.start({run, kind, words});
    if (filter && filter !== "signal" && !isExported) return findResponses({run, kind, which: filter, step: wide ? null : step});
    const all = await ask("groups", {run, kind, step});
    if (key !== listed) return;
    const found = filter === "signal" ? all.filter(hasSignal) : all, chosen = found.findIndex((one) => one.uid === place().uid);
    note.textContent = `${found.length} groups${filter === "signal" ? ` of ${all.length}` : found.some((one) => one.scores.length > 1) ? `, ${found.filter(hasSignal).length} with signal` : ""}`;
    const at = chosen < 0 ? Math.max(0, found.findIndex(hasSignal)) : chosen;
    list.set(found.map((one) => ({...one, step})), at);
    list.mark(at);
  }

  async function findResponses(query) {
    const key = listed, found = await ask("find", query);
    if (key !== listed) return;
    const read = found.read < found.files ? ` (${found.read} of ${found.files} files read)` : "";
    note.textContent = `${found.count} responses${found.count > found.found.length ? `, ${found.found.length} shown` : ""}${read}`;
    list.set(found.found);
    if (read) waiting = setTimeout(() => key === listed && findResponses(query), 1000);
  }

  /** Beginnings of the visible responses of a filter. */
  function fetchPreviews(first, last) {
    clearTimeout(previewing);
    previewing = setTimeout(async () => {
      const wanted = [];
      for (let i = first; i < last; i++) if (list.items[i]?.row !== undefined && list.items[i].text === undefined) wanted.push(i);
      if (!wanted.length) return;
      const items = list.items, {run, kind} = {run: place().run, kind: place().kind};
      const rows = wanted.map((i) => `${items[i].step}.${items[i].row}`).join(",");
      const texts = await ask("previews", {run: run || JSON.parse(listed)[0], kind, rows});
      if (items !== list.items) return;
      for (const [n, i] of wanted.entries()) (items[i].text = texts[n], list.renew(i));
    }, 60);
  }

  function rowOf(item) {
    const mark = (count, words, look) => (count ? h("span", {class: look}, typeof count === "number" ? `${count} ${words}` : words) : null);
    const marks = [item.scores?.length > 1 && !hasSignal(item) && h("span", {class: "mark"}, "no signal"), mark(item.truncated, "cut off", "mark"), mark(item.failed, "failed", "mark bad")];
    if (item.scores) return [h("div", {class: "line"}, h("b", {}, short(item.mean, 3)), bars(item.scores), marks), h("div", {class: "line soft clip", dir: "auto"}, item.prompt)];
    const text = Array.isArray(item.text) ? [item.text[0], h("mark", {}, item.text[1]), item.text[2]] : item.text || "";
    return [h("div", {class: "line"}, h("b", {}, short(item.score, 3)), h("span", {class: "soft"}, `step ${item.step} › ${item.uid} › ${item.sample}${item.length !== undefined ? `, ${item.length} tokens` : ""}`), marks), h("div", {class: "line soft clip", dir: "auto"}, text)];
  }

  /** The scores of a group as a row of small bars. */
  function bars(scores) {
    const low = Math.min(0, ...scores), high = Math.max(1e-9, ...scores);
    return h("span", {class: "bars", "aria-label": `scores ${scores.map((score) => short(score, 2)).join(" ")}`, role: "img"}, scores.slice(0, 32).map((score) => {
      const bar = h("i");
      bar.style.height = `${2 + 14 * ((score ?? low) - low) / (high - low || 1)}px`;
      return bar;
    }));
  }

  function pickRow(item) {
    go({step: item.step, uid: item.uid, sample: item.sample ?? null});
  }

  function moveStep(by) {
    const all = steps[place().kind || "step"], now = all.indexOf(nearest(all, place().step));
    const next = all[Math.min(all.length - 1, Math.max(0, now + by))];
    if (next !== undefined) go({step: next, uid: null, sample: null});
  }

  function nextColour() {
    const names = Object.keys(COLOURINGS), now = names.indexOf(place().colour || "none");
    const next = names[(now + 1) % names.length];
    go({colour: next === "none" ? null : next});
    announce(`coloured by ${COLOURINGS[next][0]}`);
  }

  const keys = {"[": () => moveStep(-1), "]": () => moveStep(1), j: () => list.move(1), k: () => list.move(-1), c: nextColour, "/": () => bar.querySelector("input[type=search]")?.focus()};
  return {show, keys, leave: () => { search.stop(); clearTimeout(waiting); }};
}

/** Whether the responses differ in their score: only such a group gives a gradient. */
const hasSignal = ({scores}) => new Set(scores.filter((score) => score !== null)).size > 1;

/** The step of the list that is wanted, or the last one before it; without a wish the newest. */
function nearest(all, wanted) {
  if (wanted === undefined) return all[all.length - 1];
  const before = all.filter((step) => step <= Number(wanted));
  return before.length ? before[before.length - 1] : all[0];
}
