// The chat page: selection of model and mode, and the state that both panes share.
//
// The server reports whether a model has a chat template. For a base model without one, the page opens in Complete mode instead
// of Chat mode. The mode that the user selects is stored per model.

import { ChatPane } from "./chat_pane.js";
import { listModels } from "./client.js";
import { CompletionPane } from "./completion.js";
import { Announcer, Tooltip, createElement, find } from "./dom.js";
import { Settings, readStorage, writeStorage } from "./settings.js";

const RETRY_MS = 2000; // ms between attempts to reach the server

const settings = new Settings(find("#settings"));
const select = find("#model");
const radios = [...document.querySelectorAll("input[name=mode]")];
const errorBox = find("#error");
const keepSwitch = find("#keep");
const opener = find("#open");
let models = []; // [{id, chat}]

/** The interface of the page for its panes. */
const page = {
  settings,
  opener,
  tooltip: new Tooltip(),
  announcer: new Announcer(find("#announcements")),
  get model() {
    return select.value;
  },
  /** Whether the user lets the server keep this conversation. */
  get keeps() {
    return keepSwitch.checked && Boolean(current()?.log);
  },
  /** Share of the prompts that get two answers to choose from. */
  get compare() {
    return current()?.compare ?? 0;
  },
  /** The consent is for one conversation. */
  forgetConsent() {
    keepSwitch.checked = false;
    writeStorage("sessionStorage", "whorl.keep", false);
  },
  notify(message) {
    errorBox.replaceChildren(createElement("span", {}, message));
    errorBox.hidden = false;
  },
  /** Returns whether a model is available; otherwise loads the models again. */
  ready() {
    if (!models.length) load();
    return models.length > 0;
  },
  busy(busy) {
    document.body.classList.toggle("busy", busy);
    for (const control of [select, ...radios]) control.disabled = busy || !models.length;
  },
  askKey() {
    if (!settings.dialog.open) settings.toggle(opener);
    find("#key").focus();
  },
};

const current = () => models.find((model) => model.id === select.value);

const panes = { chat: new ChatPane(find("#chat-pane"), page), complete: new CompletionPane(find("#completion-pane"), page) };
const currentMode = () => radios.find((radio) => radio.checked).value;

function showPane(mode, focus = false) {
  for (const radio of radios) radio.checked = radio.value === mode;
  find("#chat-pane").hidden = mode !== "chat";
  find("#completion-pane").hidden = mode !== "complete";
  find(".keys .ctrl").hidden = mode === "chat"; // there Enter alone sends
  const untaught = current()?.chat === false;
  for (const node of document.querySelectorAll(".logged")) node.hidden = !current()?.log;
  find("#search-page").hidden = !current()?.search;
  find("#untaught").hidden = !untaught;
  find("#untaught").textContent = mode === "chat"
    ? "This model was not trained to chat. It continues the conversation as a text, and its answers will make little sense."
    : "This model was not trained to chat, so the page opens in Complete: write the beginning of a text.";
  page.tooltip.hide();
  if (focus && !matchMedia("(pointer: coarse)").matches) find(mode === "chat" ? "#message" : "#text").focus();
}

/** Shows the stored mode of the selected model, or its default mode. */
function selectModel(focus) {
  const chosen = settings.read("modes")?.[select.value];
  showPane(chosen ?? (current()?.chat === false ? "complete" : "chat"), focus);
}

let retryTimer = 0;
let attempts = 0; // responses to earlier attempts are ignored

async function load() {
  clearTimeout(retryTimer);
  const attempt = ++attempts;
  try {
    const found = await listModels({ key: settings.key });
    if (attempt !== attempts) return;
    models = found;
    if (!models.length) throw new Error("The server has no generation model.");
  } catch (error) {
    if (attempt !== attempts) return;
    const buttons = [createElement("button", { type: "button", onclick: load }, "Try again")];
    if (error.kind === "key") buttons.push(createElement("button", { type: "button", onclick: page.askKey }, "Settings"));
    errorBox.replaceChildren(createElement("span", {}, error.message), ...buttons);
    errorBox.hidden = false;
    if (error.kind === "offline") retryTimer = setTimeout(load, RETRY_MS);
    return;
  }
  errorBox.hidden = true;
  select.replaceChildren(...models.map((model) => createElement("option", { value: model.id }, model.id)));
  const previous = settings.read("model");
  if (models.some((model) => model.id === previous)) select.value = previous;
  page.busy(false);
  selectModel(document.activeElement === document.body);
}

select.addEventListener("change", () => {
  settings.write("model", select.value);
  selectModel(false);
});
for (const radio of radios) {
  radio.addEventListener("change", () => {
    settings.write("modes", { ...settings.read("modes"), [select.value]: currentMode() });
    showPane(currentMode());
  });
}
keepSwitch.checked = readStorage("sessionStorage", "whorl.keep") ?? false;
keepSwitch.addEventListener("change", () => writeStorage("sessionStorage", "whorl.keep", keepSwitch.checked));
opener.addEventListener("click", () => settings.toggle(opener));
settings.addEventListener("key", () => models.length || load());
find("#fresh").addEventListener("click", () => panes[currentMode()].clear());

const tintSwitch = find("#tint");
const applyTint = () => {
  document.body.classList.toggle("tinted", tintSwitch.checked);
  find(".legend").hidden = !tintSwitch.checked;
};
tintSwitch.checked = settings.read("tint") ?? false;
tintSwitch.addEventListener("change", () => {
  settings.write("tint", tintSwitch.checked);
  applyTint();
});
find(".scale").append(...[0, 14, 28, 42, 56, 70].map((s) => {
  const step = createElement("i");
  step.style.setProperty("--s", s);
  return step;
}));
applyTint();

addEventListener("keydown", (event) => {
  if (event.isComposing) return; // the keys belong to the input method
  if (event.key === "Escape") {
    page.tooltip.hide();
    if (!settings.dialog.matches(":modal")) panes[currentMode()].stop();
  } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    panes[currentMode()].submit();
  }
});

// The on-screen keyboard covers the page in some browsers and shrinks it in others, so the height is that of the visual viewport.
const resizeComposer = () => {
  document.documentElement.style.setProperty("--height", `${visualViewport.height}px`);
  scrollTo(0, 0);
};
window.visualViewport?.addEventListener("resize", resizeComposer);

page.busy(true);
load();
if (location.hash === "#key") page.askKey(); // a link of the engine page
