// Token spans that show their probability by pointer, touch and keyboard.
//
// One set of listeners serves a whole pane with thousands of spans. For the keyboard a response is one tab stop, and the arrow
// keys move inside it. The color strength of a span is set once as a number. The class "tinted" of the pane shows it, so the
// switch is free.

import { createElement, formatPercent, table, visibleWhitespace } from "./dom.js";
import { readable, surprisal } from "./tokens.js";

const pieceOf = new WeakMap(); // span -> {text, tokens}

/** A span for a piece; a text node for text without tokens. */
export function spanOf(piece) {
  if (!piece.tokens.length) return document.createTextNode(piece.text);
  const span = createElement("span", { class: piece.text.startsWith("\n") ? "t eol" : "t", tabindex: -1 }, piece.text);
  span.style.setProperty("--s", surprisal(piece.tokens));
  pieceOf.set(span, piece);
  return span;
}

/** Splits a span at a position of its text and returns the second half; both show the whole piece's tooltip. */
export function splitSpan(span, position) {
  const rest = span.cloneNode(false);
  rest.textContent = span.textContent.slice(position);
  rest.tabIndex = -1;
  span.textContent = span.textContent.slice(0, position);
  pieceOf.set(rest, pieceOf.get(span));
  span.after(rest);
  return rest;
}

const formatProbability = (logprob) => (logprob === null || logprob === undefined ? "–" : formatPercent(Math.exp(logprob)));
const same = (a, b) => a.length === b.length && a.every((byte, i) => byte === b[i]);

/** Content of the tooltip: a token with its alternatives, or the tokens that form one character. */
export function tokenTip(piece) {
  const [token] = piece.tokens;
  if (piece.tokens.length > 1) {
    const title = createElement("b", {}, `${visibleWhitespace(piece.text)}  ${piece.tokens.length} tokens`);
    return [title, table(piece.tokens.map((each) => [readable(each.bytes), formatProbability(each.logprob)]))];
  }
  const title = createElement("b", {}, `${visibleWhitespace(readable(token.bytes))}  ${formatProbability(token.logprob)}`);
  if (!token.alternatives.length) return [title];
  const chosen = token.alternatives.findIndex((other) => same(other.bytes, token.bytes));
  return [title, table(token.alternatives.map((other) => [visibleWhitespace(readable(other.bytes)), formatProbability(other.logprob)]), chosen)];
}

/** Shows the tooltip of a span. */
export function showTokenTip(tooltip, span) {
  const piece = pieceOf.get(span);
  if (piece) tooltip.show(tokenTip(piece), span.getClientRects()[0] ?? span.getBoundingClientRect());
}

/** Adds the listeners to a pane. Spans of one response share the closest `[data-tokens]` ancestor. */
export function attachTokenTips(pane, tooltip) {
  const spanAt = (event) => event.target.closest?.(".t");
  pane.addEventListener("pointerover", (event) => spanAt(event) && showTokenTip(tooltip, spanAt(event)));
  pane.addEventListener("pointerout", (event) => spanAt(event) && tooltip.hide());
  pane.addEventListener("focusin", (event) => spanAt(event) && showTokenTip(tooltip, spanAt(event)));
  pane.addEventListener("focusout", (event) => spanAt(event) && tooltip.hide());
  pane.addEventListener("click", (event) => {
    const span = spanAt(event);
    if (!span) return;
    span.focus({ preventScroll: true });
    showTokenTip(tooltip, span);
  });
  pane.addEventListener("keydown", (event) => {
    const span = spanAt(event);
    if (!span) return;
    const response = span.closest("[data-tokens]");
    const spans = [...response.querySelectorAll(".t")];
    const at = spans.indexOf(span);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (to === undefined || !spans[to]) return;
    event.preventDefault();
    span.tabIndex = -1;
    spans[to].tabIndex = 0;
    spans[to].focus();
    showTokenTip(tooltip, spans[to]); // scrolling caused by the focus hides the tooltip
  });
}

/** Appends pieces to a response; its first token is the tab stop. */
export function appendPieces(response, pieces) {
  if (!pieces.length) return;
  response.append(...pieces.map(spanOf));
  if (!response.querySelector('.t[tabindex="0"]')) {
    const first = response.querySelector(".t");
    if (first) first.tabIndex = 0;
  }
}
