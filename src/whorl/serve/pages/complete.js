// The sheet: a text that the model continues in place. The text stays an ordinary text field all the time.
//
// A text field cannot colour parts of what it holds, so the same text lies once more underneath it, letter for letter in the
// same type, as spans: they carry the colours, and tell which token lies under the pointer or at the caret. Where the
// person changes the text, the tokens from there on are no longer what the model wrote after what stands before them:
// their marks go, those before stay.

import { find, make } from "./dom.js";
import { Generation } from "./generation.js";
import { keep, recall } from "./settings.js";
import { spanOf, tell } from "./tokenview.js";

const KEPT = "whorl.sheet";

export class Sheet {
  /** page: what the page offers its panes (see chat.js). */
  constructor(section, page) {
    this.page = page;
    this.scroller = find(".scroller", section);
    this.area = find("textarea", section);
    this.under = find(".under", section);
    this.go = find(".go", section);
    this.redo = find(".again", section);
    this.back = find(".back", section);
    this.stats = find(".stats", section);
    this.branches = find(".branches", section);
    this.trouble = make("div", { class: "trouble", role: "alert", hidden: true });
    find(".bar", section).before(this.trouble);
    this.text = ""; // what the marks are for
    this.marks = []; // {start, end, node}: spans of the layer underneath, in order; node may be plain text
    this.base = null; // the text before the last continuation
    this.versions = []; // [{text, marks, words}]: continuations of `base`
    this.at = -1;
    this.running = null;
    this.go.addEventListener("click", () => (this.running ? this.stop() : this.submit()));
    this.redo.addEventListener("click", () => this.#again());
    this.back.addEventListener("click", () => this.#takeBack());
    this.area.addEventListener("input", () => this.#typed());
    this.#hover();
    this.area.value = recall("sessionStorage", KEPT) ?? "";
    this.#typed();
  }

  submit() {
    if (this.running) return;
    this.#typed();
    this.#write();
  }

  stop() {
    this.running?.generation.stop();
  }

  async clear() {
    this.stop();
    await this.running?.done;
    this.#put("", []);
    this.#forget();
    this.area.focus();
  }

  /** Asks for a continuation of all that stands there. `versions` are kept where it is another one of the same text. */
  #write(again = false) {
    const { page } = this;
    const body = page.settings.body("complete", page.opener);
    if (!body || !page.ready()) return;
    if (!again) {
      this.base = this.text;
      this.baseMarks = [...this.marks];
      this.versions = [];
    } else this.#put(this.base, this.baseMarks);
    const { base } = this;
    const generation = new Generation((pieces) => {
      const follow = this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight < 60;
      this.#append(pieces);
      page.announcer.push(pieces.map((piece) => piece.text).join(""));
      this.stats.textContent = generation.words();
      if (follow) this.scroller.scrollTop = this.scroller.scrollHeight;
    });
    this.trouble.hidden = true;
    this.area.readOnly = true;
    const done = generation.run("complete", { model: page.model, prompt: base, ...body }, page.settings.key).then(() => {
      this.running = null;
      this.area.readOnly = false;
      page.announcer.end(generation.error ? "" : generation.finish === "stopped" ? "Stopped." : "End of the continuation.");
      if (this.text !== base || !generation.error) this.#keepVersion(generation.words());
      if (generation.error) this.#fail(generation.error);
      keep("sessionStorage", KEPT, this.text);
      page.busy(false);
      this.#ready();
    });
    this.running = { generation, done };
    page.busy(true);
    this.#ready();
  }

  #keepVersion(words) {
    this.at = this.versions.push({ text: this.text, marks: [...this.marks], words }) - 1;
  }

  #fail(error) {
    const again = make("button", { type: "button", onclick: () => this.#write(this.text === this.base || this.versions.length > 0) }, "Try again");
    this.trouble.replaceChildren(make("span", {}, error.message), again);
    if (error.kind === "key") this.trouble.append(make("button", { type: "button", onclick: () => this.page.askKey() }, "Settings"));
    this.trouble.hidden = false;
  }

  #again() {
    if (!this.running && this.base !== null) this.#write(true);
  }

  #takeBack() {
    if (this.running || this.base === null) return;
    this.#put(this.base, this.baseMarks);
    this.#forget();
    this.area.focus();
  }

