// Pieces of text as spans that tell their probability: under the pointer, under a finger, and by keyboard.
//
// One set of listeners serves a whole pane, however many thousand spans it holds. For the keyboard an answer is one stop of
// the Tab key, and the arrows move inside it. A span's warmth is set once, as a number; whether it shows is the pane's class
// ("tinted"), so that the switch costs nothing.

import { make, percent, rows, sign } from "./dom.js";
import { heat, readable } from "./tokens.js";

const pieceOf = new WeakMap(); // span -> {text, tokens}

/** A span for a piece; a bare text node for text that no token vouches for. */
export function spanOf(piece) {
  if (!piece.tokens.length) return document.createTextNode(piece.text);
  const span = make("span", { class: piece.text.startsWith("\n") ? "t eol" : "t", tabindex: -1 }, piece.text);
  span.style.setProperty("--s", heat(piece.tokens));
  pieceOf.set(span, piece);
  return span;
}

const chance = (logprob) => (logprob === null || logprob === undefined ? "–" : percent(Math.exp(logprob)));
const same = (a, b) => a.length === b.length && a.every((byte, i) => byte === b[i]);

/** What the tip says of a piece: its token and what else was likely, or the tokens that make up one character. */
export function parts(piece) {
  const [token] = piece.tokens;
  if (piece.tokens.length > 1) {
    const title = make("b", {}, `${sign(piece.text)}  ${piece.tokens.length} tokens`);
    return [title, rows(piece.tokens.map((each) => [readable(each.bytes), chance(each.logprob)]))];
  }
  const title = make("b", {}, `${sign(readable(token.bytes))}  ${chance(token.logprob)}`);
  if (!token.others.length) return [title];
  const chosen = token.others.findIndex((other) => same(other.bytes, token.bytes));
  return [title, rows(token.others.map((other) => [sign(readable(other.bytes)), chance(other.logprob)]), chosen)];
}

/** Shows the tip of a span. */
export function tell(tip, span) {
  const piece = pieceOf.get(span);
  if (piece) tip.show(parts(piece), span.getClientRects()[0] ?? span.getBoundingClientRect());
}

/** Makes every token span within `pane` tell itself. Spans of one answer share the closest `[data-tokens]` around them. */
export function listen(pane, tip) {
  const spanAt = (event) => event.target.closest?.(".t");
  pane.addEventListener("pointerover", (event) => spanAt(event) && tell(tip, spanAt(event)));
  pane.addEventListener("pointerout", (event) => spanAt(event) && tip.hide());
  pane.addEventListener("focusin", (event) => spanAt(event) && tell(tip, spanAt(event)));
  pane.addEventListener("focusout", (event) => spanAt(event) && tip.hide());
  pane.addEventListener("click", (event) => {
    const span = spanAt(event);
    if (!span) return;
    span.focus({ preventScroll: true });
    tell(tip, span);
  });
  pane.addEventListener("keydown", (event) => {
    const span = spanAt(event);
    if (!span) return;
    const answer = span.closest("[data-tokens]");
    const spans = [...answer.querySelectorAll(".t")];
    const at = spans.indexOf(span);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (to === undefined || !spans[to]) return;
    event.preventDefault();
    span.tabIndex = -1;
    spans[to].tabIndex = 0;
    spans[to].focus();
    tell(tip, spans[to]); // a scroll that the focus brought hides the tip
  });
}

/** Appends pieces to an answer; its first token is where the Tab key stops. */
export function append(answer, pieces) {
  if (!pieces.length) return;
  answer.append(...pieces.map(spanOf));
  if (!answer.querySelector('.t[tabindex="0"]')) {
    const first = answer.querySelector(".t");
    if (first) first.tabIndex = 0;
  }
}
