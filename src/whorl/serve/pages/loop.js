// The loop page: polls GET v1/loop/state and draws it. The values are those of `loop/page_state.py`.

import { count, createElement, createSvg, find, formatPercent, table } from "./dom.js";
import { read } from "./feedback.js";

const POLL_MS = 5000;
const KINDS = ["like", "dislike", "none", "edit", "better", "tie"];
const DECISIONS = { promote: "is better: promote it", reject: "is not better", wait: "may be better or not: collect more votes" };

/** A table of texts with a first row of headings. */
function fill(id, head, rows) {
  const node = find(id), { caption } = node;
  node.replaceChildren(...(caption ? [caption] : []), createElement("thead", {}, createElement("tr", {}, ...head.map((text) => createElement("th", { scope: "col" }, text)))), ...table(rows).children);
  node.hidden = !rows.length;
}

const share = ({ value, low, high }) => `${formatPercent(value)} (${formatPercent(low)} to ${formatPercent(high)})`;

function drawTests(state) {
  const name = (address) => state.names[address] ?? address.slice(0, 12);
  const tests = state.gate.tests ?? [];
  fill("#tests", ["Challenger", "Against", "Won", "Lost", "Tied", "Win rate", "E-value", "Decision"], tests.map((test) => [
    name(test.challenger), name(test.champion), test.wins, test.losses, test.ties,
    share({ value: test.win_rate, low: test.low, high: test.high }), test.e_value.toPrecision(3), test.decision,
  ].map(String)));
  const compared = state.comparison;
  fill("#comparison", ["Measure", compared ? `${name(compared.challenger)} against ${name(compared.champion)}` : "", "Examples"],
    Object.entries(compared?.measures ?? {}).map(([measure, found]) => [measure, share(found), String(found.n)]));
  const last = tests.at(-1), texts = [];
  if (last) texts.push(`By ${count(last.wins + last.losses + last.ties, "blind vote")}, ${name(last.challenger)} ${DECISIONS[last.decision]}. It wins ${share({ value: last.win_rate, low: last.low, high: last.high })}.`);
  if (compared) texts.push(`On held-out prompts, ${name(compared.challenger)}: ${compared.verdict}.`);
  if (texts.length) find("#verdict").textContent = texts.join(" ");
}

/** Columns of clicks per day, the kinds on top of each other. */
function drawDays(days) {
  const starts = [...new Set(days.map((row) => row.day))].sort((a, b) => a - b).slice(-60);
  const total = (day, kind) => days.filter((row) => row.day === day && row.kind === kind).reduce((sum, row) => sum + row.clicks, 0);
  const most = Math.max(1, ...starts.map((day) => KINDS.reduce((sum, kind) => sum + total(day, kind), 0)));
  const bars = starts.flatMap((day, i) => {
    let top = 100;
    return KINDS.map((kind, k) => {
      const height = (100 * total(day, kind)) / most;
      top -= height;
      return createSvg("rect", { class: `kind-${k}`, x: 10 * i, y: top, width: 9, height });
    });
  });
  const label = starts.length ? `Clicks on ${count(starts.length, "day")}, at most ${most} on one.` : "No clicks yet.";
  find("#days").replaceChildren(createSvg("svg", { role: "img", "aria-label": label, viewBox: `0 0 ${Math.max(100, 10 * starts.length)} 100`, height: 120, preserveAspectRatio: "none" }, ...bars));
  fill("#kinds", ["Kind", "Clicks"], KINDS.map((kind) => [kind === "none" ? "taken back" : kind, String(starts.reduce((sum, day) => sum + total(day, kind), 0))]));
  find("#kinds").querySelectorAll("tbody tr").forEach((row, k) => row.firstElementChild.prepend(createElement("i", { class: `key kind-${k}` })));
}

function drawRaters({ n, votes, gini, lorenz }) {
  const uneven = gini > 0.6 ? " A few raters gave most votes." : "";
  find("#raters").textContent = n ? `${count(votes, "vote")} of ${count(n, "rater")}. Gini coefficient ${gini.toFixed(2)} (0: equal numbers of votes, 1: one rater gave all).${uneven} The curve has the share of votes of the raters with the fewest votes.` : "No votes yet.";
  const points = lorenz.map((share, i) => `${(100 * i) / (lorenz.length - 1)},${100 - 100 * share}`).join(" ");
  find("#lorenz").replaceChildren(createSvg("svg", { role: "img", "aria-label": `Lorenz curve of votes: share of votes against share of raters. Gini coefficient ${gini.toFixed(2)}.`, viewBox: "-1 -1 102 102", width: 240, height: 240 },
    createSvg("polyline", { class: "equal", points: "0,0 0,100 100,100 0,100 100,0" }), createSvg("polyline", { class: "curve", points })));
}

export function draw(state) {
  drawTests(state);
  drawDays(state.days);
  drawRaters(state.raters);
  find("#survives").textContent = `A click that was taken survives: ${state.survives}.`;
  const rows = Object.entries(state.topics).map(([topic, n]) => [`topic ${topic}`, count(n, "record")]);
  const lags = Object.entries(state.lags).map(([view, lag]) => [`view ${view}`, lag ? `${count(lag, "record")} behind; is whorl loop running?` : "up to date"]);
  fill("#log", ["Part", "State"], [...rows, ...lags]);
}

async function poll() {
  if (!document.hidden) {
    try {
      draw(await read("v1/loop/state"));
      find("#error").hidden = true;
    } catch (error) {
      find("#error").textContent = error.message;
      find("#error").hidden = false;
    }
  }
  setTimeout(poll, POLL_MS);
}

poll();
