// The drawings of the engine page: steps, waits, load. SVG in the page's own pixels, drawn anew with each state.
//
// A few hundred rectangles twice a second are nothing to a browser, and text and colours then come from the style sheet. Each
// drawing says in words what it shows (its label), and where single values matter they are reached by the pointer, by a
// finger and by the arrow keys alike: `reach` is that one way in.

import { count, draw, figure, make, rows, seconds } from "./dom.js";
import { logBins, quantile } from "./state.js";

/** A round number at or above x. */
export function roundUp(x) {
  if (!(x > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(x));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((m) => m * power >= x * (1 - 1e-9)) * power;
}

const round = (value) => seconds(value).replace(/\.0+(?=\D)/, ""); // on an axis
const line = (x1, x2, y, name) => draw("line", { x1, x2, y1: y, y2: y, class: name });
const text = (x, y, words, anchor = "start") => draw("text", { x, y, "text-anchor": anchor }, words);

/** The drawing's root, as wide as its place, focusable if `reachable`. */
function canvas(place, height, reachable) {
  const width = Math.max(200, place.clientWidth);
  let svg = place.firstElementChild;
  if (!svg) {
    svg = draw("svg", { role: "img" });
    if (reachable) svg.setAttribute("tabindex", 0);
    place.append(svg);
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  return { svg, width };
}

/** One way to single values, whatever a person points with. at(x, y) -> index; tell(i) -> {parts, box}; size() -> count. */
export function reach(place, tip, { at, tell, size, row = () => 1 }) {
  let index = -1;
  const show = (i) => {
    index = i;
    if (i < 0 || i >= size()) return tip.hide();
    const { parts, box } = tell(i);
    return tip.show(parts, box);
  };
  const leave = () => {
    index = -1;
    tell(-1);
    tip.hide();
  };
  const pointed = (event) => {
    const box = place.getBoundingClientRect();
    const i = at(event.clientX - box.left, event.clientY - box.top);
    if (i < 0) leave();
    else show(i);
  };
  place.addEventListener("pointermove", pointed);
  place.addEventListener("pointerdown", pointed);
  place.addEventListener("pointerleave", leave);
  place.addEventListener("focusout", leave);
  place.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return leave();
    const last = size() - 1, from = index < 0 ? last : index, begin = index < 0;
    const keys = { ArrowLeft: begin ? last : from - 1, ArrowRight: begin ? last : from + 1, Home: 0, End: last };
    if (row() > 1) Object.assign(keys, { ArrowUp: from - row(), ArrowDown: from + row() });
    if (keys[event.key] === undefined || last < 0) return undefined;
    event.preventDefault();
    return show(Math.max(0, Math.min(last, keys[event.key])));
  });
}

const LEFT = 54, RIGHT = 6;

/** Steps as columns: tokens above, seconds below. */
export class Timeline {
  constructor(place, tip) {
    this.place = place;
    this.shown = [];
    reach(place, tip, {
      at: (x) => this.#column(x),
      size: () => this.shown.length,
      tell: (i) => this.#tell(i),
    });
  }

