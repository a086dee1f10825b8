// The arena page: starts battles, shows both answers without names, sends the vote, shows names and ratings.
//
// The server names the models only in its response to the vote, so the page cannot show them earlier. If no response to a
// vote arrives, it is sent again with the same choice: the server counts it once. All texts are inserted as text.

import { showRatings } from "./arena_ratings.js";
import { get, post } from "./client.js";
import { createElement, find } from "./dom.js";
import { readStorage, writeStorage } from "./settings.js";

const KEYS = { 1: "left", ArrowLeft: "left", 2: "right", ArrowRight: "right", 3: "tie", 4: "both bad" };
const SIDES = [["left", "A"], ["right", "B"]];
const errorBox = find("#error"), retry = find("#error .retry"), choices = find("#choices"), outcome = find("#outcome");
const next = find("#next"), composer = find("#composer"), prompt = find("#prompt"), draw = find("#composer .draw");

let about = null; // {models, votes, prompts, complete}
let battle = null; // {battle, turns} of the last response; voted: whether it has a vote
let busy = false, answering = false;

const key = () => readStorage("sessionStorage", "whorl.key") ?? "";

/** A random text that identifies this browser, so that the votes of one person count as correlated. */
function voter() {
  let found = readStorage("localStorage", "whorl.voter");
  if (!found) {
    found = Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
    writeStorage("localStorage", "whorl.voter", found);
  }
  return found;
}

const announce = (text) => find("#announcements").replaceChildren(createElement("p", {}, text));

/** Runs a request; an error is shown with a button that calls `again`. */
async function guard(work, again) {
  errorBox.hidden = true;
  try {
    await work();
  } catch (error) {
    find("#error .message").textContent = error.message;
    errorBox.hidden = false;
    find("#key-form").hidden = error.kind !== "key";
    retry.onclick = again;
  }
}

/** Runs the next step of a battle; one at a time. */
async function attempt(work) {
  if (busy) return;
  busy = true;
  update();
  await guard(work, () => attempt(work));
  busy = answering = false;
  update();
}

function update() {
  const open = battle !== null && !battle.voted;
  document.body.classList.toggle("busy", busy);
  find("#busy").hidden = !answering;
  choices.hidden = !open;
  for (const button of choices.querySelectorAll("button")) button.disabled = busy;
  next.hidden = !battle?.voted;
  next.disabled = busy;
  outcome.hidden = !battle?.voted;
  composer.hidden = battle?.voted || (open && Boolean(about?.complete));
  for (const button of composer.querySelectorAll("button")) button.disabled = busy || about === null;
  draw.hidden = open || !about?.prompts;
  prompt.placeholder = open ? "Continue with both models, or vote" : "Prompt for both models";
}

function turnNode(turn) {
  const answers = SIDES.map(([side, name]) =>
    createElement(
      "article", { class: `answer ${side}`, "aria-label": `Answer ${name}` },
      createElement("h3", {}, name),
      createElement("div", { class: "text" }, turn[side]),
      ...(turn[`${side}_cut`] ? [createElement("p", { class: "cut note" }, "Cut at the token limit.")] : []),
    ));
  return createElement("div", { class: "turn" }, createElement("p", { class: "prompt" }, turn.prompt), createElement("div", { class: "answers" }, ...answers));
}

function showBattle(found) {
  battle = found;
  find("#turns").className = "";
  find("#turns").replaceChildren(...found.turns.map(turnNode));
  outcome.replaceChildren();
  prompt.value = "";
  prompt.blur();
  announce("Both answers are complete.");
}

/** Starts a battle, or continues the open one. text: null draws a prompt. */
const send = (text) =>
  attempt(async () => {
    answering = true;
    update();
    if (battle && !battle.voted) showBattle(await post(`v1/arena/battles/${battle.battle}/turns`, { prompt: text }, { key: key() }));
    else showBattle(await post("v1/arena/battles", text === null ? {} : { prompt: text }, { key: key() }));
  });

const vote = (choice) =>
  attempt(async () => {
    const found = await post(`v1/arena/battles/${battle.battle}/vote`, { choice, voter: voter() }, { key: key() });
    battle.voted = true;
    find("#turns").className = `voted-${choice.replace(" ", "-")}`;
    showOutcome(found, choice);
    await loadAbout();
  });

function showOutcome(found, choice) {
  const parts = SIDES.map(([side, name]) => {
    const { model, before, after } = found[side];
    const change = Math.round(after) - Math.round(before);
    const moved = `${Math.round(before)} → ${Math.round(after)} (${change < 0 ? "−" : "+"}${Math.abs(change)})`;
    return createElement("div", { class: side }, `${name}: `, createElement("span", { class: "model" }, model), createElement("div", { class: change > 0 ? "up" : change < 0 ? "down" : "same" }, moved));
  });
  const name = find(`[data-choice="${choice}"] span`, choices).textContent;
  const repeated = found.counted ? "" : " It had arrived already and counts once.";
  parts.push(createElement("p", { class: "note" }, `Your vote: ${name}.${repeated}`));
  outcome.replaceChildren(...parts);
  announce(`A was ${found.left.model}, B was ${found.right.model}.`);
}

/** Ends a battle with a vote. With prompts to draw, the next one starts at once. */
function nextBattle() {
  battle = null;
  find("#turns").replaceChildren();
  update();
  if (about?.prompts) send(null);
  else prompt.focus();
}

async function loadAbout() {
  about = await get("v1/arena", { key: key() });
  find("#about").textContent = `${about.models} models, ${about.votes.toLocaleString("en")} vote${about.votes === 1 ? "" : "s"}`;
}

function showPane() {
  const ratings = location.hash === "#ratings";
  find("#vote-pane").hidden = ratings;
  find("#ratings-pane").hidden = !ratings;
  for (const link of document.querySelectorAll(".top nav a")) {
    if (link.hash === (ratings ? "#ratings" : "#vote")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (ratings) guard(async () => showRatings(await get("v1/arena/standings", { key: key() })), showPane);
}

composer.addEventListener("submit", async (event) => {
  event.preventDefault();
  await loaded; // Ctrl Enter may come before the page's figures
  if (prompt.value.trim()) send(prompt.value);
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) composer.requestSubmit();
});
draw.addEventListener("click", () => send(null));
next.addEventListener("click", nextBattle);
choices.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button && !button.disabled) vote(button.dataset.choice);
});
find("#key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  writeStorage("sessionStorage", "whorl.key", find("#key").value.trim());
  find("#key-form").hidden = true;
  if (retry.onclick) retry.onclick();
});
addEventListener("hashchange", showPane);
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || event.target.closest("input, textarea") || !find("#ratings-pane").hidden) return;
  if (event.key in KEYS && battle && !battle.voted && !busy) {
    event.preventDefault();
    vote(KEYS[event.key]);
  } else if (event.key.toLowerCase() === "n" && (battle ? battle.voted : about?.prompts) && !busy) {
    event.preventDefault(); // otherwise the letter appears in the prompt, which gets the focus
    nextBattle();
  }
});

update();
const loaded = attempt(loadAbout);
await loaded;
showPane();