  #step(by) {
    this.at += by;
    const version = this.versions[this.at];
    this.#put(version.text, version.marks);
    this.stats.textContent = version.words;
    this.#ready();
    find(`button:${by < 0 ? "first" : "last"}-child:not(:disabled)`, this.branches)?.focus();
  }

  /** The last continuation is no longer one: the text goes on from what stands there. */
  #forget() {
    this.base = null;
    this.versions = [];
    this.at = -1;
    this.stats.textContent = "";
    this.#ready();
  }

  #ready() {
    this.go.textContent = this.running ? "Stop" : "Continue";
    this.go.classList.toggle("main", !this.running);
    this.redo.disabled = this.back.disabled = Boolean(this.running) || this.base === null;
    const several = this.versions.length > 1 && !this.running;
    const arrow = (by, words, label) =>
      make("button", { class: "quiet", type: "button", "aria-label": label, disabled: !this.versions[this.at + by], onclick: () => this.#step(by) }, words);
    this.branches.replaceChildren(...(several ? [
      arrow(-1, "‹", "Earlier version"), make("span", { class: "note" }, `${this.at + 1} / ${this.versions.length}`), arrow(1, "›", "Later version"),
    ] : []));
  }

  /** The person changed the text. */
  #typed() {
    const { value } = this.area;
    if (value === this.text) return;
    let same = 0;
    while (same < value.length && value[same] === this.text[same]) same += 1;
    this.#put(value, this.marks.filter((mark) => mark.end <= same));
    this.#forget();
    keep("sessionStorage", KEPT, value);
  }

  /** Shows `text`, with `marks` (in order, within it); what they leave free lies underneath as plain text. */
  #put(text, marks) {
    const nodes = [];
    let end = 0;
    for (const mark of marks) {
      if (mark.start > end) nodes.push(text.slice(end, mark.start));
      nodes.push(mark.node);
      end = mark.end;
    }
    this.under.replaceChildren(...nodes, text.slice(end));
    this.text = text;
    this.marks = [...marks];
    if (this.area.value !== text) this.area.value = text;
  }

  #append(pieces) {
    if (!pieces.length) return;
    for (const piece of pieces) {
      const node = spanOf(piece);
      const start = this.text.length;
      this.text += piece.text;
      this.under.append(node);
      if (piece.tokens.length) this.marks.push({ start, end: this.text.length, node });
    }
    const { selectionStart, selectionEnd } = this.area;
    const atEnd = selectionEnd === this.area.value.length;
    this.area.value = this.text;
    if (!atEnd) this.area.setSelectionRange(selectionStart, selectionEnd);
  }

  /** Probabilities under the pointer; and at the caret while the colours are on, for keyboard and touch. */
  #hover() {
    const { area, page } = this;
    let lit = null;
    const light = (span) => {
      if (lit === span) return;
      lit?.classList.remove("at");
      span?.classList.add("at");
      lit = span;
      if (span) tell(page.tip, span);
      else page.tip.hide();
    };
    area.addEventListener("pointermove", (event) => {
      const under = document.elementsFromPoint(event.clientX, event.clientY).find((node) => node.matches(".under .t"));
      if (event.pointerType === "mouse") light(under ?? null);
    });
    area.addEventListener("pointerleave", () => light(null));
    area.addEventListener("blur", () => light(null));
    document.addEventListener("selectionchange", () => {
      if (document.activeElement !== area || this.running || !document.body.classList.contains("tinted")) return;
      const caret = area.selectionStart;
      const mark = this.marks.find((each) => each.start <= caret && caret < each.end) ?? this.marks.findLast((each) => each.end === caret);
      light(area.selectionEnd === caret && mark ? mark.node : null);
    });
  }
}
