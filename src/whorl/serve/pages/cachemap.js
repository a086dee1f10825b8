// Map of the KV cache: one square per page, colored by its state. A canvas, since a cache may have tens of thousands of pages.
//
// The squares shrink as the cache grows, so that the height of the map is nearly constant. They are at least 4 px wide, so
// that the pointer can select one.

import { makeFocusable } from "./charts.js";
import { count, createElement } from "./dom.js";

const MAX_HEIGHT = 260; // px, unless squares of 4 px need more

/** Side of a square in px, for n pages in a container of this width. */
export const side = (n, width) => Math.max(4, Math.min(16, Math.floor(Math.sqrt((width * MAX_HEIGHT) / Math.max(1, n)))));

/** The label of a page. */
export const referenceLabel = (references) =>
  references > 0 ? `used by ${count(references, "sequence")}` : references < 0 ? "cached, unused" : "free";

export class CacheMap {
  constructor(container, tooltip) {
    this.container = container;
    this.canvas = createElement("canvas", { role: "img", tabindex: 0 });
    container.append(this.canvas);
    this.map = [];
    this.side = 8;
    this.columns = 1;
    this.hovered = -1;
    makeFocusable(container, tooltip, {
      at: (x, y) => this.#at(x, y),
      size: () => this.map.length,
      row: () => this.columns,
      tipAt: (i) => this.#tipAt(i),
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.update(this.map));
  }

  update(map) {
    this.map = map;
    const width = Math.max(100, this.container.clientWidth), scale = devicePixelRatio || 1;
    this.side = side(map.length, width);
    this.columns = Math.max(1, Math.floor(width / this.side));
    const height = Math.max(this.side, Math.ceil(map.length / this.columns) * this.side);
    const { canvas } = this;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
    canvas.setAttribute("aria-label", this.summary());
    this.#paint(scale);
  }

  /** The map as text. */
  summary() {
    if (!this.map.length) return "No cache pages.";
    const number = (test) => this.map.filter(test).length.toLocaleString("en");
    const shared = this.map.some((n) => n > 1);
    return `${count(this.map.length, "page")}: ${number((n) => n > 0)} in use${shared ? ` (${number((n) => n > 1)} shared, by at most ${this.map.reduce((a, b) => Math.max(a, b), 0)})` : ""}, ${number((n) => n < 0)} cached, ${number((n) => n === 0)} free.`;
  }

  #paint(scale) {
    const style = getComputedStyle(this.container), pen = this.canvas.getContext("2d");
    const color = (name) => style.getPropertyValue(name).trim();
    const colors = { used: color("--accent"), shared: color("--mark"), cached: color("--cached"), free: color("--line"), ink: color("--ink") };
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    const cell = this.side - 1;
    this.map.forEach((references, i) => {
      pen.fillStyle = references > 1 ? colors.shared : references > 0 ? colors.used : references < 0 ? colors.cached : colors.free;
      pen.fillRect((i % this.columns) * this.side, Math.floor(i / this.columns) * this.side, cell, cell);
    });
    if (this.hovered < 0 || this.hovered >= this.map.length) return;
    pen.strokeStyle = colors.ink;
    pen.lineWidth = 2;
    pen.strokeRect((this.hovered % this.columns) * this.side, Math.floor(this.hovered / this.columns) * this.side, cell, cell);
  }

  #at(x, y) {
    const column = Math.floor(x / this.side);
    const i = Math.floor(y / this.side) * this.columns + column;
    return column < this.columns && i >= 0 && i < this.map.length ? i : -1;
  }

  #tipAt(i) {
    if (i !== this.hovered) {
      this.hovered = i;
      this.update(this.map);
    }
    if (i < 0) return undefined;
    const box = this.container.getBoundingClientRect();
    const left = box.left + (i % this.columns) * this.side, top = box.top + Math.floor(i / this.columns) * this.side;
    return {
      box: { left, top, width: this.side, bottom: top + this.side },
      parts: [createElement("b", {}, `page ${i.toLocaleString("en")}`), createElement("div", {}, referenceLabel(this.map[i]))],
    };
  }
}
