// The cache as a map: one square a page, coloured by who holds it. A canvas, for a cache may have tens of thousands of pages.
//
// The squares shrink as the cache grows, so that the map stays about as tall; below 4 px nobody could point at one.

import { count, make } from "./dom.js";
import { reach } from "./drawings.js";

const TALLEST = 260; // px, as long as squares of 4 px allow it

/** Side of a square, px, for n pages in a place of this width. */
export const side = (n, width) => Math.max(4, Math.min(16, Math.floor(Math.sqrt((width * TALLEST) / Math.max(1, n)))));

/** The state's words for one page. */
export const told = (references) =>
  references > 0 ? `held by ${count(references, "sequence")}` : references < 0 ? "kept, nobody holds it" : "free";

export class CacheMap {
  constructor(place, tip) {
    this.place = place;
    this.canvas = make("canvas", { role: "img", tabindex: 0 });
    place.append(this.canvas);
    this.map = [];
    this.side = 8;
    this.across = 1;
    this.lit = -1;
    reach(place, tip, {
      at: (x, y) => this.#at(x, y),
      size: () => this.map.length,
      row: () => this.across,
      tell: (i) => this.#tell(i),
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.update(this.map));
  }

  update(map) {
    this.map = map;
    const width = Math.max(100, this.place.clientWidth), scale = devicePixelRatio || 1;
    this.side = side(map.length, width);
    this.across = Math.max(1, Math.floor(width / this.side));
    const height = Math.max(this.side, Math.ceil(map.length / this.across) * this.side);
    const { canvas } = this;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
    canvas.setAttribute("aria-label", this.words());
    this.#paint(scale);
  }

  /** The map in one sentence. */
  words() {
    if (!this.map.length) return "No map of the pages.";
    const of = (test) => this.map.filter(test).length.toLocaleString("en");
    const shared = this.map.some((n) => n > 1);
    return `${count(this.map.length, "page")}: ${of((n) => n > 0)} held${shared ? ` (${of((n) => n > 1)} of them by several, at most ${this.map.reduce((a, b) => Math.max(a, b), 0)})` : ""}, ${of((n) => n < 0)} kept, ${of((n) => n === 0)} free.`;
  }

  #paint(scale) {
    const style = getComputedStyle(this.place), pen = this.canvas.getContext("2d");
    const colour = (name) => style.getPropertyValue(name).trim();
    const colours = { used: colour("--accent"), shared: colour("--mark"), cached: colour("--cached"), free: colour("--line"), ink: colour("--ink") };
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    const cell = this.side - 1;
    this.map.forEach((references, i) => {
      pen.fillStyle = references > 1 ? colours.shared : references > 0 ? colours.used : references < 0 ? colours.cached : colours.free;
      pen.fillRect((i % this.across) * this.side, Math.floor(i / this.across) * this.side, cell, cell);
    });
    if (this.lit < 0 || this.lit >= this.map.length) return;
    pen.strokeStyle = colours.ink;
    pen.lineWidth = 2;
    pen.strokeRect((this.lit % this.across) * this.side, Math.floor(this.lit / this.across) * this.side, cell, cell);
  }

  #at(x, y) {
    const column = Math.floor(x / this.side);
    const i = Math.floor(y / this.side) * this.across + column;
    return column < this.across && i >= 0 && i < this.map.length ? i : -1;
  }

  #tell(i) {
    if (i !== this.lit) {
      this.lit = i;
      this.update(this.map);
    }
    if (i < 0) return undefined;
    const box = this.place.getBoundingClientRect();
    const left = box.left + (i % this.across) * this.side, top = box.top + Math.floor(i / this.across) * this.side;
    return {
      box: { left, top, width: this.side, bottom: top + this.side },
      parts: [make("b", {}, `page ${i.toLocaleString("en")}`), make("div", {}, told(this.map[i]))],
    };
  }
}
