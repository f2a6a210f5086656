// A response token by token, coloured by a number; the arrows move over it, and a click shows what both sides computed.

import {ask} from "./api.js";
import {announce, h, put, short} from "./dom.js";

const trainer = (n, i) => at(n.new_log_probs, i) ?? at(n.old_log_probs, i);
const at = (list, i) => (list ? list[i] ?? null : null);
const gap = (a, b) => (a === null || b === null ? null : a - b);

/** What can be coloured by: name, value of token i, and how a value becomes a hue and a strength from 0 to 1. */
export const COLOURINGS = {
  none: ["nothing", null, null],
  logprob: ["log-prob", (n, i) => at(n.rollout_log_probs, i) ?? trainer(n, i), (v) => ["warm", Math.min(1, -v / 5)]],
  ratio: ["ratio", (n, i) => ratio(n, i), (v) => [v > 1 ? "warm" : "cool", Math.min(1, Math.abs(Math.log(v)) / 0.25)]],
  mismatch: ["rollout − trainer", (n, i) => gap(at(n.rollout_log_probs, i), copied(n) ? trainer(n, i) : at(n.old_log_probs, i) ?? trainer(n, i)), (v, most) => [v > 0 ? "warm" : "cool", Math.abs(v) / most]],
  advantage: ["advantage", (n, i) => at(n.advantages, i), (v, most) => [v > 0 ? "good" : "warm", Math.abs(v) / most]],
  entropy: ["entropy", (n, i) => at(n.entropy, i), (v, most) => ["warm", v / most]],
  mask: ["mask", (n, i) => at(n.response_mask, i), (v) => [v ? "good" : "grey", v ? 0.3 : 1]],
};
const HUES = {warm: "214,84,40", cool: "45,110,220", good: "40,150,80", grey: "128,128,128"};

/** How much likelier the trained policy makes the token than the one it was sampled from. */
function ratio(n, i) {
  const now = at(n.new_log_probs, i), old = at(n.old_log_probs, i) ?? at(n.rollout_log_probs, i);
  const difference = now !== null ? gap(now, old) : gap(at(n.old_log_probs, i), at(n.rollout_log_probs, i));
  return difference === null ? null : Math.exp(difference);
}

/** Whether the old log-probs are the rollout's own, as where both sides agreed at step 0. */
function copied(n) {
  if (n.copied === undefined) n.copied = Boolean(n.old_log_probs && n.rollout_log_probs && n.old_log_probs.every((value, i) => value === n.rollout_log_probs[i]));
  return n.copied;
}

/** The numbers of a response; those of the last ones looked at are kept, for another colouring. */
const kept = new Map();
function tokensOf(query) {
  const key = JSON.stringify(query);
  if (!kept.has(key)) kept.set(key, ask("response", query).catch((error) => { kept.delete(key); throw error; }));
  if (kept.size > 64) kept.delete(kept.keys().next().value);
  return kept.get(key);
}

/** Fill `place` with the tokens of a response. */
export async function drawTokens(place, query, colouring, inspect) {
  const found = await tokensOf(query);
  const [name, valueOf, paint] = COLOURINGS[colouring];
  const {texts, ids, numbers} = found;
  if (!texts.length) return put(place, h("p", {class: "soft"}, "no tokens"));
  const values = texts.map((_, i) => valueOf(numbers, i));
  const most = Math.max(1e-12, ...values.filter((value) => value !== null).map(Math.abs));
  if (values.every((value) => value === null)) place.dataset.note = `This run did not record ${name}.`;
  else delete place.dataset.note;
  const spans = texts.map((text, i) => token(text, values[i], paint, most, i));
  const box = h("div", {class: "tokens", tabindex: 0, role: "application", "aria-label": `tokens by ${name}; arrows move`, dir: "auto"}, spans);
  let chosen = -1;
  const choose = (i) => {
    spans[chosen]?.classList.remove("chosen");
    chosen = i;
    spans[i].classList.add("chosen");
    spans[i].scrollIntoView({block: "nearest"});
    inspect(details(texts, ids, numbers, i));
    announce(`token ${i + 1}: ${texts[i]}, ${name} ${short(values[i])}`);
  };
  box.addEventListener("click", (event) => event.target.dataset.i && choose(Number(event.target.dataset.i)));
  box.addEventListener("keydown", (event) => {
    const moves = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10};
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    choose(Math.min(spans.length - 1, Math.max(0, chosen + moves[event.key])));
  });
  put(place, place.dataset.note && h("p", {class: "soft"}, place.dataset.note), box);
}

function token(text, value, paint, most, i) {
  const span = h("span", {"data-i": i}, text.replace(/\n/g, "⏎\n") || "·");
  if (value !== null && value !== undefined) {
    const [hue, strength] = paint(value, most);
    span.style.backgroundColor = `rgba(${HUES[hue]},${(0.42 * Math.min(1, Math.max(0, strength))).toFixed(3)})`;
  }
  return span;
}

function details(texts, ids, numbers, i) {
  const rollout = at(numbers.rollout_log_probs, i), old = at(numbers.old_log_probs, i), now = at(numbers.new_log_probs, i);
  const rows = [
    ["token", `${JSON.stringify(texts[i])}, id ${ids[i]}, place ${i + 1} of ${ids.length}`],
    ["rollout log-prob", rollout, "prob", rollout === null ? null : Math.exp(rollout)],
    copied(numbers) ? ["trainer log-prob, before the update", "taken from the rollout"] : ["trainer log-prob, before the update", old, "prob", old === null ? null : Math.exp(old)],
    ["trainer log-prob, in the update", now, "prob", now === null ? null : Math.exp(now)],
    ["reference log-prob", at(numbers.ref_log_probs, i)],
    ["trainer − rollout", gap(copied(numbers) ? now : old ?? now, rollout)],
    ["ratio", ratio(numbers, i)],
    ["advantage", at(numbers.advantages, i)],
    ["entropy", at(numbers.entropy, i)],
    ["trained on", at(numbers.response_mask, i) === null ? null : at(numbers.response_mask, i) ? "yes" : "no (masked)"],
  ];
  return h("dl", {class: "facts"}, rows.filter((row) => row[1] !== null).map(([name, value, more, number]) =>
    [h("dt", {}, name), h("dd", {}, typeof value === "number" ? short(value, 6) : value, more && number !== null ? h("small", {}, ` ${more} ${short(number)}`) : "")]));
}
