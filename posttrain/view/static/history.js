// The metrics of runs as columns in memory; asking again brings only what is new.

import {ask} from "./api.js";

const known = new Map();

/** {names, steps, values: {metric: [...]}} with at least these metrics; `val/*` stands for all that begin so.
 *  `stamp` is how far the run was when it was last heard of: what was asked for at the same moment is not asked again. */
export async function columns(run, names, stamp) {
  const have = known.get(run);
  const all = [...new Set([...(have ? have.asked : []), ...names])];
  const whole = !have || all.length > have.asked.length;
  if (!whole && stamp !== undefined && stamp === have.stamp) return have;
  const answer = await ask("metrics", {run, names: all.join(","), after: whole ? 0 : have.count, identity: whole ? "" : have.identity});
  const gaps = answer.steps.map(() => null);
  const found = new Set([...Object.keys(answer.values), ...all.filter((name) => !name.endsWith("*"))]);
  if (whole || answer.first === 0) {
    const values = Object.fromEntries([...found].map((name) => [name, answer.values[name] || gaps]));
    known.set(run, {asked: all, stamp, identity: answer.identity, count: answer.count, names: answer.names, steps: answer.steps, values});
  } else if (answer.steps.length) {
    const before = have.steps.map(() => null);
    for (const name of Object.keys(have.values)) found.add(name);
    const values = Object.fromEntries([...found].map((name) => [name, (have.values[name] || before).concat(answer.values[name] || gaps)]));
    known.set(run, {...have, stamp, count: answer.count, names: answer.names, steps: have.steps.concat(answer.steps), values});
  } else if (stamp !== undefined) have.stamp = stamp;
  return known.get(run);
}
