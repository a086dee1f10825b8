// The feed: the newest kept answers, with the counts of all and the click of this browser.
//
// Counts are those of the view, which follows the log within seconds; an own click changes the shown count at once.

import { createElement, find } from "./dom.js";
import { ClickQueue, read, thumbs } from "./feedback.js";
import { writeStorage } from "./settings.js";

const PAGE = 20;
const queue = new ClickQueue();
const list = find("#answers"), more = find("#more"), errorBox = find("#error");
let older = null; // `before` of the answers that follow

function card(answer) {
  const counts = { like: answer.likes, dislike: answer.dislikes };
  const shown = createElement("span", { class: "counts" });
  const draw = () => {
    shown.textContent = `${counts.like.toLocaleString("en")} up, ${counts.dislike.toLocaleString("en")} down`;
  };
  const given = { token: answer.token, choice: 0, kind: answer.mine };
  const buttons = thumbs(queue, given, (kind, before) => {
    if (before in counts) counts[before] -= 1;
    if (kind in counts) counts[kind] += 1;
    draw();
  });
  draw();
  return createElement("li", { class: "card" },
    createElement("p", { class: "prompt" }, answer.prompt),
    createElement("div", { class: "text" }, answer.text),
    createElement("div", { class: "tools" }, buttons, shown),
    createElement("p", { class: "note" }, `${answer.model}, ${new Date(answer.time * 1000).toLocaleString()}`));
}

async function load(before = null) {
  errorBox.hidden = true;
  try {
    const { answers, next } = await read(`v1/feed?limit=${PAGE}${before === null ? "" : `&before=${before}`}`);
    if (before === null) list.replaceChildren();
    list.append(...answers.map(card));
    older = next;
    more.hidden = next === null;
    find("#empty").hidden = list.children.length > 0;
  } catch (error) {
    find(".message", errorBox).textContent = error.message;
    find("#key-form").hidden = error.kind !== "key";
    errorBox.hidden = false;
    find(".retry", errorBox).onclick = () => load(before);
  }
}

find("#newest").addEventListener("click", () => load());
more.addEventListener("click", () => load(older));
find("#key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  writeStorage("sessionStorage", "whorl.key", find("#key").value.trim());
  find("#key-form").hidden = true;
  load();
});
load();
