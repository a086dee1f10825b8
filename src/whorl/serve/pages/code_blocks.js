// Code in a response: the text between ``` fences becomes a block in monospace with a button that copies it.
//
// The text of the response does not change: fences stay in it, shown small, so that copying and editing give what the model
// wrote. Token spans move into the block; one that crosses a border is split. Citations such as [1] become links in the same way;
// they open their source in a list below the response.

import { createElement } from "./dom.js";
import { splitSpan } from "./tokenview.js";

const FENCED = /^(```[^`\n]*\n)([\s\S]*?)(^```[ \t]*$|$(?![\s\S]))/gm;

/** Positions of the code blocks of a text: [{start, code, end, stop}]; the code is text.slice(code, end). */
export function codeBlocks(text) {
  return [...text.matchAll(FENCED)].map((match) => {
    const code = match.index + match[1].length;
    return { start: match.index, code, end: code + match[2].length, stop: match.index + match[0].length };
  });
}

/** Groups the nodes of a finished response into blocks. Its children are text nodes and token spans. */
export function formatCode(response) {
  const text = response.textContent;
  for (const block of codeBlocks(text).reverse()) {
    const part = (from, to, name) => createElement("span", { class: name }, ...takeNodes(response, from, to));
    const close = part(block.end, block.stop, "fence");
    const code = part(block.code, block.end, "code");
    const open = part(block.start, block.code, "fence");
    const copy = createElement("button", { class: "quiet copy-code", type: "button", onclick: () => copyText(code.textContent, copy) }, "Copy code");
    response.insertBefore(createElement("div", { class: "code-block mono" }, open, code, close, copy), nodeAt(response, block.start));
  }
}

/** Fills `list` with sources [{number, id, title, text}]; returns a map from numbers to elements. */
export function showSources(list, sources) {
  const entries = new Map((sources ?? []).map((source) => [source.number, createElement("details", {},
    createElement("summary", {}, `[${source.number}] ${source.title || source.id}`), createElement("p", {}, source.text))]));
  list.replaceChildren(...entries.values());
  return entries;
}

/** Also links the citations of a finished response, before its code is formatted. */
export function linkSources(response, list, sources) {
  const entries = showSources(list, sources);
  const text = response.textContent, code = codeBlocks(text);
  for (const { 0: cited, 1: number, index } of [...text.matchAll(/\[(\d+)\]/g)].reverse()) {
    const entry = entries.get(Number(number));
    if (!entry || code.some((block) => block.start <= index && index < block.stop)) continue;
    const open = (event) => {
      event.preventDefault();
      entry.open = true;
      entry.firstChild.focus();
    };
    const link = createElement("a", { class: "cite", href: "#", onclick: open }, ...takeNodes(response, index, index + cited.length));
    response.insertBefore(link, nodeAt(response, index));
  }
}

/** Copies a text and shows the result in the button. */
export async function copyText(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed"; // browsers allow the clipboard only on https and localhost
  }
  button.addEventListener("blur", () => { button.textContent = label; }, { once: true });
}

/** The child that begins at this position of the text, split off if necessary; null at the end. */
function nodeAt(response, position) {
  let at = 0;
  for (const node of [...response.childNodes]) {
    const { length } = node.textContent;
    if (position === at) return node;
    if (position < at + length) return node.nodeType === Node.TEXT_NODE ? node.splitText(position - at) : splitSpan(node, position - at);
    at += length;
  }
  return null;
}

/** Removes the nodes of a range and returns them. */
function takeNodes(response, from, to) {
  const end = nodeAt(response, to);
  const nodes = [];
  for (let node = nodeAt(response, from); node && node !== end; node = node.nextSibling) nodes.push(node);
  for (const node of nodes) node.remove();
  return nodes;
}
