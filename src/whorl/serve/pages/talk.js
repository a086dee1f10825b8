// The conversation: messages with their branches, one composer, one answer being written at a time.
//
// Every message can be edited, which begins a branch; an answer can be asked for again, which begins one too. A message's
// element is made once and kept as long as its node lives: to change the branch is to put other elements in place.

import { find, make } from "./dom.js";
import { Generation } from "./generation.js";
import { keep, recall } from "./settings.js";
import { append, listen } from "./tokenview.js";
import { Tree } from "./tree.js";

const KEPT = "whorl.talk";
const NEAR = 60; // px from the end within which the view follows what is written

export class Talk {
  /** page: what the page offers its panes (see chat.js): settings, model, announcer, tip, opener, busy(). */
  constructor(section, page) {
    this.page = page;
    this.scroller = find(".scroller", section);
    this.list = find(".messages", section);
    this.empty = find(".empty", section);
    this.composer = find(".composer", section);
    this.input = find("textarea", this.composer);
    this.send = find(".send", this.composer);
    this.tree = Tree.unpack(recall("sessionStorage", KEPT));
    this.elements = new Map(); // node -> its <li>
    this.running = null; // {node, generation, done}
    listen(this.list, page.tip);
    this.composer.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.stop();
      else this.#submit();
    });
    this.input.addEventListener("input", () => this.#ready());
    this.#show();
    this.#ready();
  }

  /** Ctrl + Enter, wherever the focus is in this pane. */
  submit() {
    const editor = document.activeElement?.closest?.("form.editor");
    if (editor) editor.requestSubmit();
    else if (!this.running) this.#submit();
  }

  /** Ends the answer being written; what stands, stands. */
  stop() {
    this.running?.generation.stop();
  }

  async clear() {
    await this.#settle();
    this.tree = new Tree();
    this.elements.clear();
    this.#show();
    this.input.focus();
  }

  #submit() {
    if (!this.input.value.trim()) return;
    const node = this.tree.leaf();
    const text = this.input.value;
    if (!this.#answer(() => this.tree.add(node, "user", text))) return;
    this.input.value = "";
  }

  async #settle() {
    const { running } = this;
    this.stop();
    await running?.done;
  }

  #ready() {
    this.send.textContent = this.running ? "Stop" : "Send";
    this.send.classList.toggle("main", !this.running);
    this.send.disabled = !this.running && !this.input.value.trim();
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, innerHeight * 0.35)}px`;
  }

  /** Has the model answer what `ask` returns, a node. False where a setting forbids it. */
  #answer(ask) {
    const { page } = this;
    const body = page.settings.body("chat", page.opener);
    if (!body || !page.ready()) return false;
    const asked = ask();
    const messages = this.tree.messages(asked);
    if (page.settings.system.trim()) messages.unshift({ role: "system", content: page.settings.system });
    const node = this.tree.add(asked, "assistant", "");
    node.model = page.model;
    this.#show();
    const element = this.elements.get(node);
    const text = find(".text", element);
    const generation = new Generation((pieces) => {
      const follow = this.#atEnd();
      append(text, pieces);
      node.text = generation.written.text;
      page.announcer.push(pieces.map((piece) => piece.text).join(""));
      find(".stats", element).textContent = generation.words();
      if (follow) this.#toEnd();
    });
    element.classList.add("writing");
    this.#toEnd();
    const done = generation.run("chat", { model: page.model, messages, ...body }, page.settings.key).then(() => {
      this.running = null;
      element.classList.remove("writing");
      node.error = generation.error;
      page.announcer.end(node.error ? "" : generation.finish === "stopped" ? "Stopped." : "End of the answer.");
      page.busy(false);
      this.#show();
      this.#ready();
      // Its button is disabled now and lost the focus. On a phone that would bring up the keyboard over the answer.
      if (!this.#focused() && !matchMedia("(pointer: coarse)").matches) this.input.focus({ preventScroll: true });
    });
    this.running = { node, generation, done };
    page.busy(true);
    this.#ready();
    return true;
  }

  #focused() {
    return document.activeElement && document.activeElement !== document.body;
  }

  #atEnd() {
    const { scroller } = this;
    return scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR;
  }

  #toEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  #show() {
    const path = this.tree.path();
    this.empty.hidden = path.length > 0;
    const elements = path.map((node) => {
      if (!this.elements.has(node)) this.elements.set(node, this.#element(node));
      this.#update(node);
      return this.elements.get(node);
    });
    const { activeElement } = document;
    const same = elements.length === this.list.children.length && elements.every((element, i) => element === this.list.children[i]);
    if (!same) this.list.replaceChildren(...elements);
    if (activeElement?.isConnected) activeElement.focus({ preventScroll: true }); // it lost it where its place changed
    keep("sessionStorage", KEPT, this.tree.pack());
  }

  #element(node) {
    const user = node.role === "user";
    const text = make("div", { class: "text", dataset: user ? {} : { tokens: "" } });
    text.append(node.text);
    if (!user) Object.entries({ role: "group", "aria-label": "Answer; the arrow keys go from token to token" }).forEach(([key, value]) => text.setAttribute(key, value));
    return make("li", { class: `message ${user ? "user" : "model"}` },
      make("h2", { class: "who" }, user ? "You" : node.model ?? "Model"),
      text,
      make("div", { class: "trouble", role: "alert", hidden: true }),
      make("div", { class: "tools" },
        make("span", { class: "branches" }),
        make("button", { class: "quiet edit", type: "button", onclick: () => this.#edit(node) }, "Edit"),
        user ? "" : make("button", { class: "quiet again", type: "button", onclick: () => this.#again(node) }, "Regenerate"),
        make("button", { class: "quiet copy", type: "button", onclick: (event) => this.#copy(node, event.target) }, "Copy"),
        user ? "" : make("span", { class: "stats note" })));
  }

  #update(node) {
    const element = this.elements.get(node);
    const trouble = find(".trouble", element);
    trouble.hidden = !node.error;
    if (node.error && !trouble.childNodes.length) {
      const retry = make("button", { type: "button", onclick: () => this.#again(node) }, "Try again");
      trouble.append(make("span", {}, node.error.message), retry);
      if (node.error.kind === "key") trouble.append(make("button", { type: "button", onclick: () => this.page.askKey() }, "Settings"));
    }
    const siblings = node.parent.children;
    const at = siblings.indexOf(node);
    const arrow = (by, words, label) =>
      make("button", { class: "quiet", type: "button", "aria-label": label, disabled: !siblings[at + by], onclick: () => this.#step(node, by) }, words);
    find(".branches", element).replaceChildren(...(siblings.length < 2 ? [] : [
      arrow(-1, "‹", "Earlier version"),
      make("span", { class: "note" }, `${at + 1} / ${siblings.length}`),
      arrow(1, "›", "Later version"),
    ]));
  }

  async #step(node, by) {
    await this.#settle();
    this.tree.step(node, by);
    this.#show();
    const shown = node.parent.children[node.parent.chosen];
    const [before, after] = this.elements.get(shown).querySelectorAll(".branches button");
    const arrow = by < 0 ? before : after;
    (arrow.disabled ? (by < 0 ? after : before) : arrow).focus(); // the way back, at the end of the row
  }

  async #again(node) {
    await this.#settle();
    const failed = node.error && !node.text;
    this.#answer(() => {
      if (failed) this.tree.remove(node);
      return node.parent;
    });
  }

  async #edit(node) {
    if (this.running?.node === node) await this.#settle();
    const element = this.elements.get(node);
    if (find("form.editor", element)) return;
    const text = find(".text", element), tools = find(".tools", element);
    const user = node.role === "user";
    const area = make("textarea", { "aria-label": user ? "Edit your message" : "Edit the answer", rows: Math.min(14, 1 + node.text.split("\n").length) });
    area.value = node.text;
    const close = () => {
      editor.remove();
      text.hidden = tools.hidden = false;
    };
    const editor = make("form", {
      class: "editor",
      onsubmit: async (event) => {
        event.preventDefault();
        if (!area.value.trim()) return;
        await this.#settle();
        const rewrite = () => this.tree.add(node.parent, node.role, area.value);
        if (user && !this.#answer(rewrite)) return;
        close();
        if (user) return;
        const written = rewrite();
        written.model = node.model;
        this.#show();
        find(".edit", this.elements.get(written)).focus();
      },
      onkeydown: (event) => {
        if (event.key !== "Escape" || this.running) return;
        event.stopPropagation();
        close();
        find(".edit", element).focus();
      },
    }, area, make("div", { class: "tools" },
      make("button", { class: "main", type: "submit" }, user ? "Send" : "Save"),
      make("button", { type: "button", onclick: () => { close(); find(".edit", element).focus(); } }, "Cancel")));
    text.hidden = tools.hidden = true;
    text.after(editor);
    area.focus();
  }

  async #copy(node, button) {
    try {
      await navigator.clipboard.writeText(node.text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed here"; // browsers give the clipboard to https and localhost alone
    }
    button.addEventListener("blur", () => { button.textContent = "Copy"; }, { once: true });
  }
}
