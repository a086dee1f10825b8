// Parser of the engine state, and the history that the page stores.
//
// GET v1/engine/state:
//     {model, version, queue, running, pages: {total, used, cached, free}, page_map, sequences: [{id, prompt, output, state, pages}],
//      batches: [{at, prefill_tokens, decode_tokens, sequences, seconds, preempted}], latencies: {ttft: [s], tpot: [s]}, hit_rate,
//      tokens_per_second}
// page_map lists the pages in order: 0 free, -1 cached and unreferenced, n > 0 referenced by n sequences; a run of equal pages is
// [entry, length]. `at` is Unix time in seconds, computed from two clocks for each state, so it may differ by microseconds. A
// state repeats recent batches; `History` merges them. A missing field is read as empty, so that the page works with other
// versions of the server.

const MERGE_SECONDS = 2e-4; // steps closer than this are the same step

const number = (value) => (Number.isFinite(value) ? value : 0);
const list = (value) => (Array.isArray(value) ? value : []);

/** The references of each page, with runs expanded; at most `limit` pages. */
export function pageMap(map, limit = 1 << 20) {
  const entries = [];
  for (const item of list(map)) {
    const [entry, length] = Array.isArray(item) ? item : [item, 1];
    for (let i = 0; i < length && entries.length < limit; i++) entries.push(number(entry));
  }
  return entries;
}

/** Returns the state with all fields set. */
export function parseState(raw) {
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
    tokensPerSecond: Number.isFinite(raw?.tokens_per_second) ? raw.tokens_per_second : NaN,
  };
}

/** The latest steps and loads of several states. */
export class History {
  constructor(limit = 600) {
    this.limit = limit;
    this.steps = [];
    this.loads = []; // {at (ms), running, queue}
  }

  add(state, now) {
    const newest = (this.steps.at(-1)?.at ?? -Infinity) + MERGE_SECONDS;
    this.steps.push(...state.batches.filter((step) => step.at > newest).sort((a, b) => a.at - b.at));
    this.steps.splice(0, this.steps.length - this.limit);
    this.loads.push({ at: now, running: state.running, queue: state.queue });
    this.loads.splice(0, this.loads.length - this.limit);
  }
}

/** The q-quantile with linear interpolation; NaN for no values. */
export function quantile(values, q) {
  if (!values.length) return NaN;
  const sorted = Float64Array.from(values).sort();
  const position = q * (sorted.length - 1), below = Math.floor(position);
  const above = Math.min(below + 1, sorted.length - 1);
  return sorted[below] + (position - below) * (sorted[above] - sorted[below]);
}

/** Counts of positive values in bins of equal ratio: {edges (n + 1), counts (n)}; at most four bins per factor of two. */
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
