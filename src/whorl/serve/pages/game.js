// The game page: a board to click on. The page keeps the moves; the server computes the position after them and searches it.
//
// After a move of the person the agent replies. "Let the agent move" plays its choice for the side to move, so the person
// continues with the other side.

import { get, post } from "./client.js";
import { createSvg, find, formatPercent, table } from "./dom.js";

const CELL = 56;
let about = null; // {agent, game, simulations, rows, columns, gravity}
let moves = [], position = null, busy = false;

const name = (move) => String(move + 1);

/** The action of a click on a cell: its column in a game in which stones fall, otherwise the cell. */
const action = (row, column) => (about.gravity ? column : row * about.columns + column);

function drawBoard() {
  const { board, legal } = position, last = moves.at(-1);
  const top = board.findIndex((row) => row[last]); // of the last stone, where stones fall
  const cells = board.flatMap((row, r) => row.map((sign, c) => {
    const move = action(r, c), x = c * CELL, y = r * CELL, newest = move === last && (!about.gravity || r === top);
    const button = { role: "button", tabindex: 0, "aria-label": `Move ${name(move)}`, cursor: "pointer", onclick: () => play(move), onkeydown: (event) => event.key === "Enter" && play(move) };
    const stone = { cx: x + CELL / 2, cy: y + CELL / 2, r: CELL / 2 - 7, fill: sign === "X" ? "var(--accent)" : "var(--warm)", stroke: newest ? "var(--ink)" : "none", "stroke-width": 3, "data-sign": sign };
    return createSvg("g", !sign && legal[move] && !busy ? button : {},
      createSvg("rect", { x, y, width: CELL, height: CELL, fill: "var(--raised)", stroke: "var(--line)" }), ...(sign ? [createSvg("circle", stone)] : []));
  }));
  const width = about.columns * CELL, height = about.rows * CELL;
  find("#board").replaceChildren(createSvg("svg", { role: "group", "aria-label": `Board of ${about.game}`, viewBox: `-1 -1 ${width + 2} ${height + 2}`, width, height }, ...cells));
}

function drawSearch({ search, turn }) {
  if (!search) return;
  const total = search.visits.reduce((sum, n) => sum + n, 0);
  find("#value").textContent = `Value for ${turn}: ${search.value.toFixed(2)}. The agent's choice: ${name(search.move)}.`;
  const rows = search.visits.map((n, move) => [name(move), String(n), formatPercent(n / total), formatPercent(search.prior[move])]);
  find("#visits").replaceChildren(...table([["Move", "Visits", "Share", "Prior"], ...rows], search.move + 1).children);
}

function draw() {
  drawBoard();
  const end = position.winner ? `${position.winner} has won.` : "A draw.";
  find("#state").textContent = busy ? "The agent is searching." : position.ended ? end : `Your move: ${position.turn}.`;
  for (const button of document.querySelectorAll("main button")) button.disabled = busy;
  find("#moves").textContent = moves.map(name).join(", ") || "None yet.";
}

/** Loads the position after `next`; with a search its result is shown. */
async function load(next, search = false) {
  position = await post("v1/game/position", { moves: next, search });
  moves = next;
  drawSearch(position);
}

async function reply() {
  if (position.ended) return;
  draw();
  await load(moves, true);
  await load([...moves, position.search.move]);
}

/** Runs one action of the person at a time; shows its error. */
async function attempt(work) {
  if (busy) return;
  busy = true;
  find("#error").hidden = true;
  try {
    await work();
    if (!position.ended && find("#hints").checked) await load(moves, true);
  } catch (error) {
    find("#error").textContent = error.message;
    find("#error").hidden = false;
  }
  busy = false;
  if (position) draw();
}

const play = (move) => attempt(async () => {
  await load([...moves, move]);
  await reply();
});

find("#agent").addEventListener("click", () => attempt(reply));
find("#new").addEventListener("click", () => attempt(() => load([])));
find("#back").addEventListener("click", () => attempt(() => load(moves.slice(0, -2))));
find("#hints").addEventListener("change", () => attempt(async () => {}));

await attempt(async () => {
  about = await get("v1/game");
  find("#about").textContent = `${about.agent}, ${about.simulations} simulations`;
  await load([]);
});
