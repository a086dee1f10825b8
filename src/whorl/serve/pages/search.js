// Search: one request for each query. Its state is the part of the address behind "#", so a result can be linked.

import { post } from "./client.js";
import { createElement, find, table } from "./dom.js";
import { storedKey } from "./feedback.js";
import { writeStorage } from "./settings.js";

const form = find("#search"), query = find("#query"), facet = find("#facet"), explain = find("#explain");
const errorBox = find("#error"), keyForm = find("#key-form");
let latest = 0; // number of the newest request

const state = () => new URLSearchParams(location.hash.slice(1));

function change(edit) {
  const next = state();
  edit(next);
  location.hash = next;
}

/** The text of a passage, with its matches in <mark>. Places count characters of Python: code points. */
function marked(text, marks) {
  const characters = [...text], parts = [];
  let at = 0;
  for (const [begin, end] of marks) {
    if (begin < at) continue;
    parts.push(characters.slice(at, begin).join(""), createElement("mark", {}, characters.slice(begin, end).join("")));
    at = end;
  }
  return [...parts, characters.slice(at).join("")];
}

const number = (value) => value.toLocaleString("en", { maximumSignificantDigits: 4 });

function card(hit) {
  const fields = Object.entries(hit.fields).map(([name, value]) => `${name}: ${value}`).join(", ");
  const parts = Object.entries(hit.explanation).sort((a, b) => b[1] - a[1]).map(([name, value]) => [name, number(value)]);
  return createElement("li", { class: "card" },
    createElement("p", { class: "prompt" }, hit.title && hit.title !== hit.id ? `${hit.title} (${hit.fields.path ?? hit.id})` : hit.id),
    createElement("div", { class: "text" }, ...marked(hit.text, hit.marks)),
    createElement("p", { class: "note" }, fields),
    ...(parts.length ? [table([...parts, ["score", number(hit.score)]])] : []));
}

function filterButton(text, edit) {
  return createElement("button", { type: "button", onclick: () => change(edit) }, text);
}

function show(found) {
  const shown = state(), chosen = shown.getAll("filter");
  facet.replaceChildren(createElement("option", { value: "" }, "no field"),
    ...found.fields.map((name) => createElement("option", { value: name, selected: shown.get("facet") === name }, name)));
  find("#filters").replaceChildren(...chosen.map((filter) => filterButton(`${filter} \u00d7`, (next) => next.delete("filter", filter))));
  find("#steps").replaceChildren(table(found.steps.map(({ step, result }) => [step, result.join(" ")])));
  find("#facets").replaceChildren(...Object.entries(found.facets).flatMap(([name, counts]) => Object.entries(counts).map(
    ([value, count]) => filterButton(`${value} (${count.toLocaleString("en")})`, (next) => next.append("filter", `${name}=${value}`)))));
  find("#total").textContent = `${found.total.toLocaleString("en")} documents in ${found.index}`;
  find("#answers").replaceChildren(...found.hits.map(card));
}

async function load() {
  const mine = ++latest, shown = state();
  query.value = shown.get("q") ?? "";
  explain.checked = shown.get("explain") === "true";
  try {
    const found = await post("v1/search", {
      query: query.value, filters: shown.getAll("filter"), facets: shown.getAll("facet"), explain: explain.checked,
    }, { key: storedKey() });
    if (mine !== latest) return;
    errorBox.hidden = keyForm.hidden = true;
    show(found);
  } catch (error) {
    if (mine !== latest) return;
    find(".message", errorBox).textContent = error.message;
    errorBox.hidden = false;
    keyForm.hidden = error.kind !== "key";
  }
}

function submit(event) {
  event?.preventDefault();
  change((next) => {
    for (const [name, value] of [["q", query.value], ["facet", facet.value], ["explain", explain.checked || ""]]) {
      if (value) next.set(name, value);
      else next.delete(name);
    }
  });
}

form.addEventListener("submit", submit);
facet.addEventListener("change", submit);
explain.addEventListener("change", submit);
addEventListener("hashchange", load);
keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  writeStorage("sessionStorage", "whorl.key", find("#key").value.trim());
  load();
});
load();
