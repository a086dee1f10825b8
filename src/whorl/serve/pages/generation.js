// One answer while it is written: the stream is read as fast as it comes, the page is drawn once per frame.
//
// Tokens can come faster than a page can lay out; drawing each at once would make the page stutter and, on a phone, hot. So
// parts are gathered and `draw` is called at most once per animation frame, with all that is new. (A hidden page has no
// frames: it gathers, and draws when it is seen again or when the answer ends.)

import { stream } from "./client.js";
import { count, figure, seconds } from "./dom.js";
import { Written } from "./tokens.js";

export class Generation {
  /** draw(pieces, generation): new pieces of text, in order; may be none. */
  constructor(draw) {
    this.draw = draw;
    this.written = new Written();
    this.controller = new AbortController();
    this.started = performance.now();
    this.first = this.last = null; // times of the first and the latest token, ms
    this.parts = 0;
    this.usage = null;
    this.finish = null;
    this.error = null;
    this.frame = 0;
  }

  /** Runs to the end, which is never an exception: `finish` or `error` says what it was. */
  async run(kind, body, key) {
    try {
      for await (const part of stream(kind, body, { key, signal: this.controller.signal })) {
        if (part.text || part.tokens.length) {
          this.last = performance.now();
          this.first ??= this.last;
          this.parts += 1;
        }
        this.written.add(part.text, part.tokens);
        this.finish = part.finish ?? this.finish;
        this.usage = part.usage ?? this.usage;
        this.frame ||= requestAnimationFrame(() => this.#draw());
      }
    } catch (error) {
      if (error.name === "AbortError") this.finish = "stopped";
      else this.error = error;
    }
    cancelAnimationFrame(this.frame);
    this.written.finish();
    this.#draw();
    return this;
  }

  stop() {
    this.controller.abort();
  }

  #draw() {
    this.frame = 0;
    this.draw(this.written.take(), this);
  }

  /** Tokens written: the server's count where it told one, else those seen. */
  get tokens() {
    return this.usage?.completion_tokens ?? (this.written.count || this.parts);
  }

  /** "57 tokens · 43.2 tokens/s · first after 210 ms · prompt 120 tokens (96 from the cache)". The speed counts from the
   *  request on: tokens that a proxy or a busy browser hands over in one lump would come at any speed one likes. */
  words() {
    const words = [];
    if (this.finish === "stopped") words.push("stopped");
    if (this.finish === "length") words.push("cut at the token limit");
    if (this.tokens) words.push(count(this.tokens, "token"));
    const took = (this.last - this.started) / 1000;
    if (this.tokens > 1 && took > 0) words.push(`${figure(this.tokens / took)}\u00a0tokens/s`);
    if (this.first !== null) words.push(`first after ${seconds((this.first - this.started) / 1000)}`);
    if (this.usage?.prompt_tokens !== undefined) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens;
      words.push(`prompt ${count(this.usage.prompt_tokens, "token")}${cached ? ` (${cached.toLocaleString("en")} from the cache)` : ""}`);
    }
    return words.join(" · ");
  }
}
