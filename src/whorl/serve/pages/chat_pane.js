// The chat pane: messages with branches, a composer, and at most one running generation.
//
// Editing a message or regenerating a response starts a branch. The element of a message is created once and reused as long as
// its node exists; switching the branch replaces the list of elements.

import { copyText, formatCode, linkSources } from "./code_blocks.js";
import { createElement, find } from "./dom.js";
import { ClickQueue, actor, thumbs } from "./feedback.js";
import { Generation } from "./generation.js";
import { PairVote } from "./pair_vote.js";
import { readStorage, writeStorage } from "./settings.js";
import { appendPieces, attachTokenTips } from "./tokenview.js";
import { MessageTree } from "./tree.js";

const STORAGE_KEY = "whorl.talk";
const FOLLOW_PX = 60; // px from the end within which the view follows the output

export class ChatPane {
  /** page: the interface of the page (see chat.js): settings, model, announcer, tooltip, opener, busy(). */
  constructor(section, page) {
    this.page = page;
    this.scroller = find(".scroller", section);
    this.list = find(".messages", section);
    this.empty = find(".empty", section);
    this.composer = find(".composer", section);
    this.input = find("textarea", this.composer);
    this.send = find(".send", this.composer);
    this.tree = MessageTree.unpack(readStorage("sessionStorage", STORAGE_KEY));
    this.elements = new Map(); // node -> its <li>
    this.running = null; // {node, generation, done}
    this.queue = new ClickQueue();
    this.queue.addEventListener("refused", ({ detail }) => {
      if (["edit", "better", "tie"].includes(detail.click.kind)) page.notify(`Not counted. ${detail.message}`);
    });
    attachTokenTips(this.list, page.tooltip);
    this.composer.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.stop();
      else this.#submit();
    });
    this.input.addEventListener("input", () => this.#updateButtons());
    section.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.isComposing || event.shiftKey || event.ctrlKey || event.metaKey) return;
      if (event.target.tagName !== "TEXTAREA" || matchMedia("(pointer: coarse)").matches) return; // a phone has a Send button
      if (event.target.getAttribute("aria-label") === "Edit the response") return; // long texts, saved by their button
      event.preventDefault();
      this.submit();
    });
    this.#render();
    this.#updateButtons();
  }

  /** Enter or Ctrl + Enter in this pane. */
  submit() {
    const editor = document.activeElement?.closest?.("form.editor");
    if (editor) editor.requestSubmit();
    else if (!this.running) this.#submit();
  }

  /** Stops the generation; its output is kept. */
  stop() {
    this.running?.generation.stop();
  }

  async clear() {
    await this.#stopRunning();
    this.tree = new MessageTree();
    this.page.forgetConsent();
    this.elements.clear();
    this.#render();
    this.input.focus();
  }

  #submit() {
    if (!this.input.value.trim()) return;
    const node = this.tree.leaf();
    const text = this.input.value;
    if (!this.#generate(() => this.tree.add(node, "user", text))) return;
    this.input.value = "";
  }

  async #stopRunning() {
    const { running } = this;
    this.stop();
    await running?.done;
  }

  #updateButtons() {
    this.send.textContent = this.running ? "Stop" : "Send";
    this.send.classList.toggle("main", !this.running);
    this.send.disabled = !this.running && !this.input.value.trim();
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, innerHeight * 0.35)}px`;
  }

  /** Generates a response to the node that `makeParent` returns. Returns false if a setting is invalid. */
  #generate(makeParent) {
    const { page } = this;
    const body = page.settings.body("chat", page.opener);
    if (!body || !page.ready()) return false;
    const parent = makeParent();
    const messages = this.tree.messages(parent);
    if (page.settings.system.trim()) messages.unshift({ role: "system", content: page.settings.system });
    if (page.keeps) Object.assign(body, { store: true, user: actor() });
    if (page.keeps && Math.random() < page.compare) return this.#compare(parent, { model: page.model, messages, ...body });
    const node = this.tree.add(parent, "assistant", "");
    node.model = page.model;
    this.#render();
    const element = this.elements.get(node);
    const text = find(".text", element);
    const generation = new Generation(page.settings.stopRepeats, (pieces) => {
      const follow = this.#atEnd();
      appendPieces(text, pieces);
      node.text = generation.tokenText.text;
      page.announcer.push(pieces.map((piece) => piece.text).join(""));
      find(".stats", element).textContent = generation.summary();
      if (follow) this.#scrollToEnd();
    });
    element.classList.add("writing");
    this.#scrollToEnd();
    const done = generation.run("chat", { model: page.model, messages, ...body }, page.settings.key).then(() => {
      this.running = null;
      element.classList.remove("writing");
      node.sources = generation.sources;
      this.#format(node, text, find(".sources", element));
      node.error = generation.error;
      if (generation.feedback) node.feedback = { token: generation.feedback.token, kind: "none" };
      page.announcer.end(node.error ? "" : generation.finish === "stopped" ? "Stopped." : "Response complete.");
      page.busy(false);
      this.#render();
      this.#updateButtons();
      // The disabled button lost the focus. On a phone the focus would open the keyboard over the response.
      if (!this.#focused() && !matchMedia("(pointer: coarse)").matches) this.input.focus({ preventScroll: true });
    });
    this.running = { node, generation, done };
    page.busy(true);
    this.#updateButtons();
    return true;
  }

  /** Generates two answers side by side; the tree gets both, and after the vote the chosen one is shown. */
  #compare(parent, body) {
    const { page } = this;
    const pair = new PairVote(body, page.settings.key, page.settings.stopRepeats, (append) => {
      const follow = this.#atEnd();
      append();
      if (follow) this.#scrollToEnd();
    });
    this.#render();
    this.empty.hidden = true;
    this.list.append(pair.element);
    this.#scrollToEnd();
    const done = pair.done.then(() => {
      this.running = null;
      const nodes = pair.generations.map((each) => Object.assign(this.tree.add(parent, "assistant", each.tokenText.text), {
        model: page.model, error: each.error, sources: each.sources, feedback: each.feedback && { token: each.feedback.token, kind: "none" },
      }));
      const choose = (chosen) => {
        this.elements.delete(nodes[0]);
        parent.activeChild = parent.children.indexOf(nodes[chosen]);
        this.#render();
      };
      choose(0);
      if (pair.complete) {
        this.elements.set(nodes[0], pair.element);
        this.#render();
        pair.vote(this.queue).then(choose);
      }
      page.announcer.end(pair.complete ? "Both responses are complete." : "");
      page.busy(false);
      this.#updateButtons();
      if (pair.complete) this.#scrollToEnd();
    });
    this.running = { node: null, generation: pair, done };
    page.busy(true);
    this.#updateButtons();
    return true;
  }

  #focused() {
    return document.activeElement && document.activeElement !== document.body;
  }

  #atEnd() {
    const { scroller } = this;
    return scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < FOLLOW_PX;
  }

  #scrollToEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  #render() {
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
    if (activeElement?.isConnected) activeElement.focus({ preventScroll: true }); // moved elements lose the focus
    this.#save();
  }

  #save() {
    writeStorage("sessionStorage", STORAGE_KEY, this.tree.pack());
  }

  #element(node) {
    const user = node.role === "user";
    const text = createElement("div", { class: "text", dataset: user ? {} : { tokens: "" } });
    const sources = createElement("div", { class: "sources" });
    text.append(node.text);
    if (!user) this.#format(node, text, sources);
    if (!user) Object.entries({ role: "group", "aria-label": "Response; use the arrow keys to move between tokens" }).forEach(([key, value]) => text.setAttribute(key, value));
    return createElement("li", { class: `message ${user ? "user" : "model"}` },
      createElement("h2", { class: "who" }, user ? "You" : node.model ?? "Model"),
      text,
      sources,
      createElement("div", { class: "error", role: "alert", hidden: true }),
      createElement("div", { class: "tools" },
        createElement("span", { class: "branches" }),
        createElement("button", { class: "quiet edit", type: "button", onclick: () => this.#edit(node) }, "Edit"),
        user ? "" : createElement("button", { class: "quiet regenerate", type: "button", onclick: () => this.#regenerate(node) }, "Regenerate"),
        createElement("button", { class: "quiet copy", type: "button", onclick: (event) => copyText(node.text, event.target) }, "Copy"),
        user ? "" : createElement("span", { class: "feedback" }),
        user ? "" : createElement("span", { class: "stats note" })));
  }

  #format(node, text, sources) {
    linkSources(text, sources, node.sources);
    formatCode(text);
  }

  #update(node) {
    const element = this.elements.get(node);
    if (element.classList.contains("compared")) return; // until the vote
    const feedback = find(".feedback", element);
    if (node.feedback && !feedback.childNodes.length) feedback.append(thumbs(this.queue, node.feedback, () => this.#save()));
    const error = find(".error", element);
    error.hidden = !node.error;
    if (node.error && !error.childNodes.length) {
      const retry = createElement("button", { type: "button", onclick: () => this.#regenerate(node) }, "Try again");
      error.append(createElement("span", {}, node.error.message), retry);
      if (node.error.kind === "key") error.append(createElement("button", { type: "button", onclick: () => this.page.askKey() }, "Settings"));
    }
    const siblings = node.parent.children;
    const at = siblings.indexOf(node);
    const arrow = (by, text, label) =>
      createElement("button", { class: "quiet", type: "button", "aria-label": label, disabled: !siblings[at + by], onclick: () => this.#step(node, by) }, text);
    find(".branches", element).replaceChildren(...(siblings.length < 2 ? [] : [
      arrow(-1, "‹", "Previous version"),
      createElement("span", { class: "note" }, `${at + 1} / ${siblings.length}`),
      arrow(1, "›", "Next version"),
    ]));
  }

  async #step(node, by) {
    await this.#stopRunning();
    this.tree.selectSibling(node, by);
    this.#render();
    const shown = node.parent.children[node.parent.activeChild];
    const [before, after] = this.elements.get(shown).querySelectorAll(".branches button");
    const arrow = by < 0 ? before : after;
    (arrow.disabled ? (by < 0 ? after : before) : arrow).focus(); // the other arrow at the end of the row
  }

  async #regenerate(node) {
    await this.#stopRunning();
    const failed = node.error && !node.text;
    this.#generate(() => {
      if (failed) this.tree.remove(node);
      return node.parent;
    });
  }

  async #edit(node) {
    if (this.running?.node === node) await this.#stopRunning();
    const element = this.elements.get(node);
    if (find("form.editor", element)) return;
    const text = find(".text", element), tools = find(".tools", element);
    const user = node.role === "user";
    const area = createElement("textarea", { "aria-label": user ? "Edit your message" : "Edit the response", rows: Math.min(14, 1 + node.text.split("\n").length) });
    area.value = node.text;
    const close = () => {
      editor.remove();
      text.hidden = tools.hidden = false;
    };
    const editor = createElement("form", {
      class: "editor",
      onsubmit: async (event) => {
        event.preventDefault();
        if (!area.value.trim()) return;
        await this.#stopRunning();
        const rewrite = () => this.tree.add(node.parent, node.role, area.value);
        if (user && !this.#generate(rewrite)) return;
        close();
        if (user) return;
        if (node.feedback && area.value !== node.text) this.queue.add({ token: node.feedback.token, kind: "edit", text: area.value });
        const edited = rewrite();
        edited.model = node.model;
        this.#render();
        find(".edit", this.elements.get(edited)).focus();
      },
      onkeydown: (event) => {
        if (event.key !== "Escape" || this.running) return;
        event.stopPropagation();
        close();
        find(".edit", element).focus();
      },
    }, area, createElement("div", { class: "tools" },
      createElement("button", { class: "main", type: "submit" }, user ? "Send" : node.feedback ? "Save and send" : "Save"),
      createElement("button", { type: "button", onclick: () => { close(); find(".edit", element).focus(); } }, "Cancel")));
    text.hidden = tools.hidden = true;
    text.after(editor);
    area.focus();
  }

}
