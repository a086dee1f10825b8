// The settings: what is asked of the sampler, which model, how the page looks. They are kept in this browser (localStorage);
// the API key only until the tab is closed (sessionStorage). A browser that refuses storage still has settings, until reload.
//
// A field that is left empty is not sent: the server's own default holds. A value out of range is never sent either; the
// field says in words what it expects.

import { find, make } from "./dom.js";

const KEPT = "whorl.settings", KEY = "whorl.key";
const INTEGER = new Set(["max_tokens", "top_k", "seed"]);
const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"];
const MOST_STOPS = 16; // what the API takes
const ESCAPES = { n: "\n", t: "\t", r: "\r", "\\": "\\" };

/** What a storage holds under a name; null where it holds nothing or may not be read. */
export function recall(storage, name) {
  try {
    return JSON.parse(window[storage].getItem(name));
  } catch {
    return null;
  }
}

/** Puts it there; says nothing where that is refused. */
export function keep(storage, name, value) {
  try {
    window[storage].setItem(name, JSON.stringify(value));
  } catch {
    // Full, or forbidden: the page works on without.
  }
}

/** Stop texts, one a line; a backslash writes what a line cannot hold (\n, \t, \\). */
export const stops = (text) =>
  text.split("\n").filter((line) => line !== "").map((line) => line.replace(/\\([ntr\\])/g, (_, letter) => ESCAPES[letter]));

export class Settings extends EventTarget {
  constructor(dialog) {
    super();
    this.dialog = dialog;
    this.form = find("form", dialog);
    this.opener = null;
    this.kept = recall("localStorage", KEPT);
    if (typeof this.kept !== "object" || this.kept === null) this.kept = {};
    for (const field of this.#fields()) {
      const value = field.name === "key" ? recall("sessionStorage", KEY) : this.kept[field.name];
      if (field.type === "checkbox") field.checked = value ?? field.checked;
      else if (typeof value === "string") field.value = value;
    }
    this.form.addEventListener("input", (event) => this.#changed(event.target));
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.elements.key.addEventListener("change", () => this.dispatchEvent(new Event("key"))); // whole, not letter by letter
    find(".reset", dialog).addEventListener("click", () => this.#reset());
    find(".close", dialog).addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => {
      this.opener?.setAttribute("aria-expanded", "false");
      this.opener?.focus();
    });
    this.#fields().forEach((field) => this.#check(field));
  }

  /** Opens or closes the panel; beside the page where there is room, over it on a phone. */
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

  get system() {
    return this.form.elements.system.value;
  }

  /** Fields of a request's body. kind: "chat" or "complete". Null where a field is wrong: the panel then stands open there. */
  body(kind, opener) {
    const wrong = this.#fields().find((field) => !this.#check(field));
    if (wrong) {
      if (!this.dialog.open) this.toggle(opener);
      wrong.focus();
      return null;
    }
    const { elements } = this.form;
    const body = {};
    for (const name of NUMBERS) if (elements[name].value !== "") body[name] = Number(elements[name].value);
    const stop = stops(elements.stop.value);
    if (stop.length) body.stop = stop;
    if (elements.probabilities.checked) Object.assign(body, kind === "chat" ? { logprobs: true, top_logprobs: 5 } : { logprobs: 5 });
    return body;
  }

  /** A choice that has no field in the form (model, mode of each model, colours). */
  recall(name) {
    return this.kept[name];
  }

  keep(name, value) {
    this.kept[name] = value;
    keep("localStorage", KEPT, this.kept);
  }

  #fields() {
    return [...this.form.elements].filter((field) => field.name);
  }

  #changed(field) {
    if (!this.#check(field)) return;
    if (field.name === "key") keep("sessionStorage", KEY, field.value);
    else this.keep(field.name, field.type === "checkbox" ? field.checked : field.value);
  }

  /** Whether the field may be sent; says below it what is wrong. */
  #check(field) {
    let trouble = "";
    if (NUMBERS.includes(field.name) && !field.validity.valid) {
      const what = INTEGER.has(field.name) ? "a whole number" : "a number";
      trouble = field.max ? `${what} from ${field.min} to ${field.max}, or empty` : `${what}, ${field.min} or more, or empty`;
    }
    if (field.name === "stop" && stops(field.value).length > MOST_STOPS) trouble = `${MOST_STOPS} texts at most`;
    const id = `${field.id}-trouble`;
    find(`#${id}`, this.form)?.remove();
    field.toggleAttribute("aria-invalid", Boolean(trouble));
    if (trouble) {
      field.setAttribute("aria-invalid", "true");
      field.setAttribute("aria-describedby", id);
      field.after(make("p", { id, class: "wrong", role: "alert" }, `Expected: ${trouble}.`));
    } else field.removeAttribute("aria-describedby");
    return !trouble;
  }

  #reset() {
    const key = this.key;
    this.form.reset();
    this.form.elements.key.value = key;
    this.#fields().forEach((field) => this.#changed(field));
  }
}
