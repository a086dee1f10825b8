// The completion pane: a text field whose text the model continues in place.
//
// A text field cannot color parts of its text. So an overlay under the field contains the same text in the same font as token
// spans. They carry the colors and identify the token at the pointer or the caret. When the user edits the text, the spans
// after the edit are removed, because these tokens no longer follow the text before them.

import { showSources } from "./code_blocks.js";
import { createElement, find } from "./dom.js";
import { Generation } from "./generation.js";
import { readStorage, writeStorage } from "./settings.js";
import { showTokenTip, spanOf } from "./tokenview.js";

const STORAGE_KEY = "whorl.sheet";

export class CompletionPane {
  /** page: the interface of the page (see chat.js). */
  constructor(section, page) {
    this.page = page;
    this.scroller = find(".scroller", section);
    this.area = find("textarea", section);
    this.overlay = find(".overlay", section);
    this.submitButton = find(".submit", section);
    this.regenerateButton = find(".regenerate", section);
    this.undoButton = find(".undo", section);
    this.stats = find(".stats", section);
    this.branches = find(".branches", section);
    this.errorBox = createElement("div", { class: "error", role: "alert", hidden: true });
    this.sources = createElement("div", { class: "sources" });
    find(".bar", section).before(this.sources, this.errorBox);
    this.text = ""; // the text of the spans
    this.spans = []; // {start, end, node}: token spans of the overlay, in order; node may be plain text
    this.baseText = null; // the text before the last completion
    this.versions = []; // [{text, spans, summary}]: completions of `baseText`
    this.versionIndex = -1;
    this.running = null;
    this.submitButton.addEventListener("click", () => (this.running ? this.stop() : this.submit()));
    this.regenerateButton.addEventListener("click", () => this.#regenerate());
    this.undoButton.addEventListener("click", () => this.#undo());
    this.area.addEventListener("input", () => this.#onInput());
    this.#hover();
    this.area.value = readStorage("sessionStorage", STORAGE_KEY) ?? "";
    this.#onInput();
  }

  submit() {
    if (this.running) return;
    this.#onInput();
    this.#generate();
  }

  stop() {
    this.running?.generation.stop();
  }

  async clear() {
    this.stop();
    await this.running?.done;
    this.#setText("", []);
    this.#clearVersions();
    this.area.focus();
  }

  /** Generates a completion of the text. regenerate: another one of the same text; `versions` are then kept. */
  #generate(regenerate = false) {
    const { page } = this;
    const body = page.settings.body("complete", page.opener);
    if (!body || !page.ready()) return;
    if (!regenerate) {
      this.baseText = this.text;
      this.baseSpans = [...this.spans];
      this.versions = [];
    } else this.#setText(this.baseText, this.baseSpans);
    const base = this.baseText;
    const generation = new Generation(page.settings.stopRepeats, (pieces) => {
      const follow = this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight < 60;
      this.#append(pieces);
      page.announcer.push(pieces.map((piece) => piece.text).join(""));
      this.stats.textContent = generation.summary();
      if (follow) this.scroller.scrollTop = this.scroller.scrollHeight;
    });
    this.errorBox.hidden = true;
    this.area.readOnly = true;
    const done = generation.run("complete", { model: page.model, prompt: base, ...body }, page.settings.key).then(() => {
      this.running = null;
      showSources(this.sources, generation.sources);
      this.area.readOnly = false;
      page.announcer.end(generation.error ? "" : generation.finish === "stopped" ? "Stopped." : "Completion finished.");
      if (this.text !== base || !generation.error) this.#saveVersion(generation.summary());
      if (generation.error) this.#fail(generation.error);
      writeStorage("sessionStorage", STORAGE_KEY, this.text);
      page.busy(false);
      this.#updateButtons();
    });
    this.running = { generation, done };
    page.busy(true);
    this.#updateButtons();
  }

  #saveVersion(summary) {
    this.versionIndex = this.versions.push({ text: this.text, spans: [...this.spans], summary }) - 1;
  }

  #fail(error) {
    const retry = createElement("button", { type: "button", onclick: () => this.#generate(this.text === this.baseText || this.versions.length > 0) }, "Try again");
    this.errorBox.replaceChildren(createElement("span", {}, error.message), retry);
    if (error.kind === "key") this.errorBox.append(createElement("button", { type: "button", onclick: () => this.page.askKey() }, "Settings"));
    this.errorBox.hidden = false;
  }

  #regenerate() {
    if (!this.running && this.baseText !== null) this.#generate(true);
  }

  #undo() {
    if (this.running || this.baseText === null) return;
    this.#setText(this.baseText, this.baseSpans);
    this.#clearVersions();
    this.area.focus();
  }

