// Questions to the server, or to what an exported file holds in its place.

const embeddedElement = document.getElementById("embedded");
const embedded = embeddedElement ? JSON.parse(embeddedElement.textContent) : null;

export const isExported = embedded !== null;
export const exportedNote = embedded ? embedded.note : "";

function given(query) {
  return Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "").sort(([a], [b]) => (a < b ? -1 : 1));
}

function address(name, query) {
  return `/api/${name}?${new URLSearchParams(given(query))}`;
}

/** As the exporter spells a question. */
function spelled(name, query) {
  const text = given(query).map(([field, value]) => `${field}=${value}`).join("&");
  return text ? `${name}?${text}` : name;
}

/** The answer as an object; an error says in words what is missing. */
export async function ask(name, query = {}) {
  if (embedded) return embeddedAnswer(name, query);
  const answer = await fetch(address(name, query));
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

function embeddedAnswer(name, query) {
  if (name === "metrics") return embeddedMetrics(query);
  if (name === "compare") return embeddedDifferences(query.runs.split("\t"));
  const key = spelled(name, query);
  if (key in embedded.answers) return embedded.answers[key];
  throw new Error("This is not in the exported file: open the run with `posttrain view`.");
}

function embeddedDifferences(runs) {
  const known = runs.map((run) => embedded.answers[spelled("config", {run})]);
  const keys = [...new Set(known.flatMap((one) => Object.keys(one)))];
  const rows = keys.map((key) => ({key, values: known.map((one) => one[key] ?? null)}));
  return rows.filter(({values}) => new Set(values).size > 1);
}

function embeddedMetrics(query) {
  const whole = embedded.answers[spelled("metrics", {run: query.run})];
  const asked = (query.names || "").split(",");
  const names = Object.keys(whole.values).filter((name) => asked.some((one) => one === name || (one.endsWith("*") && name.startsWith(one.slice(0, -1)))));
  if (query.identity === whole.identity) return {...whole, first: whole.count, steps: [], values: {}};
  return {...whole, values: Object.fromEntries(names.map((name) => [name, whole.values[name]]))};
}

/** The objects of a streamed answer, as they come; `signal` ends it. */
export async function* stream(name, query, signal) {
  if (embedded) throw new Error("An exported file cannot be searched: open the run with `posttrain view`.");
  const answer = await fetch(address(name, query), {signal});
  if (!answer.ok) throw new Error(await answer.text());
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) yield JSON.parse(line);
  }
}
