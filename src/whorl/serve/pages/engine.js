// The engine page: polls the engine's state once per second and draws it.
//
// Polling instead of an event stream: each response is complete, it can carry an API key (an EventSource cannot), and a slow
// page skips states instead of queueing them. The next request is sent one second after the last response, so a server under
// load is polled less. A hidden tab does not poll.

import { CacheMap } from "./cachemap.js";
import { Timeline, formatTime, histogram, loadChart } from "./charts.js";
import { get } from "./client.js";
import { Tooltip, count, createElement, find, formatNumber, formatPercent, formatSeconds } from "./dom.js";
import { readStorage } from "./settings.js";
import { History, parseState, quantile } from "./state.js";

const POLL_MS = 1000, RETRY_MS = 3000;
const QUANTILES = [["50 % within", 0.5], ["90 % within", 0.9], ["95 % within", 0.95], ["99 % within", 0.99], ["Max", 1]];

const tooltip = new Tooltip();
const history = new History();
const timeline = new Timeline(find("#timeline"), tooltip);
const cacheMap = new CacheMap(find("#map"), tooltip);
const errorBox = find("#error"), live = find("#live"), pause = find("#pause");
let state = null, timer = 0, fetching = false, paused = false, message = "";

const setValue = (name, text) => {
  const node = find(`[data-value="${name}"]`);
  if (node.textContent !== text) node.textContent = text;
};
const cells = (...texts) => texts.map(([text, name]) => createElement("td", { class: name, title: name === "id" ? text : null }, text));

function show() {
  if (!state) return;
  const { pages, ttft, tpot } = state;
  find("#model").textContent = state.model ? `${state.model}${state.version ? ` · weights updated, version ${state.version}` : ""}` : "";
  setValue("speed", formatNumber(Math.round(state.tokensPerSecond)));
  setValue("running", formatNumber(state.running));
  setValue("queue", `${state.queue.toLocaleString("en")} waiting`);
  setValue("ttft", formatSeconds(quantile(ttft, 0.5)));
  setValue("ttft95", ttft.length ? `95 % within ${formatSeconds(quantile(ttft, 0.95))}` : "no data yet");
  setValue("tpot", formatSeconds(quantile(tpot, 0.5)));
  setValue("tpot95", tpot.length ? `95 % within ${formatSeconds(quantile(tpot, 0.95))}` : "no data yet");
  setValue("used", pages.total ? formatPercent(pages.used / pages.total) : "–");
  setValue("pages", pages.total ? `${pages.used.toLocaleString("en")} of ${count(pages.total, "page")}, ${pages.cached.toLocaleString("en")} cached` : "no pages");
  setValue("hits", Number.isNaN(state.hitRate) ? "–" : formatPercent(state.hitRate));
  if (!tooltip.shown) redraw(); // an open tooltip stays in place
  tables();
}

function redraw() {
  timeline.update(history.steps);
  cacheMap.update(state.map);
  find("#map-summary").textContent = cacheMap.summary();
  histogram(find("#ttft"), state.ttft, "Time to first token");
  histogram(find("#tpot"), state.tpot, "Time per token");
  loadChart(find("#load"), history.loads);
}

function tables() {
  const fill = (selector, list) => find(`${selector} tbody`).replaceChildren(...list.map((each) => createElement("tr", {}, ...cells(...each))));
  fill("#steps", history.steps.slice(-12).reverse().map((step) => [
    [formatTime(step.at)], [formatNumber(step.prefill), "n"], [formatNumber(step.decode), "n"], [formatNumber(step.sequences), "n"], [formatSeconds(step.seconds), "n"], [formatNumber(step.preempted), "n"],
  ]));
  const columns = [state.ttft, state.tpot];
  fill("#percentiles", [
    [["Samples"], ...columns.map((values) => [formatNumber(values.length), "n"])],
    ...QUANTILES.map(([name, q]) => [[name], ...columns.map((values) => [formatSeconds(quantile(values, q)), "n"])]),
  ]);
  fill("#sequences", state.sequences.slice(0, 200).map((each) => [
    [each.id, "id"], [each.state], [formatNumber(each.prompt), "n"], [formatNumber(each.output), "n"], [formatNumber(each.pages), "n"],
  ]));
  const more = state.sequences.length - 200;
  find("#none").hidden = state.sequences.length > 0 && more <= 0;
  find("#none").textContent = more > 0 ? `And ${more} more.` : "No sequences are running or waiting.";
}

async function poll() {
  clearTimeout(timer);
  if (fetching || paused || document.hidden) return;
  fetching = true;
  let wait = POLL_MS;
  try {
    state = parseState(await get("v1/engine/state", { key: readStorage("sessionStorage", "whorl.key") ?? "" }));
    history.add(state, Date.now());
    show();
    errorBox.hidden = true;
    document.body.classList.remove("stale");
  } catch (error) {
    wait = RETRY_MS;
    const link = error.kind === "key" ? [" ", createElement("a", { href: "./#key" }, "Enter a key on the chat page")] : [];
    if (message !== error.message) errorBox.replaceChildren(error.message, ...link); // else the link keeps its focus
    message = error.message;
    errorBox.hidden = false;
    document.body.classList.add("stale");
  }
  fetching = false;
  updateStatus();
  if (!paused && !document.hidden) timer = setTimeout(poll, wait);
}

function updateStatus() {
  const time = new Date().toLocaleTimeString("en-GB");
  live.textContent = paused ? "paused" : errorBox.hidden ? `live, ${time}` : "retrying";
}

pause.addEventListener("click", () => {
  paused = !paused;
  pause.setAttribute("aria-pressed", String(paused));
  pause.textContent = paused ? "Resume" : "Pause";
  updateStatus();
  poll();
});
document.addEventListener("visibilitychange", poll);
let frame = 0;
new ResizeObserver(() => {
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(() => state && redraw());
}).observe(find("#main"));
poll();
