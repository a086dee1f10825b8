// Tokens and text: which piece of the shown text came from which tokens.
//
// The text is the truth, the tokens are annotations: a server holds text back while it may begin a stop text (its tokens are
// told at once), cuts it where the stop text begins, and may send no tokens at all. So `Written` keeps both and hands out
// pieces of the text, each with the tokens whose bytes it is, as long as the two agree; from the first disagreement on the
// text stands alone. Nothing of the text is ever lost or made up.
//
// A token of a byte-level vocabulary may be part of a character. Bytes therefore pass through one incremental UTF-8 decoder:
// a character belongs to the piece of the token that completes it, together with the tokens that began it.

export class Written {
  constructor() {
    this.text = "";
    this.count = 0; // tokens seen
    this.drawn = 0; // UTF-16 units of the text that have been handed out
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    this.open = []; // tokens whose bytes are not yet a character
    this.waiting = []; // {text, tokens}: decoded, not yet handed out
    this.aligned = true;
    this.done = false;
  }

  /** text: what the server says may be shown; tokens: [{bytes, logprob, others}]. */
  add(text, tokens) {
    this.text += text;
    for (const token of tokens) {
      this.count += 1;
      this.open.push(token);
      this.#decoded(this.decoder.decode(token.bytes, { stream: true }));
    }
  }

  /** No more will come: what was held back by half a character or half a piece is let go. */
  finish() {
    if (this.done) return;
    this.done = true;
    this.#decoded(this.decoder.decode());
  }

  /** The pieces since the last call: [{text, tokens}], where tokens is empty for text that stands alone. */
  take() {
    const pieces = [];
    while (this.aligned && this.waiting.length) {
      const piece = this.waiting[0];
      const there = this.text.slice(this.drawn, this.drawn + piece.text.length);
      if (there.length < piece.text.length && !this.done) {
        if (piece.text.startsWith(there)) break; // held back
        this.aligned = false;
      } else if (there === piece.text || (there && piece.text.startsWith(there))) {
        pieces.push({ text: there, tokens: piece.tokens });
        this.drawn += there.length;
        this.waiting.shift();
      } else this.aligned = false;
    }
    const pending = this.aligned && !this.done && (this.waiting.length > 0 || this.open.length > 0);
    if (!pending && this.drawn < this.text.length) {
      pieces.push({ text: this.text.slice(this.drawn), tokens: [] });
      this.drawn = this.text.length;
    }
    return pieces;
  }

  #decoded(text) {
    if (!text) return;
    this.waiting.push({ text, tokens: this.open });
    this.open = [];
  }
}

const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** Bytes of one token as a person can read them; those that are no text as \xHH. */
export function readable(bytes) {
  try {
    return strict.decode(bytes);
  } catch {
    return Array.from(bytes, (b) => (b >= 32 && b < 127 ? String.fromCharCode(b) : `\\x${b.toString(16).padStart(2, "0")}`)).join("");
  }
}

/** 0 (certain) to 70 (1 in 256 or less): per cent of the warm colour behind a piece, as in the report. */
export function heat(tokens) {
  const surprise = tokens.reduce((sum, token) => sum - (token.logprob ?? 0) / Math.LN2, 0);
  return Math.round((Math.min(8, Math.max(0, surprise)) * 70) / 8);
}
