// One prompt with its responses side by side: scores with their parts, advantages, errors, texts or tokens.

import {ask} from "./api.js";
import {lineChart} from "./charts.js";
import {choice, h, put, short} from "./dom.js";
import {go, place} from "./state.js";
import {readable} from "./text.js";
import {conversation} from "./turns.js";
import {COLOURINGS, drawTokens} from "./tokens.js";

/** {element, show(query)}; query: run, kind, step, uid and perhaps the sample to begin with. */
export function groupView() {
  const element = h("section", {class: "group", "aria-label": "Group"});
  const heading = h("h2");
  let drawn = "", known = null;

  async function show({run, kind, step, uid, sample}) {
    const colouring = place().colour in COLOURINGS ? place().colour : "none";
    const key = JSON.stringify([run, kind, step, uid, colouring]);
    if (key === drawn) return known && focus(sample);
    drawn = key;
    if (uid === undefined) return put(element, h("p", {class: "soft"}, "Choose a group."));
    const query = {run, kind, step, uid};
    if (!known || JSON.stringify(known.query) !== JSON.stringify(query)) known = {query, group: await ask("group", query)};
    if (drawn === key) draw(known.group, query, colouring, sample);
  }

  function draw(group, query, colouring, sample) {
    const inspector = h("div", {class: "inspector", role: "region", "aria-label": "Token"}, h("p", {class: "soft"}, colouring === "none" ? "" : "Choose a token to see what rollout and trainer computed."));
    const cards = h("div", {class: "cards", tabindex: 0, role: "region", "aria-label": "Responses"}, group.responses.map((one) => card(one, query, colouring, inspector)));
    const options = Object.entries(COLOURINGS).map(([key, [text]]) => [key, text]);
    put(element,
      heading,
      prompt(group, query),
      h("div", {class: "bar"}, choice("Colour tokens by", options, colouring, (value) => go({colour: value === "none" ? null : value})), h("span", {class: "soft"}, `${group.responses.length} responses`)),
      colouring !== "none" && inspector,
      cards);
    focus(sample);
  }

  function focus(sample) {
    const {kind, step, uid} = known.query;
    heading.textContent = `${kind === "val" ? "Validation at step" : "Step"} ${step} › group ${uid}${sample === undefined ? "" : ` › response ${sample}`}`;
    for (const one of element.querySelectorAll(".card")) one.classList.toggle("chosen", one.dataset.sample === String(sample));
    element.querySelector(".card.chosen")?.scrollIntoView({block: "nearest", inline: "nearest"});
  }

  return {element, show};
}

function prompt(group, query) {
  const across = h("div");
  const facts = [["reference answer", group.ground_truth], ["data source", group.data_source], ["row of the data", group.data_row], ["extra_info", group.extra_info], ["sampling", group.sampling]];
  return h("div", {class: "prompt"},
    h("details", {open: (group.prompt || "").length < 1500}, h("summary", {}, "Prompt"), readable(group.prompt || "")),
    h("dl", {class: "facts"}, facts.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => [h("dt", {}, name), h("dd", {dir: "auto"}, value)])),
    group.data_row !== null && h("button", {onclick: () => acrossSteps(across, group, query)}, "This prompt at all steps"),
    across);
}

/** The prompt's mean score wherever it was asked, as a chart and a list to go there. */
async function acrossSteps(element, group, query) {
  put(element, h("p", {class: "soft"}, "…"));
  let found;
  try {
    found = await ask("same", {run: query.run, kind: query.kind, data_row: group.data_row});
  } catch (error) {
    return put(element, h("p", {class: "problem"}, error.message));
  }
  const chart = lineChart(`Mean score of this prompt`, {});
  const links = found.groups.slice(-200).map((one) => h("li", {}, h("button", {class: "link", onclick: () => go({step: one.step, uid: one.uid, sample: null})}, `step ${one.step}`), ` mean ${short(one.mean)}, ${one.n} responses, length ${short(one.length, 3)}`));
  const rest = found.read < found.files ? h("p", {class: "soft"}, `${found.read} of ${found.files} files were read: `, h("button", {class: "link", onclick: () => acrossSteps(element, group, query)}, "look again")) : "";
  put(element, chart.element, rest, h("ul", {class: "steps"}, links));
  chart.set(() => [{label: "mean score", x: found.groups.map((one) => one.step), y: found.groups.map((one) => one.mean), colour: 0}]);
}

function card(one, query, colouring, inspector) {
  const body = h("div", {class: "body"});
  const facts = [["advantage", one.advantage], ["tokens", one.length], ["mismatch", one.mismatch], ["ended by", one.finish_reason], ["seed", one.seed], ["policy", one.policy_versions]];
  const parts = Object.entries(one.parts);
  const element = h("article", {class: "card", "data-sample": one.sample, "aria-label": `Response ${one.sample}`},
    h("header", {}, h("b", {class: "score"}, short(one.score)), h("button", {class: "link", "data-tip": "The address of this response", onclick: () => go({run: query.run, step: query.step, uid: query.uid, sample: one.sample})}, `response ${one.sample}`), one.parent !== null && one.parent !== undefined && h("span", {class: "soft", "data-tip": `It shares its first ${one.fork} tokens with branch ${one.parent}`}, `branch ${one.branch} of ${one.parent}`), one.finish_reason === "length" && h("span", {class: "mark"}, "cut off"), one.error && h("span", {class: "mark bad"}, "reward failed")),
    parts.length > 0 && h("dl", {class: "facts parts"}, parts.map(([name, value]) => [h("dt", {}, name), h("dd", {dir: "auto"}, typeof value === "number" ? short(value) : value === null ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value))])),
    one.error && h("pre", {class: "problem", tabindex: 0, role: "region", "aria-label": "error of the reward"}, one.error),
    body,
    h("dl", {class: "facts soft"}, facts.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => [h("dt", {}, name), h("dd", {}, typeof value === "number" ? short(value) : value)])));
  if (colouring === "none") put(body, one.turns ? conversation(one) : readable(one.response || ""));
  else whenSeen(element, () => drawTokens(body, {...query, sample: one.sample, ...(one.branch === null || one.branch === undefined ? {} : {branch: one.branch})}, colouring, (facts) => put(inspector, facts)).catch((error) => put(body, h("p", {class: "problem"}, error.message), readable(one.response || ""))));
  return element;
}

function whenSeen(element, act) {
  const watcher = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    watcher.disconnect();
    act();
  }, {rootMargin: "400px"});
  watcher.observe(element);
}
