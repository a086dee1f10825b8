// Charts of the engine page: steps, latencies, queue. SVG in page pixels, redrawn with each state.
//
// A few hundred rectangles per second are cheap, and text and colors come from the style sheet. The label of each chart
// describes it for screen readers. `makeFocusable` gives access to single values by pointer, touch and arrow keys.

import { count, createElement, createSvg, formatNumber, formatSeconds, table } from "./dom.js";
import { logBins, quantile } from "./state.js";

/** A round number at or above x. */
export function roundUp(x) {
  if (!(x > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(x));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((m) => m * power >= x * (1 - 1e-9)) * power;
}

const axisLabel = (value) => formatSeconds(value).replace(/\.0+(?=\D)/, "");
const line = (x1, x2, y, name) => createSvg("line", { x1, x2, y1: y, y2: y, class: name });
const text = (x, y, content, anchor = "start") => createSvg("text", { x, y, "text-anchor": anchor }, content);

/** The root of a chart, as wide as its container. */
function canvas(container, height, focusable) {
  const width = Math.max(200, container.clientWidth);
  let svg = container.firstElementChild;
  if (!svg) {
    svg = createSvg("svg", { role: "img" });
    if (focusable) svg.setAttribute("tabindex", 0);
    container.append(svg);
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  return { svg, width };
}

/** Shows single values by pointer, touch and keyboard. at(x, y) -> index; tipAt(i) -> {parts, box}; size() -> count. */
export function makeFocusable(container, tooltip, { at, tipAt, size, row = () => 1 }) {
  let index = -1;
  const show = (i) => {
    index = i;
    if (i < 0 || i >= size()) return tooltip.hide();
    const { parts, box } = tipAt(i);
    return tooltip.show(parts, box);
  };
  const leave = () => {
    index = -1;
    tipAt(-1);
    tooltip.hide();
  };
  const onPointer = (event) => {
    const box = container.getBoundingClientRect();
    const i = at(event.clientX - box.left, event.clientY - box.top);
    if (i < 0) leave();
    else show(i);
  };
  container.addEventListener("pointermove", onPointer);
  container.addEventListener("pointerdown", onPointer);
  container.addEventListener("pointerleave", leave);
  container.addEventListener("focusout", leave);
  container.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return leave();
    const last = size() - 1, from = index < 0 ? last : index, start = index < 0;
    const keys = { ArrowLeft: start ? last : from - 1, ArrowRight: start ? last : from + 1, Home: 0, End: last };
    if (row() > 1) Object.assign(keys, { ArrowUp: from - row(), ArrowDown: from + row() });
    if (keys[event.key] === undefined || last < 0) return undefined;
    event.preventDefault();
    return show(Math.max(0, Math.min(last, keys[event.key])));
  });
}

const LEFT = 54, RIGHT = 6;

/** Steps as columns: tokens above, duration below. */
export class Timeline {
  constructor(container, tooltip) {
    this.container = container;
    this.shown = [];
    makeFocusable(container, tooltip, {
      at: (x) => this.#column(x),
      size: () => this.shown.length,
      tipAt: (i) => this.#tipAt(i),
    });
  }

