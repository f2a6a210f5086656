// A conversation as it went: each turn of the model in a box, with its calls and its reward; what it read between them.

import {h, short} from "./dom.js";
import {readable} from "./text.js";

const HEADS = {model: (piece) => `turn ${piece.turn}`, read: () => "read", shared: (_, one) => `shared with branch ${one.parent}`};
const TIPS = {
  model: "The model wrote this; it is trained on.",
  read: "Answers of tools, an environment or an agent: the model reads them and is not trained on them.",
  shared: "These tokens belong to the branch that this one was opened from, and are trained there.",
};

export function conversation(one) {
  return h("ol", {class: "turns"}, one.turns.map((piece) => h("li", {class: `turn ${piece.by}`}, head(piece, one), body(piece), (piece.calls || []).map(call))));
}

function head(piece, one) {
  const counted = `${piece.tokens} token${piece.tokens === 1 ? "" : "s"}`;
  const reward = piece.reward !== undefined && h("b", {"data-tip": "The reward of this turn"}, `reward ${short(piece.reward)}`);
  return h("div", {class: "turn-head"}, h("span", {"data-tip": TIPS[piece.by]}, HEADS[piece.by](piece, one)), reward, h("span", {class: "soft"}, counted));
}

/** What another branch shows already is folded. */
function body(piece) {
  return piece.by === "shared" ? h("details", {}, h("summary", {class: "soft"}, "show"), readable(piece.text)) : readable(piece.text);
}

function call(made) {
  const took = made.seconds === null || made.seconds === undefined ? "" : `${short(made.seconds, 2)} s`;
  const given = made.arguments === null || made.arguments === undefined ? "" : JSON.stringify(made.arguments);
  return h("div", {class: "call"}, h("b", {}, made.name ?? "a call that could not be read"), h("code", {dir: "ltr"}, given), h("span", {class: "soft"}, took), made.error && h("span", {class: "mark bad"}, made.error));
}
