// The engine page: asks for the engine's state once a second, draws it, and rests while nobody looks.
//
// Polling rather than an event stream: each answer is whole, a key can be sent along (an EventSource cannot), and a slow page
// skips states instead of queueing them. The next question is asked a second after the last answer, so a server under load is
// asked less. A hidden tab asks nothing.

import { CacheMap } from "./cachemap.js";
import { get } from "./client.js";
import { count, figure, find, make, percent, seconds, Tip } from "./dom.js";
import { Timeline, clock, histogram, load } from "./drawings.js";
import { History, quantile, readState } from "./state.js";
import { recall } from "./settings.js";

const EVERY = 1000, AFTER_ERROR = 3000; // ms

const tip = new Tip();
const history = new History();
const timeline = new Timeline(find("#timeline"), tip);
const map = new CacheMap(find("#map"), tip);
const trouble = find("#trouble"), live = find("#live"), pause = find("#pause");
let state = null, timer = 0, asking = false, paused = false;

const value = (name, words) => {
  const node = find(`[data-value="${name}"]`);
  if (node.textContent !== words) node.textContent = words;
};
const cells = (...texts) => texts.map(([words, name]) => make("td", { class: name, title: name === "id" ? words : null }, words));

function show() {
  if (!state) return;
  const { pages, ttft, tpot } = state;
  find("#model").textContent = state.model ? `${state.model}${state.version === null ? "" : ` · weights of version ${state.version}`}` : "";
  value("speed", figure(Math.round(state.speed)));
  value("running", figure(state.running));
  value("queue", `${state.queue.toLocaleString("en")} waiting`);
  value("ttft", seconds(quantile(ttft, 0.5)));
  value("ttft95", ttft.length ? `95 % within ${seconds(quantile(ttft, 0.95))}` : "nothing measured yet");
  value("tpot", seconds(quantile(tpot, 0.5)));
  value("tpot95", tpot.length ? `95 % within ${seconds(quantile(tpot, 0.95))}` : "nothing measured yet");
  value("used", pages.total ? percent(pages.used / pages.total) : "–");
  value("pages", pages.total ? `${pages.used.toLocaleString("en")} of ${count(pages.total, "page")}, ${pages.cached.toLocaleString("en")} kept` : "no pages");
  value("hits", Number.isNaN(state.hitRate) ? "–" : percent(state.hitRate));
  if (!tip.shown) draw(); // what somebody is reading stays where it is
  tables();
}

function draw() {
  timeline.update(history.steps);
  map.update(state.map);
  find("#map-words").textContent = map.words();
  histogram(find("#ttft"), state.ttft, "Time to the first token");
  histogram(find("#tpot"), state.tpot, "Time per token");
  load(find("#load"), history.loads);
}

function tables() {
  const fill = (selector, list) => find(`${selector} tbody`).replaceChildren(...list.map((each) => make("tr", {}, ...cells(...each))));
  fill("#steps", history.steps.slice(-12).reverse().map((step) => [
    [clock(step.at)], [figure(step.prefill), "n"], [figure(step.decode), "n"], [figure(step.sequences), "n"], [seconds(step.seconds), "n"], [figure(step.preempted), "n"],
  ]));
  fill("#percentiles", [["first token", state.ttft], ["per token after it", state.tpot]].map(([name, values]) => [
    [name], [figure(values.length), "n"], ...[0.5, 0.9, 0.95, 0.99, 1].map((q) => [seconds(quantile(values, q)), "n"]),
  ]));
  fill("#sequences", state.sequences.slice(0, 200).map((each) => [
    [each.id, "id"], [each.state], [figure(each.prompt), "n"], [figure(each.output), "n"], [figure(each.pages), "n"],
  ]));
  const more = state.sequences.length - 200;
  find("#none").hidden = state.sequences.length > 0 && more <= 0;
  find("#none").textContent = more > 0 ? `And ${more} more.` : "Nothing runs and nothing waits.";
}

async function ask() {
  clearTimeout(timer);
  if (asking || paused || document.hidden) return;
  asking = true;
  let wait = EVERY;
  try {
    state = readState(await get("v1/engine/state", { key: recall("sessionStorage", "whorl.key") ?? "" }));
    history.add(state, Date.now());
    show();
    trouble.hidden = true;
    document.body.classList.remove("stale");
  } catch (error) {
    wait = AFTER_ERROR;
    const words = error.kind === "key" ? `${error.message.replace(": put yours under Settings", "")} Put it under Settings on the chat page.` : error.message;
    if (trouble.textContent !== words) trouble.textContent = words;
    trouble.hidden = false;
    document.body.classList.add("stale");
  }
  asking = false;
  tell();
  if (!paused && !document.hidden) timer = setTimeout(ask, wait);
}

function tell() {
  const time = new Date().toLocaleTimeString("en-GB");
  live.textContent = paused ? "paused" : trouble.hidden ? `live, ${time}` : "asking again";
}

pause.addEventListener("click", () => {
  paused = !paused;
  pause.setAttribute("aria-pressed", String(paused));
  pause.textContent = paused ? "Go on" : "Pause";
  tell();
  ask();
});
document.addEventListener("visibilitychange", ask);
let frame = 0;
new ResizeObserver(() => {
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(() => state && draw());
}).observe(find("#main"));
ask();
