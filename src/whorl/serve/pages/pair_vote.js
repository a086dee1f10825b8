// Two answers to one prompt, side by side, and a vote between them. The server does not name the models; with a challenger one
// side is its answer.

import { createElement, find } from "./dom.js";
import { actor, randomId } from "./feedback.js";
import { Generation } from "./generation.js";
import { appendPieces } from "./tokenview.js";

const SIDES = [["left", "A"], ["right", "B"]];

export class PairVote {
  /** body: of the request. key: of the API. draw(append): calls `append`, which adds new text. */
  constructor(body, key, stopRepeats, draw) {
    this.element = createElement("li", { class: "message model compared" },
      createElement("h2", { class: "who" }, "Two answers; which is better?"),
      createElement("div", { class: "answers" }, ...SIDES.map(([side, name]) =>
        createElement("section", { class: `answer ${side}`, "aria-label": `Answer ${name}` }, createElement("h3", {}, name), createElement("div", { class: "text" })))),
      createElement("div", { class: "choices", role: "group", "aria-label": "Which answer is better?", hidden: true }));
    const pair = randomId();
    this.generations = SIDES.map(([side], i) => {
      const text = find(`.${side} .text`, this.element);
      const generation = new Generation(stopRepeats, (pieces) => draw(() => appendPieces(text, pieces)));
      const seed = body.seed === undefined ? {} : { seed: body.seed + i };
      const own = { ...body, ...seed, store: true, user: actor(), metadata: { pair, side } };
      generation.done = generation.run("chat", own, key);
      return generation;
    });
    this.done = Promise.all(this.generations.map((each) => each.done));
  }

  stop() {
    for (const generation of this.generations) generation.stop();
  }

  /** Whether both answers can be voted on. */
  get complete() {
    return this.generations.every((each) => !each.error && each.feedback);
  }

  /** Shows the buttons. Returns the index of the chosen answer; of a tie the first. */
  async vote(queue) {
    const [left, right] = this.generations.map((each) => each.feedback.token);
    const group = find(".choices", this.element);
    group.hidden = false;
    return new Promise((resolve) => {
      const button = (text, click, chosen) => createElement("button", { type: "button", onclick: () => {
        queue.add(click);
        resolve(chosen);
      } }, text);
      group.replaceChildren(
        button("A is better", { token: left, over: right, kind: "better" }, 0),
        button("Tie", { token: left, over: right, kind: "tie" }, 0),
        button("B is better", { token: right, over: left, kind: "better" }, 1));
    });
  }
}
