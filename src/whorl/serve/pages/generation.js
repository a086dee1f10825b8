// One response during generation: the stream is read as fast as it arrives, the page is updated once per frame.
//
// Tokens can arrive faster than a page can lay out. So they are collected, and `draw` is called at most once per animation
// frame with everything new. A hidden page has no frames: it draws when it is visible again or when the response ends.

import { stream } from "./client.js";
import { count, formatNumber, formatSeconds } from "./dom.js";
import { TokenText } from "./tokens.js";

const REPEATED = 240; // characters that repeat one unit ...
const REPEATS = 6; // ... at least so often: a table, a ruler or a short list is no loop
const MAX_UNIT = 200; // characters of the unit

/** Whether a text ends in one unit, a line or a phrase, over and over. */
export function repeats(text) {
  for (let unit = 1; unit <= MAX_UNIT; unit += 1) {
    const length = Math.max(REPEATED, unit * REPEATS);
    if (text.length >= length + unit && text.slice(-length) === text.slice(-length - unit, -unit)) return true;
  }
  return false;
}

export class Generation {
  /** stopRepeats: end when the text only repeats itself. draw(pieces): called with the new pieces of text; may be empty. */
  constructor(stopRepeats, draw) {
    this.stopRepeats = stopRepeats;
    this.draw = draw;
    this.tokenText = new TokenText();
    this.controller = new AbortController();
    this.started = performance.now();
    this.firstTokenAt = this.lastTokenAt = null; // ms
    this.chunks = 0;
    this.usage = null;
    this.feedback = null; // {token, expires} of a completion that the server keeps
    this.sources = null; // [{number, id, title, text}] of the prompt
    this.finish = null;
    this.error = null;
    this.frame = 0;
  }

  /** Runs to the end and never throws: the result is in `finish` or `error`. */
  async run(kind, body, key) {
    try {
      for await (const chunk of stream(kind, body, { key, signal: this.controller.signal })) {
        if (chunk.text || chunk.tokens.length) {
          this.lastTokenAt = performance.now();
          this.firstTokenAt ??= this.lastTokenAt;
          this.chunks += 1;
        }
        this.tokenText.add(chunk.text, chunk.tokens);
        this.finish = chunk.finish ?? this.finish;
        this.usage = chunk.usage ?? this.usage;
        this.feedback = chunk.feedback ?? this.feedback;
        this.sources = chunk.sources ?? this.sources;
        this.frame ||= requestAnimationFrame(() => this.#draw());
        if (this.stopRepeats && repeats(this.tokenText.text)) {
          this.finish = "repeats";
          this.controller.abort();
          break;
        }
      }
    } catch (error) {
      if (error.name === "AbortError") this.finish = "stopped";
      else this.error = error;
    }
    cancelAnimationFrame(this.frame);
    this.tokenText.finish();
    this.#draw();
    return this;
  }

  stop() {
    this.controller.abort();
  }

  #draw() {
    this.frame = 0;
    this.draw(this.tokenText.takePieces(), this);
  }

  /** Number of generated tokens: from the server's usage if present, else counted. */
  get tokens() {
    return this.usage?.completion_tokens ?? (this.tokenText.count || this.chunks);
  }

  /** "57 tokens · 43.2 tokens/s · first token after 210 ms · prompt 120 tokens (96 cached)". The rate counts from the start
   *  of the request: a proxy may deliver all tokens at once. */
  summary() {
    const parts = [];
    if (this.finish === "stopped") parts.push("stopped");
    if (this.finish === "repeats") parts.push("stopped, because the text repeats itself");
    if (this.finish === "length") parts.push("token limit reached");
    if (this.tokens) parts.push(count(this.tokens, "token"));
    const duration = (this.lastTokenAt - this.started) / 1000;
    if (this.tokens > 1 && duration > 0) parts.push(`${formatNumber(this.tokens / duration)}\u00a0tokens/s`);
    if (this.firstTokenAt !== null) parts.push(`first token after ${formatSeconds((this.firstTokenAt - this.started) / 1000)}`);
    if (this.usage?.prompt_tokens !== undefined) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens;
      parts.push(`prompt ${count(this.usage.prompt_tokens, "token")}${cached ? ` (${cached.toLocaleString("en")} cached)` : ""}`);
    }
    return parts.join(" · ");
  }
}
