// The metrics of runs as columns in memory; asking again brings only what is new.

import {ask} from "./api.js";

const known = new Map();

/** {names, steps, values: {metric: [...]}} with at least these metrics. */
export async function columns(run, names) {
  const have = known.get(run);
  const missing = have ? names.filter((name) => !(name in have.values)) : names;
  const all = have ? [...new Set([...Object.keys(have.values), ...names])] : names;
  const whole = !have || missing.length > 0;
  const answer = await ask("metrics", {run, names: all.join(","), after: whole ? 0 : have.count, identity: whole ? "" : have.identity});
  if (whole || answer.first === 0) {
    const values = Object.fromEntries(all.map((name) => [name, answer.values[name] || answer.steps.map(() => null)]));
    known.set(run, {identity: answer.identity, count: answer.count, names: answer.names, steps: answer.steps, values});
  } else if (answer.steps.length) {
    const values = Object.fromEntries(all.map((name) => [name, have.values[name].concat(answer.values[name] || answer.steps.map(() => null))]));
    known.set(run, {...have, count: answer.count, names: answer.names, steps: have.steps.concat(answer.steps), values});
  }
  return known.get(run);
}
