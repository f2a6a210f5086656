// Colours. There are eight, after Okabe and Ito, in style.css for either theme: apart for every kind of sight, and strong
// enough on their background. What needs more of them is told apart by dashes.

const COUNT = 8;
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [14, 4]];

/** A colour of the theme, asked for once: every question makes the browser lay the page out first. */
const asked = new Map();
export function themeColour(name) {
  const key = `${document.documentElement.dataset.theme} ${name}`;
  if (!asked.has(key)) asked.set(key, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return asked.get(key);
}

/** The style sheet's name of colour i. */
export const tintName = (i) => `--c${i % COUNT}`;
/** Colour i as it is in this theme. */
export const tint = (i) => themeColour(tintName(i));
/** Past the last colour they begin again, paler. */
export const paleTint = (i) => tint(i) + (i < COUNT ? "" : "88");
export const dashOf = (i) => DASHES[i % DASHES.length];

/** The number of each chosen run's colour. It follows from the run's place among all runs, so that it stays the same
 *  whatever else is chosen, in every chart and on every page, but for two chosen runs that would share one. */
export function runTints(runs, chosen) {
  const taken = new Set(), found = new Map();
  for (const [place, run] of runs.entries()) {
    if (!chosen.includes(run.name)) continue;
    let at = place % COUNT;
    for (let tried = 0; taken.has(at) && tried < COUNT; tried++) at = (at + 1) % COUNT;
    taken.add(at);
    if (taken.size === COUNT) taken.clear();
    found.set(run.name, at);
  }
  return found;
}
