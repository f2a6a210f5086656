// A search under way: hits are shown as they arrive, and a new search ends the old one.

import {stream} from "./api.js";

/** {start(query), stop()}; `show(hits, words)` gets all hits so far, `tell(words)` how far it is. */
export function searcher(show, tell) {
  let controller = null;

  function stop() {
    controller?.abort();
    controller = null;
  }

  async function start(query) {
    stop();
    const mine = controller = new AbortController();
    let hits = [], drawn = 0;
    show([], "searching …");
    try {
      for await (const line of stream("search", query, mine.signal)) {
        if (mine !== controller) return;
        if (line.hits) hits = hits.concat(line.hits);
        const now = performance.now();
        if (line.end) {
          const where = line.more ? `the newest ${hits.length} hits, back to step ${line.at}` : `${hits.length} hits in ${line.files} files`;
          show(hits, where);
          tell(where);
        } else if (line.hits && (drawn === 0 || now - drawn > 300)) {
          drawn = now;
          show(hits, `${hits.length} hits, at step ${line.at} …`);
        } else if (!line.hits) tell(`${hits.length} hits, at step ${line.at} …`);
      }
    } catch (error) {
      if (error.name !== "AbortError") tell(error.message);
    }
  }

  return {start, stop};
}
