// Settings: sampling parameters, model, appearance. They are stored in this browser (localStorage), the API key only until the
// tab is closed (sessionStorage). Without storage they last until the page is reloaded.
//
// An empty field is not sent, so the server's default applies. An invalid value is not sent either, and a message below the
// field shows the valid range.

import { createElement, find } from "./dom.js";

const STORAGE_KEY = "whorl.settings", API_KEY_STORAGE = "whorl.key";
const INTEGER = new Set(["max_tokens", "top_k", "seed"]);
const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"];
const MAX_STOPS = 16; // limit of the API
const ESCAPES = { n: "\n", t: "\t", r: "\r", "\\": "\\" };

/** Reads a value from a storage; null if it is missing or not readable. */
export function readStorage(storage, name) {
  try {
    return JSON.parse(window[storage].getItem(name));
  } catch {
    return null;
  }
}

/** Writes a value to a storage; failures are ignored. */
export function writeStorage(storage, name, value) {
  try {
    window[storage].setItem(name, JSON.stringify(value));
  } catch {
    // The storage is full or forbidden; the page works without it.
  }
}

/** Stop strings, one per line; a backslash escapes characters that a line cannot contain (\n, \t, \\). */
export const parseStops = (text) =>
  text.split("\n").filter((line) => line !== "").map((line) => line.replace(/\\([ntr\\])/g, (_, letter) => ESCAPES[letter]));

export class Settings extends EventTarget {
  constructor(dialog) {
    super();
    this.dialog = dialog;
    this.form = find("form", dialog);
    this.opener = null;
    this.saved = readStorage("localStorage", STORAGE_KEY);
    if (typeof this.saved !== "object" || this.saved === null) this.saved = {};
    for (const field of this.#fields()) {
      const value = field.name === "key" ? readStorage("sessionStorage", API_KEY_STORAGE) : this.saved[field.name];
      if (field.type === "checkbox") field.checked = value ?? field.checked;
      else if (typeof value === "string") field.value = value;
    }
    this.form.addEventListener("input", (event) => this.#changed(event.target));
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.elements.key.addEventListener("change", () => this.dispatchEvent(new Event("key"))); // once, not for each keystroke
    find(".reset", dialog).addEventListener("click", () => this.#reset());
    find(".close", dialog).addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => {
      this.opener?.setAttribute("aria-expanded", "false");
      this.opener?.focus();
    });
    this.#fields().forEach((field) => this.#validate(field));
  }

  /** Opens or closes the panel; next to the page on wide screens, over it on phones. */
  toggle(opener) {
    this.opener = opener;
    if (this.dialog.open) return this.dialog.close();
    if (matchMedia("(max-width: 900px)").matches) this.dialog.showModal();
    else this.dialog.show();
    opener.setAttribute("aria-expanded", "true");
    return undefined;
  }

  get key() {
    return this.form.elements.key.value.trim();
  }

  get stopRepeats() {
    return this.form.elements.repeats.checked;
  }

  get system() {
    return this.form.elements.system.value;
  }

  /** Returns fields of a request body. kind: "chat" or "complete". Returns null and opens the panel if a field is invalid. */
  body(kind, opener) {
    const invalid = this.#fields().find((field) => !this.#validate(field));
    if (invalid) {
      if (!this.dialog.open) this.toggle(opener);
      invalid.focus();
      return null;
    }
    const { elements } = this.form;
    const body = {};
    for (const name of NUMBERS) if (elements[name].value !== "") body[name] = Number(elements[name].value);
    const stop = parseStops(elements.stop.value);
    if (stop.length) body.stop = stop;
    if (elements.probabilities.checked) Object.assign(body, kind === "chat" ? { logprobs: true, top_logprobs: 5 } : { logprobs: 5 });
    return body;
  }

  /** A setting without a field in the form (model, mode per model, colors). */
  read(name) {
    return this.saved[name];
  }

  write(name, value) {
    this.saved[name] = value;
    writeStorage("localStorage", STORAGE_KEY, this.saved);
  }

  #fields() {
    return [...this.form.elements].filter((field) => field.name);
  }

  #changed(field) {
    if (!this.#validate(field)) return;
    if (field.name === "key") writeStorage("sessionStorage", API_KEY_STORAGE, field.value);
    else this.write(field.name, field.type === "checkbox" ? field.checked : field.value);
  }

  /** Returns whether the field is valid; shows a message below it if not. */
  #validate(field) {
    let message = "";
    if (NUMBERS.includes(field.name) && !field.validity.valid) {
      const type = INTEGER.has(field.name) ? "an integer" : "a number";
      message = `Enter ${type} ${field.max ? `from ${field.min} to ${field.max}` : `of at least ${field.min}`}, or leave the field empty.`;
    }
    if (field.name === "stop" && parseStops(field.value).length > MAX_STOPS) message = `Enter at most ${MAX_STOPS} stop strings.`;
    const id = `${field.id}-error`;
    find(`#${id}`, this.form)?.remove();
    field.toggleAttribute("aria-invalid", Boolean(message));
    if (message) {
      field.setAttribute("aria-invalid", "true");
      field.setAttribute("aria-describedby", id);
      field.after(createElement("p", { id, class: "field-error", role: "alert" }, message));
    } else field.removeAttribute("aria-describedby");
    return !message;
  }

  #reset() {
    const key = this.key;
    this.form.reset();
    this.form.elements.key.value = key;
    this.#fields().forEach((field) => this.#changed(field));
  }
}
