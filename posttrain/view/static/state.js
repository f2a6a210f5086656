// Where the reader is, in the address after `#`: it can be kept, sent on, and gone back to.

/** {page: "samples", run: "a", step: "3", ...} */
export function place() {
  const [page, query] = location.hash.replace(/^#\/?/, "").split("?");
  return {page: page || "overview", ...Object.fromEntries(new URLSearchParams(query || ""))};
}

/** Change some of it; null takes one out. `quietly` leaves no entry in the browser's history. */
export function go(changes, quietly = false) {
  const {page, ...rest} = {...place(), ...changes};
  const known = Object.entries(rest).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(known).toString();
  const hash = `#/${page}${query ? `?${query}` : ""}`;
  if (hash === location.hash) return;
  if (quietly) {
    history.replaceState(null, "", hash);
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = hash;
}

/** The address with one run more or less among those that are looked at. */
export function withRun(runs, name, on) {
  const now = chosenRuns(runs);
  return runs.map((run) => run.name).filter((one) => (one === name ? on : now.includes(one))).join("\t");
}

/** The runs that are looked at: those in the address, else the newest. */
export function chosenRuns(runs) {
  const names = runs.map((run) => run.name);
  const wanted = (place().runs || "").split("\t").filter((name) => names.includes(name));
  return wanted.length || !names.length ? wanted : [names[names.length - 1]];
}
