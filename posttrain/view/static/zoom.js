// The range of steps (or of time) that all charts show, in the address: it can be sent on, and Back leaves it.

import {go, place} from "./state.js";

/** [from, to], or null where everything is shown. */
export function zoomed(time) {
  const {from, to, x} = place();
  const range = [Number(from), Number(to)];
  return from !== undefined && to !== undefined && range.every(Number.isFinite) && range[0] < range[1] && (x === "time") === time ? range : null;
}

export function zoomTo(low, high, time) {
  if (!time) [low, high] = [Math.floor(low), Math.ceil(high)];
  go({from: time ? low.toFixed(1) : low, to: time ? high.toFixed(1) : high});
}

export const zoomOut = () => go({from: null, to: null});