  #step(by) {
    this.versionIndex += by;
    const version = this.versions[this.versionIndex];
    this.#setText(version.text, version.spans);
    this.stats.textContent = version.summary;
    this.#updateButtons();
    find(`button:${by < 0 ? "first" : "last"}-child:not(:disabled)`, this.branches)?.focus();
  }

  /** Drops the stored versions: the next completion starts from the current text. */
  #clearVersions() {
    this.baseText = null;
    this.versions = [];
    this.versionIndex = -1;
    this.stats.textContent = "";
    this.#updateButtons();
  }

  #updateButtons() {
    this.submitButton.textContent = this.running ? "Stop" : "Continue";
    this.submitButton.classList.toggle("main", !this.running);
    this.regenerateButton.disabled = this.undoButton.disabled = Boolean(this.running) || this.baseText === null;
    const several = this.versions.length > 1 && !this.running;
    const arrow = (by, text, label) =>
      createElement("button", { class: "quiet", type: "button", "aria-label": label, disabled: !this.versions[this.versionIndex + by], onclick: () => this.#step(by) }, text);
    this.branches.replaceChildren(...(several ? [
      arrow(-1, "‹", "Previous version"), createElement("span", { class: "note" }, `${this.versionIndex + 1} / ${this.versions.length}`), arrow(1, "›", "Next version"),
    ] : []));
  }

  /** Handles an edit by the user. */
  #onInput() {
    const { value } = this.area;
    if (value === this.text) return;
    let same = 0;
    while (same < value.length && value[same] === this.text[same]) same += 1;
    this.#setText(value, this.spans.filter((mark) => mark.end <= same));
    this.#clearVersions();
    writeStorage("sessionStorage", STORAGE_KEY, value);
  }

  /** Shows `text` with `spans` (ordered, inside the text); the rest of the overlay is plain text. */
  #setText(text, spans) {
    const nodes = [];
    let end = 0;
    for (const mark of spans) {
      if (mark.start > end) nodes.push(text.slice(end, mark.start));
      nodes.push(mark.node);
      end = mark.end;
    }
    this.overlay.replaceChildren(...nodes, text.slice(end));
    this.text = text;
    this.spans = [...spans];
    if (this.area.value !== text) this.area.value = text;
  }

  #append(pieces) {
    if (!pieces.length) return;
    for (const piece of pieces) {
      const node = spanOf(piece);
      const start = this.text.length;
      this.text += piece.text;
      this.overlay.append(node);
      if (piece.tokens.length) this.spans.push({ start, end: this.text.length, node });
    }
    const { selectionStart, selectionEnd } = this.area;
    const atEnd = selectionEnd === this.area.value.length;
    this.area.value = this.text;
    if (!atEnd) this.area.setSelectionRange(selectionStart, selectionEnd);
  }

  /** Shows probabilities at the pointer, and at the caret while the colors are on (keyboard and touch). */
  #hover() {
    const { area, page } = this;
    let hovered = null;
    const hover = (span) => {
      if (hovered === span) return;
      hovered?.classList.remove("at");
      span?.classList.add("at");
      hovered = span;
      if (span) showTokenTip(page.tooltip, span);
      else page.tooltip.hide();
    };
    area.addEventListener("pointermove", (event) => {
      const target = document.elementsFromPoint(event.clientX, event.clientY).find((node) => node.matches(".overlay .t"));
      if (event.pointerType === "mouse") hover(target ?? null);
    });
    area.addEventListener("pointerleave", () => hover(null));
    area.addEventListener("blur", () => hover(null));
    document.addEventListener("selectionchange", () => {
      if (document.activeElement !== area || this.running || !document.body.classList.contains("tinted")) return;
      const caret = area.selectionStart;
      const mark = this.spans.find((each) => each.start <= caret && caret < each.end) ?? this.spans.findLast((each) => each.end === caret);
      hover(area.selectionEnd === caret && mark ? mark.node : null);
    });
  }
}
