// Small tools of both pages: nodes, the tip, numbers as people read them.
// Nothing here or elsewhere in these pages makes markup of a string: a child that is a string becomes a text node, so that
// what a model, a server or a file name says can never run.

const PROPERTIES = new Set(["class", "dataset"]);

/** A node with attributes ("onclick" and the like take functions) and children (strings are text). */
export function make(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  set(node, attributes);
  node.append(...children);
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

/** The same for a drawing. */
export function draw(name, attributes = {}, ...children) {
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

/** Rows of a tip: pairs of texts; `chosen` is the row that is set off. */
export function rows(pairs, chosen = -1) {
  const table = make("table");
  pairs.forEach((cells, i) => {
    const row = table.insertRow();
    if (i === chosen) row.className = "chosen";
    for (const cell of cells) row.insertCell().textContent = cell;
  });
  return table;
}

/** The one tip of a page: above what it tells about where there is room, else below; never outside the window. */
export class Tip {
  constructor(node = find("#tip")) {
    this.node = node;
    addEventListener("scroll", () => this.hide(), { capture: true, passive: true });
    addEventListener("resize", () => this.hide());
  }

  /** parts: nodes or texts; box: of what is told about, in the window's pixels. */
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

/** Reads streamed text aloud in whole sentences, not more often than every 1.5 s: a polite region that gets each token
 *  would start again with every one of them. */
export class Announcer {
  constructor(region) {
    this.region = region;
    this.kept = "";
    this.last = 0;
  }

  push(text) {
    this.kept += text;
    const now = performance.now();
    const end = Math.max(...[". ", "! ", "? ", "\n"].map((mark) => this.kept.lastIndexOf(mark)));
    if (end < 0 || now - this.last < 1500) return;
    this.last = now;
    this.#add(this.kept.slice(0, end + 1));
    this.kept = this.kept.slice(end + 1);
  }

  /** What is left, then `words`. */
  end(words) {
    if (this.kept.trim()) this.#add(this.kept);
    this.kept = "";
    this.#add(words);
  }

  #add(text) {
    this.region.append(make("p", {}, text));
    while (this.region.childNodes.length > 4) this.region.firstChild.remove();
  }
}

const NBSP = "\u00a0";

/** 0.5 -> "50.0 %". */
export const percent = (p) =>
  p >= 0.9995 ? `100${NBSP}%` : p >= 0.09995 ? `${(100 * p).toFixed(1)}${NBSP}%` : p >= 0.0001 ? `${(100 * p).toFixed(2)}${NBSP}%` : `<${NBSP}0.01${NBSP}%`;

/** Three figures or more, grouped by thousands; a whole number without decimals, unless it was measured. */
export function figure(value, measured = false) {
  if (!Number.isFinite(value)) return "–";
  const size = value === 0 ? 0 : Math.floor(Math.log10(Math.abs(value)));
  const digits = Math.max(0, Math.min(6, 2 - size));
  return value.toLocaleString("en", { minimumFractionDigits: Number.isInteger(value) && !measured ? 0 : digits, maximumFractionDigits: digits });
}

/** 0.0123 -> "12.3 ms". */
export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value < 1e-3) return `${figure(value * 1e6, true)}${NBSP}µs`;
  return value < 1 ? `${figure(value * 1e3, true)}${NBSP}ms` : `${figure(value, true)}${NBSP}s`;
}

/** "1 token", "2 tokens". */
export const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

/** What cannot be seen gets a sign. */
export const sign = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·");
