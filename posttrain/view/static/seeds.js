// Runs that differ in nothing but their seed, as one: the mean of each step, and a band from the lowest to the highest.

/** [{name, members: [place in `names`]}]: runs of one family together, the others alone. */
export function familiesOf(runs, names) {
  const found = new Map();
  for (const [i, name] of names.entries()) {
    const key = runs.find((run) => run.name === name)?.family || `alone ${name}`;
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(i);
  }
  return [...found.values()].map((members) => ({name: familyName(members.map((i) => names[i])), members}));
}

function familyName(names) {
  if (names.length === 1) return names[0];
  let length = 0;
  while (names.every((name) => length < name.length && name[length] === names[0][length])) length++;
  const shared = names[0].slice(0, length).replace(/[^\p{L}\p{N}]+$/u, "");
  return `${shared || names[0]} (mean of ${names.length} seeds)`;
}

/** {x, mean, low, high} of several [x, y], at every x that one of them has. */
export function meanAndBand(curves) {
  const at = new Map();
  for (const [xs, ys] of curves) for (const [i, x] of xs.entries()) at.has(x) ? at.get(x).push(ys[i]) : at.set(x, [ys[i]]);
  const x = [...at.keys()].sort((a, b) => a - b), groups = x.map((one) => at.get(one));
  return {x, mean: groups.map((group) => group.reduce((sum, value) => sum + value, 0) / group.length), low: groups.map((group) => Math.min(...group)), high: groups.map((group) => Math.max(...group))};
}
