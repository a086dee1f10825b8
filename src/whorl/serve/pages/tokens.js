// Alignment of streamed text with its tokens.
//
// The text is authoritative, the tokens are annotations. A server holds text back while it may be the beginning of a stop
// string, although it sends the tokens at once. It cuts the text at the stop string. It may send no tokens. `TokenText`
// stores both and returns pieces of the text with their tokens while the two agree. After the first mismatch it returns text
// without tokens. No text is lost or added.
//
// A byte-level token may be part of a character, so bytes pass through one incremental UTF-8 decoder. A character belongs to
// the piece of the token that completes it, together with the tokens that began it.

export class TokenText {
  constructor() {
    this.text = "";
    this.count = 0; // tokens seen
    this.emitted = 0; // UTF-16 units of the text that were returned
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    this.partial = []; // tokens of an incomplete character
    this.pending = []; // {text, tokens}: decoded, not yet returned
    this.aligned = true;
    this.done = false;
  }

  /** text: new text of the server; tokens: [{bytes, logprob, alternatives}]. */
  add(text, tokens) {
    this.text += text;
    for (const token of tokens) {
      this.count += 1;
      this.partial.push(token);
      this.#push(this.decoder.decode(token.bytes, { stream: true }));
    }
  }

  /** Marks the end: releases text that waited for the rest of a character or a piece. */
  finish() {
    if (this.done) return;
    this.done = true;
    this.#push(this.decoder.decode());
  }

  /** Returns the new pieces: [{text, tokens}]; tokens is empty for text without aligned tokens. */
  takePieces() {
    const pieces = [];
    while (this.aligned && this.pending.length) {
      const piece = this.pending[0];
      const available = this.text.slice(this.emitted, this.emitted + piece.text.length);
      if (available.length < piece.text.length && !this.done) {
        if (piece.text.startsWith(available)) break; // held back by the server
        this.aligned = false;
      } else if (available === piece.text || (available && piece.text.startsWith(available))) {
        pieces.push({ text: available, tokens: piece.tokens });
        this.emitted += available.length;
        this.pending.shift();
      } else this.aligned = false;
    }
    const incomplete = this.aligned && !this.done && (this.pending.length > 0 || this.partial.length > 0);
    if (!incomplete && this.emitted < this.text.length) {
      pieces.push({ text: this.text.slice(this.emitted), tokens: [] });
      this.emitted = this.text.length;
    }
    return pieces;
  }

  #push(text) {
    if (!text) return;
    this.pending.push({ text, tokens: this.partial });
    this.partial = [];
  }
}

const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** The bytes of a token as readable text; bytes that are not UTF-8 as \xHH. */
export function readable(bytes) {
  try {
    return strict.decode(bytes);
  } catch {
    return Array.from(bytes, (b) => (b >= 32 && b < 127 ? String.fromCharCode(b) : `\\x${b.toString(16).padStart(2, "0")}`)).join("");
  }
}

/** Surprisal as color strength in percent: 0 (certain) to 70 (1 in 256 or less), as in the report. */
export function surprisal(tokens) {
  const bits = tokens.reduce((sum, token) => sum - (token.logprob ?? 0) / Math.LN2, 0);
  return Math.round((Math.min(8, Math.max(0, bits)) * 70) / 8);
}
