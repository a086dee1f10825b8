// The ratings of the arena page: a sentence, a table of models, and the expected scores of all pairs.
//
// The values are those of GET /v1/arena/standings, as the module `evals/arena/standings.py` computes them.

import { createElement, find, formatPercent } from "./dom.js";

const points = (value) => (Number.isFinite(value) ? String(Math.round(value)) : "–");
const cell = (text, name, title) => createElement("td", { class: name, title }, String(text));

/** One line of the ratings' table. */
function ratingRow(row) {
  const rank = row.rank_low === row.rank_high ? String(row.rank_low) : `${row.rank_low}–${row.rank_high}`;
  return createElement(
    "tr", {},
    createElement("th", { scope: "row" }, row.model),
    ...[rank, points(row.points), `${points(row.low)} to ${points(row.high)}`, row.votes, row.wins, row.losses, row.ties, row.both_bad].map((text) => cell(text, "n")),
  );
}

/** The table of expected scores: cells[a][b] of model a against model b. */
function meetingRows(rows, meetings, level) {
  const expected = new Map();
  for (const each of meetings) {
    const certain = each.p_value <= 1 - level;
    const won = each.wins + (each.ties + each.both_bad) / 2, lost = each.losses + (each.ties + each.both_bad) / 2;
    const title = (a, b, x, y) => `${a} scored ${x} of ${x + y} against ${b}`;
    expected.set(`${each.a}\n${each.b}`, { value: each.expected, certain, title: title(each.a, each.b, won, lost) });
    expected.set(`${each.b}\n${each.a}`, { value: 1 - each.expected, certain, title: title(each.b, each.a, lost, won) });
  }
  return rows.map((a) =>
    createElement(
      "tr", {},
      createElement("th", { scope: "row" }, a.model),
      ...rows.map((b) => {
        const found = expected.get(`${a.model}\n${b.model}`);
        return found ? cell(formatPercent(found.value), found.certain ? "certain" : null, found.title) : cell("");
      }),
    ));
}

/** Draws the standings, or that there are no votes. */
export function showRatings(standings) {
  const rows = standings.rows ?? [];
  find("#verdict").textContent = rows.length ? standings.text : "There are no votes yet.";
  find("#ratings").hidden = find("#meetings").hidden = !rows.length;
  find("#ratings tbody").replaceChildren(...rows.map(ratingRow));
  if (!rows.length) return;
  const heads = ["", ...rows.map((row) => row.model)].map((name) => createElement("th", { scope: "col" }, name));
  find("#meetings thead").replaceChildren(createElement("tr", {}, ...heads));
  find("#meetings tbody").replaceChildren(...meetingRows(rows, standings.meetings, standings.level));
}
