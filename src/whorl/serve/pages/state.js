// What the server tells of its engine, read with care, and what this page remembers of it.
//
// GET v1/engine/state:
//     {model, version, queue, running, pages: {total, used, cached, free}, page_map, sequences: [{id, prompt, output, state, pages}],
//      batches: [{at, prefill_tokens, decode_tokens, sequences, seconds, preempted}], latencies: {ttft: [s], tpot: [s]}, hit_rate,
//      tokens_per_second}
// page_map has an entry for each page, in order: 0 free, -1 kept in the cache with nobody holding it, n > 0 held by n sequences;
// or, shorter, a run of equal pages as [entry, length]. `at` is in seconds since 1970, from two clocks that are read anew for each
// state and may differ by microseconds; the state repeats recent batches, so `History` joins what overlaps. A field that is missing reads as nothing, never as an error: the page outlives versions.

const SAME = 2e-4; // s: steps closer than this are one step, told twice

const number = (value) => (Number.isFinite(value) ? value : 0);
const list = (value) => (Array.isArray(value) ? value : []);

/** References of each page, runs undone. Longer maps than `limit` are cut. */
export function pageMap(map, limit = 1 << 20) {
  const entries = [];
  for (const item of list(map)) {
    const [entry, length] = Array.isArray(item) ? item : [item, 1];
    for (let i = 0; i < length && entries.length < limit; i++) entries.push(number(entry));
  }
  return entries;
}

/** The state with every field in place. */
export function readState(raw) {
  const pages = raw?.pages ?? {};
  return {
    model: String(raw?.model ?? ""),
    version: raw?.version ?? null,
    queue: number(raw?.queue),
    running: number(raw?.running),
    pages: { total: number(pages.total), used: number(pages.used), cached: number(pages.cached), free: number(pages.free) },
    map: pageMap(raw?.page_map),
    sequences: list(raw?.sequences).map((each) => ({
      id: String(each.id), state: String(each.state ?? ""), prompt: number(each.prompt), output: number(each.output),
      pages: Array.isArray(each.pages) ? each.pages.length : number(each.pages),
    })),
    batches: list(raw?.batches).map((each) => ({
      at: number(each.at), prefill: number(each.prefill_tokens), decode: number(each.decode_tokens),
      sequences: number(each.sequences), seconds: number(each.seconds), preempted: number(each.preempted),
    })),
    ttft: list(raw?.latencies?.ttft).filter(Number.isFinite),
    tpot: list(raw?.latencies?.tpot).filter(Number.isFinite),
    hitRate: Number.isFinite(raw?.hit_rate) ? raw.hit_rate : NaN,
    speed: Number.isFinite(raw?.tokens_per_second) ? raw.tokens_per_second : NaN,
  };
}

/** Steps and loads over several states, the oldest forgotten. */
export class History {
  constructor(limit = 600) {
    this.limit = limit;
    this.steps = [];
    this.loads = []; // {at (ms), running, queue}
  }

  add(state, now) {
    const newest = (this.steps.at(-1)?.at ?? -Infinity) + SAME;
    this.steps.push(...state.batches.filter((step) => step.at > newest).sort((a, b) => a.at - b.at));
    this.steps.splice(0, this.steps.length - this.limit);
    this.loads.push({ at: now, running: state.running, queue: state.queue });
    this.loads.splice(0, this.loads.length - this.limit);
  }
}

/** The q-quantile of values, linear between neighbours; NaN of none. */
export function quantile(values, q) {
  if (!values.length) return NaN;
  const sorted = Float64Array.from(values).sort();
  const place = q * (sorted.length - 1), below = Math.floor(place);
  const above = Math.min(below + 1, sorted.length - 1);
  return sorted[below] + (place - below) * (sorted[above] - sorted[below]);
}

/** Counts of positive values in bins of equal ratio: {edges (n + 1), counts (n)}, four bins a doubling at most. */
export function logBins(values, most = 28) {
  const positive = values.filter((value) => value > 0);
  if (!positive.length) return { edges: [], counts: [] };
  const low = Math.min(...positive), high = Math.max(...positive);
  const n = Math.max(1, Math.min(most, Math.ceil(4 * Math.log2(high / low)) || 1));
  const ratio = high > low ? (high / low) ** (1 / n) : 2 ** 0.25;
  const edges = Array.from({ length: n + 1 }, (_, i) => low * ratio ** i);
  const counts = new Array(n).fill(0);
  for (const value of positive) counts[Math.min(n - 1, Math.floor(Math.log(value / low) / Math.log(ratio) + 1e-9))] += 1;
  return { edges, counts };
}
