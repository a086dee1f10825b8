// The chat page: which model, which way to use it, and what the two panes share.
//
// A model that was trained on plain text alone has no idea of turns; the server says so of each model, and the page then
// opens on the sheet (Complete) rather than the conversation (Chat). The person's own choice, per model, is remembered.

import { models } from "./client.js";
import { Sheet } from "./complete.js";
import { Announcer, Tip, find, make } from "./dom.js";
import { Settings } from "./settings.js";
import { Talk } from "./talk.js";

const RETRY = 2000; // ms between tries to reach a server that does not answer

const settings = new Settings(find("#settings"));
const select = find("#model");
const radios = [...document.querySelectorAll("input[name=mode]")];
const trouble = find("#trouble");
const opener = find("#open");
let known = []; // [{id, chat}]

/** What the panes may ask of the page. */
const page = {
  settings,
  opener,
  tip: new Tip(),
  announcer: new Announcer(find("#said")),
  get model() {
    return select.value;
  },
  /** Whether there is a model to ask; says what is missing otherwise. */
  ready() {
    if (!known.length) load();
    return known.length > 0;
  },
  busy(is) {
    document.body.classList.toggle("busy", is);
    for (const control of [select, ...radios]) control.disabled = is || !known.length;
  },
  askKey() {
    if (!settings.dialog.open) settings.toggle(opener);
    find("#key").focus();
  },
};

const panes = { chat: new Talk(find("#talk"), page), complete: new Sheet(find("#complete"), page) };
const mode = () => radios.find((radio) => radio.checked).value;

function choose(which, focus = false) {
  for (const radio of radios) radio.checked = radio.value === which;
  find("#talk").hidden = which !== "chat";
  find("#complete").hidden = which !== "complete";
  page.tip.hide();
  if (focus && !matchMedia("(pointer: coarse)").matches) find(which === "chat" ? "#message" : "#text").focus();
}

/** The model's way, unless the person chose another for it. */
function settle(focus) {
  const model = known.find((each) => each.id === select.value);
  const chosen = settings.recall("modes")?.[select.value];
  choose(chosen ?? (model?.chat === false ? "complete" : "chat"), focus);
}

let again = 0; // the timer of the next try
let tries = 0; // an answer to an earlier try than the last is no longer wanted

async function load() {
  clearTimeout(again);
  const turn = ++tries;
  try {
    const found = await models({ key: settings.key });
    if (turn !== tries) return;
    known = found;
    if (!known.length) throw new Error("The server has no model.");
  } catch (error) {
    if (turn !== tries) return;
    const buttons = [make("button", { type: "button", onclick: load }, "Try again")];
    if (error.kind === "key") buttons.push(make("button", { type: "button", onclick: page.askKey }, "Settings"));
    trouble.replaceChildren(make("span", {}, error.message), ...buttons);
    trouble.hidden = false;
    if (error.kind === "offline") again = setTimeout(load, RETRY);
    return;
  }
  trouble.hidden = true;
  select.replaceChildren(...known.map((model) => make("option", { value: model.id }, model.id)));
  const before = settings.recall("model");
  if (known.some((model) => model.id === before)) select.value = before;
  page.busy(false);
  settle(document.activeElement === document.body);
}

select.addEventListener("change", () => {
  settings.keep("model", select.value);
  settle(false);
});
for (const radio of radios) {
  radio.addEventListener("change", () => {
    settings.keep("modes", { ...settings.recall("modes"), [select.value]: mode() });
    choose(mode());
  });
}
opener.addEventListener("click", () => settings.toggle(opener));
settings.addEventListener("key", () => known.length || load());
find("#fresh").addEventListener("click", () => panes[mode()].clear());

const tint = find("#tint");
const colour = () => {
  document.body.classList.toggle("tinted", tint.checked);
  find(".legend").hidden = !tint.checked;
};
tint.checked = settings.recall("tint") ?? false;
tint.addEventListener("change", () => {
  settings.keep("tint", tint.checked);
  colour();
});
find(".scale").append(...[0, 14, 28, 42, 56, 70].map((s) => {
  const step = make("i");
  step.style.setProperty("--s", s);
  return step;
}));
colour();

addEventListener("keydown", (event) => {
  if (event.isComposing) return; // these keys choose among characters
  if (event.key === "Escape") {
    page.tip.hide();
    if (!settings.dialog.matches(":modal")) panes[mode()].stop();
  } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    panes[mode()].submit();
  }
});

// A phone's keyboard covers the page's end in some browsers, and shrinks the page in others: the visible part is the measure.
const fit = () => {
  document.documentElement.style.setProperty("--height", `${visualViewport.height}px`);
  scrollTo(0, 0);
};
window.visualViewport?.addEventListener("resize", fit);

page.busy(true);
load();