  update(steps) {
    const TOP = 16, TALL = 132, GAP = 30, LOW = 56;
    const { svg, width } = canvas(this.container, TOP + TALL + GAP + LOW + 20, true);
    this.barWidth = width < 500 ? 4 : 5;
    this.width = width;
    const capacity = Math.floor((width - LEFT - RIGHT) / this.barWidth);
    this.shown = steps.slice(-capacity);
    const most = roundUp(Math.max(1, ...this.shown.map((s) => s.prefill + s.decode)));
    const longest = roundUp(Math.max(1e-6, ...this.shown.map((s) => s.seconds)));
    const bottom = TOP + TALL, baseline = bottom + GAP + LOW;
    const parts = [
      line(LEFT, width - RIGHT, TOP, "grid"), line(LEFT, width - RIGHT, TOP + TALL / 2, "grid"), line(LEFT, width - RIGHT, bottom, "axis"),
      line(LEFT, width - RIGHT, baseline - LOW, "grid"), line(LEFT, width - RIGHT, baseline, "axis"),
      text(LEFT - 8, TOP + 4, formatNumber(most), "end"), text(LEFT - 8, TOP + TALL / 2 + 4, formatNumber(most / 2), "end"), text(LEFT - 8, bottom + 4, "0", "end"),
      text(LEFT - 8, baseline - LOW + 4, axisLabel(longest), "end"), text(LEFT - 8, baseline + 4, "0", "end"),
      text(LEFT, 11, "tokens"), text(LEFT, baseline - LOW - 5, "step duration"),
    ];
    const bar = (i, y, height, name) => createSvg("rect", { x: this.#x(i), y, width: this.barWidth - 1, height: Math.max(height, 0.5), class: name });
    this.shown.forEach((step, i) => {
      const low = (step.decode / most) * TALL, high = (step.prefill / most) * TALL;
      if (step.decode) parts.push(bar(i, bottom - low, low, "decode"));
      if (step.prefill) parts.push(bar(i, bottom - low - high, high, "prefill"));
      parts.push(bar(i, baseline - (step.seconds / longest) * LOW, (step.seconds / longest) * LOW, "took"));
      if (step.preempted) {
        const x = this.#x(i) + this.barWidth / 2 - 0.5, y = bottom - low - high - 2;
        parts.push(createSvg("path", { d: `M${x - 4} ${y - 6}h8l-4 6z`, class: "preempted" }));
      }
    });
    if (this.shown.length) parts.push(text(width - RIGHT, baseline + 16, "now", "end"));
    this.cursor = createSvg("rect", { y: TOP, width: this.barWidth + 1, height: baseline - TOP, class: "cursor" });
    svg.replaceChildren(...parts, this.cursor);
    svg.setAttribute("aria-label", this.#summary());
  }

  #summary() {
    if (!this.shown.length) return "No steps yet.";
    const sum = (name) => this.shown.reduce((total, step) => total + step[name], 0);
    const typical = quantile(this.shown.map((step) => step.seconds), 0.5);
    return `The latest ${count(this.shown.length, "step")}: ${count(sum("prefill"), "prompt token")}, ${count(sum("decode"), "output token")}, ` +
      `${count(sum("preempted"), "preemption")}; median duration ${formatSeconds(typical)}. Use the arrow keys to move between steps.`;
  }

  #x(i) {
    return this.width - RIGHT - (this.shown.length - i) * this.barWidth;
  }

  #column(x) {
    const i = Math.floor((x - this.#x(0)) / this.barWidth);
    return i >= 0 && i < this.shown.length ? i : -1;
  }

  #tipAt(i) {
    if (this.cursor) this.cursor.style.visibility = i < 0 ? "hidden" : "visible";
    if (i < 0) return undefined;
    const step = this.shown[i];
    this.cursor.setAttribute("x", this.#x(i) - 1);
    const box = this.container.getBoundingClientRect();
    const left = box.left + this.#x(i);
    return {
      box: { left, width: this.barWidth, top: box.top, bottom: box.bottom },
      parts: [createElement("b", {}, formatTime(step.at)), table([
        ["prefill", count(step.prefill, "token")], ["decode", count(step.decode, "token")], ["sequences", formatNumber(step.sequences)],
        ["duration", formatSeconds(step.seconds)], ...(step.preempted ? [["preempted", formatNumber(step.preempted)]] : []),
      ])],
    };
  }
}

/** Unix time in seconds -> local time of day with milliseconds. */
export function formatTime(at) {
  const date = new Date(at * 1000);
  return `${date.toLocaleTimeString("en-GB")}.${String(date.getMilliseconds()).padStart(3, "0")}`;
}

/** A histogram over bins of equal ratio, with the 50th, 95th and 99th percentile. */
export function histogram(container, values, title) {
  const TOP = 26, TALL = 96;
  const { svg, width } = canvas(container, TOP + TALL + 20, false);
  const { edges, counts } = logBins(values);
  if (!counts.length) {
    svg.replaceChildren(line(0, width, TOP + TALL, "axis"), text(0, TOP + TALL - 8, "no data yet"));
    svg.setAttribute("aria-label", `${title}: no data yet.`);
    return;
  }
  const low = Math.log(edges[0]), span = Math.log(edges.at(-1)) - low || 1;
  const x = (value) => 2 + ((Math.log(value) - low) / span) * (width - 4);
  const most = Math.max(...counts);
  const bars = counts.map((n, i) => {
    const height = (n / most) * TALL;
    return createSvg("rect", { x: x(edges[i]) + 0.5, y: TOP + TALL - height, width: Math.max(1, x(edges[i + 1]) - x(edges[i]) - 1), height, class: "bin" });
  });
  const marks = [];
  let free = -Infinity; // where the next label may begin
  for (const [q, name] of [[0.5, "50 %"], [0.95, "95 %"], [0.99, "99 %"]]) {
    const at = x(quantile(values, q));
    marks.push(createSvg("line", { x1: at, x2: at, y1: TOP - 6, y2: TOP + TALL, class: "mark" }));
    const left = Math.min(Math.max(at - 14, 0), width - 38);
    if (left < free) continue;
    marks.push(createSvg("text", { x: left, y: TOP - 10, class: "mark-label" }, name));
    free = left + 40;
  }
  svg.replaceChildren(...bars, line(0, width, TOP + TALL, "axis"),
    text(0, TOP + TALL + 15, formatSeconds(edges[0])), text(width, TOP + TALL + 15, formatSeconds(edges.at(-1)), "end"), ...marks);
  const percentiles = [0.5, 0.95, 0.99].map((q) => `${q * 100} % within ${formatSeconds(quantile(values, q))}`).join(", ");
  svg.setAttribute("aria-label", `${title}, ${count(values.length, "sample")}: ${percentiles}.`);
}

/** Running and waiting sequences over time. */
export function loadChart(container, loads) {
  const TOP = 10, TALL = 80;
  const { svg, width } = canvas(container, TOP + TALL + 20, false);
  const most = roundUp(Math.max(2, ...loads.map((each) => Math.max(each.running, each.queue))));
  const start = loads[0]?.at ?? 0, span = (loads.at(-1)?.at ?? 0) - start || 1;
  const x = (at) => LEFT + ((at - start) / span) * (width - LEFT - RIGHT);
  const y = (n) => TOP + TALL - (n / most) * TALL;
  const path = (name) => loads.map((each, i) => (i ? `H${x(each.at).toFixed(1)}V${y(each[name]).toFixed(1)}` : `M${x(each.at).toFixed(1)} ${y(each[name]).toFixed(1)}`)).join("");
  svg.replaceChildren(line(LEFT, width - RIGHT, TOP, "grid"), line(LEFT, width - RIGHT, TOP + TALL, "axis"),
    text(LEFT - 8, TOP + 4, formatNumber(most), "end"), text(LEFT - 8, TOP + TALL + 4, "0", "end"),
    text(LEFT, TOP + TALL + 16, new Date(start).toLocaleTimeString("en-GB")), text(width - RIGHT, TOP + TALL + 16, "now", "end"),
    createSvg("path", { d: path("running"), class: "running" }), createSvg("path", { d: path("queue"), class: "waiting" }));
  const last = loads.at(-1) ?? { running: 0, queue: 0 };
  svg.setAttribute("aria-label", `Now ${last.running} running and ${last.queue} waiting; maximum ${Math.max(0, ...loads.map((each) => each.running))} and ${Math.max(0, ...loads.map((each) => each.queue))} since ${new Date(start).toLocaleTimeString("en-GB")}.`);
}
