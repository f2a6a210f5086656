// The frame of the page: which page is shown, the header, the theme, keys, and the beat at which a live run is asked.

import {ask, exportedNote, isExported} from "./api.js";
import {detailsPage} from "./details_page.js";
import {h, put, seconds} from "./dom.js";
import {healthPage} from "./health.js";
import {overviewPage} from "./overview.js";
import {runsPage} from "./runs_page.js";
import {samplesPage} from "./samples.js";
import {go, place} from "./state.js";
import {timelinePage} from "./timeline.js";

const PAGES = {runs: ["Runs", runsPage], overview: ["Overview", overviewPage], samples: ["Samples", samplesPage], health: ["Health", healthPage], timeline: ["Timeline", timelinePage], settings: ["Settings", detailsPage]};
const LIVE_MS = 2000, CALM_MS = 15000;
const top = document.getElementById("top"), main = document.getElementById("main");
let runs = [], page = null, shown = "", timer = 0;

function theme(next) {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  let kept = next;
  try {
    if (next) localStorage.setItem("posttrain-theme", next);
    kept = localStorage.getItem("posttrain-theme");
  } catch { /* a file that was opened from disk may not remember */ }
  document.documentElement.dataset.theme = kept || system;
}

function drawTop() {
  const at = place().page, live = runs.filter((run) => run.status === "running");
  const words = live.map((run) => `${run.name}: step ${run.step}/${run.total_steps}${run.stage ? `, ${run.stage}` : ""}${run.seconds_left ? `, ${seconds(run.seconds_left)} left` : ""}`);
  put(top,
    h("span", {class: "brand"}, "posttrain"),
    h("nav", {"aria-label": "Pages"}, Object.entries(PAGES).map(([key, [text]]) =>
      h("a", {href: `#/${key}`, "aria-current": key === at ? "page" : null, onclick: (event) => { event.preventDefault(); turn(key); }}, text))),
    h("span", {class: "live"}, isExported ? exportedNote : words.join(" · ")),
    h("button", {class: "plain", onclick: () => { theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); redraw(); }, "aria-label": "Dark or light"}, "◐"),
    h("button", {class: "plain", onclick: help, "aria-label": "Keys"}, "?"));
}

function turn(key) {
  const {run, runs: chosen} = place(), all = (chosen || "").split("\t");
  go({...Object.fromEntries(Object.keys(place()).map((name) => [name, null])), page: key, runs: chosen, run: (all.includes(run) || !chosen ? run : all[0]) || null});
}

function help() {
  const keys = [["1 2 3 4 5 6", "runs, overview, samples, health, timeline, settings"], ["[ ]", "the step before, the next"], ["j k", "the next entry of the list, the one before"], ["/", "search"], ["c", "colour tokens by the next number"], ["Esc", "show all steps again after a zoom"], ["t", "dark or light"], ["← →", "move over a response's tokens, once one is chosen"], ["?", "this list"]];
  const dialog = h("dialog", {"aria-label": "Keys", onclose: () => dialog.remove()}, h("h2", {}, "Keys"),
    h("table", {}, h("tbody", {}, keys.map(([key, text]) => h("tr", {}, h("th", {scope: "row"}, key), h("td", {}, text))))),
    h("form", {method: "dialog"}, h("button", {autofocus: true}, "Close")));
  document.body.append(dialog);
  dialog.showModal();
}

async function redraw() {
  const state = place(), hash = location.hash;
  drawTop();
  if (shown !== state.page) {
    if (page?.leave) page.leave();
    put(main);
    page = (PAGES[state.page] || PAGES.overview)[1](main);
    shown = state.page;
    document.title = `${(PAGES[state.page] || PAGES.overview)[0]} · posttrain view`;
  }
  try {
    await page.show(runs);
    main.querySelector(".problem.whole")?.remove();
    document.documentElement.dataset.drawn = hash;
  } catch (error) {
    if (error.name === "AbortError") return;
    main.querySelector(".problem.whole")?.remove();
    main.prepend(h("p", {class: "problem whole", role: "alert"}, error.message));
  }
}

async function beat() {
  clearTimeout(timer);
  try {
    const stamp = () => JSON.stringify(runs.map((run) => [run.name, run.step, run.status, run.problem]));
    const before = stamp();
    runs = await ask("runs");
    const changed = before !== stamp();
    if (changed || !shown) await redraw();
    else drawTop();
  } catch (error) {
    put(top, h("span", {class: "brand"}, "posttrain"), h("span", {class: "problem", role: "alert"}, `No answer: ${error.message}`));
  }
  const wait = runs.some((run) => run.status === "running") ? LIVE_MS : CALM_MS;
  if (!isExported) timer = setTimeout(beat, document.hidden ? CALM_MS : wait);
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || typing) return;
  const keys = {...Object.fromEntries(Object.keys(PAGES).map((name, i) => [i + 1, () => turn(name)])), "?": help, t: () => { theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); redraw(); }};
  const act = keys[event.key] || page?.keys?.[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});
window.addEventListener("hashchange", redraw);
document.addEventListener("visibilitychange", () => { if (!document.hidden && !isExported) beat(); });
theme();
beat();