  update(steps) {
    const TOP = 16, TALL = 132, GAP = 30, LOW = 56;
    const { svg, width } = canvas(this.place, TOP + TALL + GAP + LOW + 20, true);
    this.pitch = width < 500 ? 4 : 5;
    this.width = width;
    const room = Math.floor((width - LEFT - RIGHT) / this.pitch);
    this.shown = steps.slice(-room);
    const most = roundUp(Math.max(1, ...this.shown.map((s) => s.prefill + s.decode)));
    const longest = roundUp(Math.max(1e-6, ...this.shown.map((s) => s.seconds)));
    const bottom = TOP + TALL, floor = bottom + GAP + LOW;
    const parts = [
      line(LEFT, width - RIGHT, TOP, "grid"), line(LEFT, width - RIGHT, TOP + TALL / 2, "grid"), line(LEFT, width - RIGHT, bottom, "axis"),
      line(LEFT, width - RIGHT, floor - LOW, "grid"), line(LEFT, width - RIGHT, floor, "axis"),
      text(LEFT - 8, TOP + 4, figure(most), "end"), text(LEFT - 8, TOP + TALL / 2 + 4, figure(most / 2), "end"), text(LEFT - 8, bottom + 4, "0", "end"),
      text(LEFT - 8, floor - LOW + 4, round(longest), "end"), text(LEFT - 8, floor + 4, "0", "end"),
      text(LEFT, 11, "tokens"), text(LEFT, floor - LOW - 5, "time of the step"),
    ];
    const bar = (i, y, height, name) => draw("rect", { x: this.#x(i), y, width: this.pitch - 1, height: Math.max(height, 0.5), class: name });
    this.shown.forEach((step, i) => {
      const low = (step.decode / most) * TALL, high = (step.prefill / most) * TALL;
      if (step.decode) parts.push(bar(i, bottom - low, low, "decode"));
      if (step.prefill) parts.push(bar(i, bottom - low - high, high, "prefill"));
      parts.push(bar(i, floor - (step.seconds / longest) * LOW, (step.seconds / longest) * LOW, "took"));
      if (step.preempted) {
        const x = this.#x(i) + this.pitch / 2 - 0.5, y = bottom - low - high - 2;
        parts.push(draw("path", { d: `M${x - 4} ${y - 6}h8l-4 6z`, class: "preempted" }));
      }
    });
    if (this.shown.length) parts.push(text(width - RIGHT, floor + 16, "now", "end"));
    this.cursor = draw("rect", { y: TOP, width: this.pitch + 1, height: floor - TOP, class: "cursor" });
    svg.replaceChildren(...parts, this.cursor);
    svg.setAttribute("aria-label", this.#words());
  }

  #words() {
    if (!this.shown.length) return "Steps: none so far.";
    const sum = (name) => this.shown.reduce((total, step) => total + step[name], 0);
    const typical = quantile(this.shown.map((step) => step.seconds), 0.5);
    return `The latest ${count(this.shown.length, "step")}: ${count(sum("prefill"), "token")} of prompts, ${sum("decode").toLocaleString("en")} of answers, ` +
      `${sum("preempted")} put back; half of the steps took less than ${seconds(typical)}. The arrow keys go from step to step.`;
  }

  #x(i) {
    return this.width - RIGHT - (this.shown.length - i) * this.pitch;
  }

  #column(x) {
    const i = Math.floor((x - this.#x(0)) / this.pitch);
    return i >= 0 && i < this.shown.length ? i : -1;
  }

  #tell(i) {
    if (this.cursor) this.cursor.style.visibility = i < 0 ? "hidden" : "visible";
    if (i < 0) return undefined;
    const step = this.shown[i];
    this.cursor.setAttribute("x", this.#x(i) - 1);
    const box = this.place.getBoundingClientRect();
    const left = box.left + this.#x(i);
    return {
      box: { left, width: this.pitch, top: box.top, bottom: box.bottom },
      parts: [make("b", {}, clock(step.at)), rows([
        ["prefill", count(step.prefill, "token")], ["decode", count(step.decode, "token")], ["sequences", figure(step.sequences)],
        ["took", seconds(step.seconds)], ...(step.preempted ? [["put back", figure(step.preempted)]] : []),
      ])],
    };
  }
}

/** Seconds since 1970 as the time of day here, with milliseconds. */
export function clock(at) {
  const date = new Date(at * 1000);
  return `${date.toLocaleTimeString("en-GB")}.${String(date.getMilliseconds()).padStart(3, "0")}`;
}

/** A histogram over bins of equal ratio, with the quantiles people are promised. */
export function histogram(place, values, what) {
  const TOP = 26, TALL = 96;
  const { svg, width } = canvas(place, TOP + TALL + 20, false);
  const { edges, counts } = logBins(values);
  if (!counts.length) {
    svg.replaceChildren(line(0, width, TOP + TALL, "axis"), text(0, TOP + TALL - 8, "nothing measured yet"));
    svg.setAttribute("aria-label", `${what}: nothing measured yet.`);
    return;
  }
  const low = Math.log(edges[0]), span = Math.log(edges.at(-1)) - low || 1;
  const x = (value) => 2 + ((Math.log(value) - low) / span) * (width - 4);
  const most = Math.max(...counts);
  const bars = counts.map((n, i) => {
    const height = (n / most) * TALL;
    return draw("rect", { x: x(edges[i]) + 0.5, y: TOP + TALL - height, width: Math.max(1, x(edges[i + 1]) - x(edges[i]) - 1), height, class: "bin" });
  });
  const marks = [];
  let free = -Infinity; // where the next label may begin
  for (const [q, name] of [[0.5, "50 %"], [0.95, "95 %"], [0.99, "99 %"]]) {
    const at = x(quantile(values, q));
    marks.push(draw("line", { x1: at, x2: at, y1: TOP - 6, y2: TOP + TALL, class: "mark" }));
    const left = Math.min(Math.max(at - 14, 0), width - 38);
    if (left < free) continue;
    marks.push(draw("text", { x: left, y: TOP - 10, class: "mark-label" }, name));
    free = left + 40;
  }
  svg.replaceChildren(...bars, line(0, width, TOP + TALL, "axis"),
    text(0, TOP + TALL + 15, seconds(edges[0])), text(width, TOP + TALL + 15, seconds(edges.at(-1)), "end"), ...marks);
  const told = [0.5, 0.95, 0.99].map((q) => `${q * 100} % within ${seconds(quantile(values, q))}`).join(", ");
  svg.setAttribute("aria-label", `${what}, ${count(values.length, "sample")}: ${told}.`);
}

/** Running and waiting, as steps over time. */
export function load(place, loads) {
  const TOP = 10, TALL = 80;
  const { svg, width } = canvas(place, TOP + TALL + 20, false);
  const most = roundUp(Math.max(2, ...loads.map((each) => Math.max(each.running, each.queue))));
  const start = loads[0]?.at ?? 0, span = (loads.at(-1)?.at ?? 0) - start || 1;
  const x = (at) => LEFT + ((at - start) / span) * (width - LEFT - RIGHT);
  const y = (n) => TOP + TALL - (n / most) * TALL;
  const path = (name) => loads.map((each, i) => (i ? `H${x(each.at).toFixed(1)}V${y(each[name]).toFixed(1)}` : `M${x(each.at).toFixed(1)} ${y(each[name]).toFixed(1)}`)).join("");
  svg.replaceChildren(line(LEFT, width - RIGHT, TOP, "grid"), line(LEFT, width - RIGHT, TOP + TALL, "axis"),
    text(LEFT - 8, TOP + 4, figure(most), "end"), text(LEFT - 8, TOP + TALL + 4, "0", "end"),
    text(LEFT, TOP + TALL + 16, new Date(start).toLocaleTimeString("en-GB")), text(width - RIGHT, TOP + TALL + 16, "now", "end"),
    draw("path", { d: path("running"), class: "running" }), draw("path", { d: path("queue"), class: "waiting" }));
  const last = loads.at(-1) ?? { running: 0, queue: 0 };
  svg.setAttribute("aria-label", `Now ${last.running} running and ${last.queue} waiting; at most ${Math.max(0, ...loads.map((each) => each.running))} and ${Math.max(0, ...loads.map((each) => each.queue))} since ${new Date(start).toLocaleTimeString("en-GB")}.`);
}
