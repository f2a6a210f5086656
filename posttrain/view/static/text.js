// A response as it should be read: paragraphs in their own direction, code as code, formulas set apart as they were
// written. Formulas are not drawn: what the model wrote, character by character, is what was scored.

import {h} from "./dom.js";

const FENCE = /```([^\n`]*)\n([\s\S]*?)(?:```|$)/g;
const FORMULA = /(\$\$[\s\S]+?\$\$|\\\[[\s\S]+?\\\]|\\\([\s\S]+?\\\)|\$[^$\n]{1,300}\$|\\boxed\{[^\n]*?\}+)/g;
const LONGEST = 40000;

export function readable(text) {
  const out = h("div", {class: "text"});
  const shown = text.length > LONGEST ? text.slice(0, LONGEST) : text;
  let at = 0;
  for (const match of shown.matchAll(FENCE)) {
    plain(out, shown.slice(at, match.index));
    out.append(h("pre", {class: "code", dir: "ltr", tabindex: 0, role: "region", "aria-label": `code ${match[1]}`}, h("code", {}, match[2])));
    at = match.index + match[0].length;
  }
  plain(out, shown.slice(at));
  if (shown !== text) out.append(h("p", {class: "soft"}, `… ${text.length - shown.length} more characters: colour by a number to see all tokens`));
  return out;
}

function plain(out, text) {
  for (const line of text.split("\n")) {
    const paragraph = h("p", {dir: "auto"});
    for (const [i, piece] of line.split(FORMULA).entries()) {
      if (!piece) continue;
      paragraph.append(i % 2 ? h("span", {class: "formula", dir: "ltr"}, piece) : piece);
    }
    out.append(paragraph);
  }
}
