// Helpers of both pages: DOM nodes, the tooltip, number formats.
//
// No code of these pages parses strings as markup. A string child becomes a text node, so output of a model or a server can
// never run as code.

const PROPERTIES = new Set(["class", "dataset"]);

/** Creates an element with attributes ("onclick" etc. take functions) and children (strings become text nodes). */
export function createElement(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  set(node, attributes);
  node.append(...children);
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

/** Creates an SVG element in the same way. */
export function createSvg(name, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, name);
  set(node, attributes);
  node.append(...children);
  return node;
}

function set(node, attributes) {
  if (attributes.class) node.setAttribute("class", attributes.class);
  if (attributes.dataset) Object.assign(node.dataset, attributes.dataset);
  for (const [key, value] of Object.entries(attributes)) {
    if (PROPERTIES.has(key) || value === undefined || value === null || value === false) continue;
    if (typeof value === "function") node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : String(value));
  }
}

export const find = (selector, within = document) => within.querySelector(selector);

/** A table of texts; `chosen` is the index of the highlighted row. */
export function table(rows, chosen = -1) {
  const node = createElement("table");
  rows.forEach((cells, i) => {
    const row = node.insertRow();
    if (i === chosen) row.className = "chosen";
    for (const cell of cells) row.insertCell().textContent = cell;
  });
  return node;
}

/** The tooltip of a page: above its target if there is space, else below; always inside the window. */
export class Tooltip {
  constructor(node = find("#tooltip")) {
    this.node = node;
    addEventListener("scroll", () => this.hide(), { capture: true, passive: true });
    addEventListener("resize", () => this.hide());
  }

  /** parts: nodes or texts; box: rectangle of the target in window pixels. */
  show(parts, box) {
    const { node } = this;
    node.replaceChildren(...parts);
    const width = node.offsetWidth, height = node.offsetHeight;
    const page = document.documentElement.clientWidth;
    const left = Math.max(8, Math.min(box.left + box.width / 2 - width / 2, page - width - 8));
    const above = box.top - height - 8;
    node.style.left = `${left}px`;
    node.style.top = `${above > 4 ? above : box.bottom + 8}px`;
    node.style.visibility = "visible";
  }

  hide() {
    this.node.style.visibility = "hidden";
  }

  get shown() {
    return this.node.style.visibility === "visible";
  }
}

/** Announces streamed text to screen readers in whole sentences, at most every 1.5 s: a live region that receives single
 *  tokens would restart with each of them. */
export class Announcer {
  constructor(region) {
    this.region = region;
    this.buffer = "";
    this.last = 0;
  }

  push(text) {
    this.buffer += text;
    const now = performance.now();
    const end = Math.max(...[". ", "! ", "? ", "\n"].map((mark) => this.buffer.lastIndexOf(mark)));
    if (end < 0 || now - this.last < 1500) return;
    this.last = now;
    this.#add(this.buffer.slice(0, end + 1));
    this.buffer = this.buffer.slice(end + 1);
  }

  /** Announces the rest of the text, then `message`. */
  end(message) {
    if (this.buffer.trim()) this.#add(this.buffer);
    this.buffer = "";
    this.#add(message);
  }

  #add(text) {
    this.region.append(createElement("p", {}, text));
    while (this.region.childNodes.length > 4) this.region.firstChild.remove();
  }
}

const NBSP = "\u00a0";

/** 0.5 -> "50.0 %". */
export const formatPercent = (p) =>
  p >= 0.9995 ? `100${NBSP}%` : p >= 0.09995 ? `${(100 * p).toFixed(1)}${NBSP}%` : p >= 0.0001 ? `${(100 * p).toFixed(2)}${NBSP}%` : `<${NBSP}0.01${NBSP}%`;

/** At least three digits, grouped by thousands; integers without decimals, unless they were measured. */
export function formatNumber(value, measured = false) {
  if (!Number.isFinite(value)) return "–";
  const size = value === 0 ? 0 : Math.floor(Math.log10(Math.abs(value)));
  const digits = Math.max(0, Math.min(6, 2 - size));
  return value.toLocaleString("en", { minimumFractionDigits: Number.isInteger(value) && !measured ? 0 : digits, maximumFractionDigits: digits });
}

/** 0.0123 -> "12.3 ms". */
export function formatSeconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value < 1e-3) return `${formatNumber(value * 1e6, true)}${NBSP}µs`;
  return value < 1 ? `${formatNumber(value * 1e3, true)}${NBSP}ms` : `${formatNumber(value, true)}${NBSP}s`;
}

/** "1 token", "2 tokens". */
export const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

/** Replaces white space by visible characters. */
export const visibleWhitespace = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·");
