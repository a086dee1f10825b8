// Feedback on answers: thumbs that change at once, and a queue that keeps clicks while the server is away.
//
// A click has an id, which every attempt to send it repeats, so the server counts it once. It waits in localStorage under its
// own key until the server has taken or refused it; a refused one is reverted with a message. Answers are named by the token
// that came with them.

import { get, post } from "./client.js";
import { createElement, createSvg } from "./dom.js";
import { readStorage, writeStorage } from "./settings.js";

const PREFIX = "whorl.click.", ACTOR = "whorl.actor";
const THUMB = "M1.5 7.2h2.7v6.8H1.5zM6 13.2V7.4l2.9-5.6c1.2.1 1.8 1 1.5 2.2l-.6 2.6h3.4c.9 0 1.5.8 1.3 1.7l-1.2 4.6c-.2.7-.7 1.1-1.4 1.1H7.2z";
const RETRY_MS = [1000, 2000, 5000, 10000, 30000];
const AWAY = new Set(["offline", "busy", "failed", "broken"]); // kinds of errors that a later attempt may not have

/** A random text of 24 characters. */
export const randomId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

/** The random name of this browser, which the log has as the actor. */
export function actor() {
  const found = readStorage("localStorage", ACTOR) ?? randomId();
  writeStorage("localStorage", ACTOR, found);
  return found;
}

/** The API key of the chat page, which lives as long as the tab. */
export const storedKey = () => readStorage("sessionStorage", "whorl.key") ?? "";

/** GET with the actor and the key of this browser. */
export const read = (path) => get(path, { key: storedKey(), actor: actor() });

function storedNames() {
  try {
    return Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  } catch {
    return []; // forbidden
  }
}

/** Sends clicks in their order; announces the end of each with an event "taken" or "refused" ({click, message}). */
export class ClickQueue extends EventTarget {
  constructor() {
    super();
    this.clicks = new Map(); // id -> click; also where localStorage is forbidden
    this.attempts = 0;
    this.sending = false;
    this.timer = 0;
    for (const name of storedNames()) {
      const click = readStorage("localStorage", name);
      if (click?.id) this.clicks.set(click.id, click);
    }
    addEventListener("online", () => this.send());
    if (this.clicks.size) this.send();
  }

  /** Adds a click ({token, kind, ...}) and returns it with its id. */
  add(fields) {
    const click = { ...fields, id: randomId(), time: Date.now() / 1000, via: "page" };
    this.clicks.set(click.id, click);
    writeStorage("localStorage", PREFIX + click.id, click);
    this.send();
    return click;
  }

  /** Sends all clicks; again later if the server is away. */
  async send() {
    if (this.sending) return;
    this.sending = true;
    clearTimeout(this.timer);
    try {
      for (const click of [...this.clicks.values()].sort((a, b) => a.time - b.time)) {
        let message = "";
        try {
          await post("v1/feedback", click, { key: storedKey() });
        } catch (error) {
          if (AWAY.has(error.kind)) throw error;
          message = error.message;
        }
        this.attempts = 0;
        this.clicks.delete(click.id);
        try {
          localStorage.removeItem(PREFIX + click.id);
        } catch {
          // Forbidden: then it was never stored.
        }
        this.dispatchEvent(new CustomEvent(message ? "refused" : "taken", { detail: { click, message } }));
      }
      this.sending = false;
      if (this.clicks.size) this.send(); // added meanwhile
    } catch {
      this.sending = false;
      this.timer = setTimeout(() => this.send(), RETRY_MS[Math.min(this.attempts++, RETRY_MS.length - 1)]);
      this.dispatchEvent(new Event("waiting"));
    }
  }
}

/** Thumbs up and down for one answer.
 *
 *  given: {token, choice, kind}; `kind` is updated, so that the caller can keep it. changed(kind, before): after each change. */
export function thumbs(queue, given, changed = () => {}) {
  let taken = given.kind ?? "none", newest = null;
  const note = createElement("span", { class: "note", role: "status" });
  const button = (kind, turn, label) =>
    createElement("button", { class: `quiet thumb ${kind}`, type: "button", "aria-label": label, onclick: () => give(given.kind === kind ? "none" : kind) },
      createSvg("svg", { viewBox: "0 0 16 16", width: 18, height: 18, "aria-hidden": true }, createSvg("path", { d: THUMB, transform: turn })));
  const buttons = { like: button("like", null, "Good answer"), dislike: button("dislike", "rotate(180 8 8)", "Bad answer") };
  const show = (kind) => {
    const before = given.kind ?? "none";
    given.kind = kind;
    for (const [name, each] of Object.entries(buttons)) each.setAttribute("aria-pressed", name === kind);
    if (kind !== before) changed(kind, before);
  };
  const give = (kind) => {
    note.textContent = "";
    show(kind);
    newest = queue.add({ token: given.token, choice: given.choice ?? 0, kind });
  };
  queue.addEventListener("waiting", () => {
    if (newest) note.textContent = "Kept; sent when the server is back.";
  });
  queue.addEventListener("taken", ({ detail }) => {
    if (detail.click.token !== given.token || !(detail.click.kind in buttons || detail.click.kind === "none")) return;
    taken = detail.click.kind;
    if (detail.click.id === newest?.id) [newest, note.textContent] = [null, ""];
  });
  queue.addEventListener("refused", ({ detail }) => {
    if (detail.click.id !== newest?.id) return;
    newest = null;
    show(taken);
    note.textContent = `Not counted. ${detail.message}`;
  });
  show(taken);
  return createElement("span", { class: "thumbs" }, buttons.like, buttons.dislike, note);
}
