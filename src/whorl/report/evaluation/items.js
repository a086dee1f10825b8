// The items of an evaluation: filters, a list that holds only the rows in view, and the chosen item.
// All content is inserted as text, never as markup.
(() => {
  "use strict";
  const ROW = 34, SPARE = 6, MAX_SHOWN = 20000; // pixels of a row; rows above and below the view; characters of a JSON value
  const RIGHT = 0, MISSING = 6, SCORED = 7; // places in the list of outcomes
  const by = (id) => document.getElementById(id);
  const make = (name, className, text) => {
    const node = document.createElement(name);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const unpack = async (id) => {
    const binary = atob(by(id).textContent);
    const bytes = new Uint8Array(binary.length);
    for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
    return JSON.parse(await new Response(stream).text());
  };

  const list = by("list"), rows = by("rows"), item = by("item"), count = by("count");
  const state = { contents: null, task: -1, columns: null, chunks: new Map(), texts: [], found: [], chosen: -1, turn: 0 };

  // Compare A with B. Missing and absent responses are neither right nor wrong.
  const isRight = (o) => o === RIGHT, isNotRight = (o) => o > RIGHT && o < MISSING;
  const COMPARE = [
    ["all items", () => true],
    ["A right, B wrong", (a, b) => isRight(a) && isNotRight(b)],
    ["A wrong, B right", (a, b) => isNotRight(a) && isRight(b)],
    ["both right", (a, b) => isRight(a) && isRight(b)],
    ["both wrong", (a, b) => isNotRight(a) && isNotRight(b)],
    ["different outcomes", (a, b) => a !== b],
    ["A scores higher", (a, b, x, y) => x !== null && y !== null && x > y],
    ["B scores higher", (a, b, x, y) => x !== null && y !== null && x < y],
  ];

  const fill = (select, entries, value) => {
    select.replaceChildren(...entries.map(([key, text]) => Object.assign(make("option", "", text), { value: key })));
    if (value !== undefined) select.value = value;
    select.closest("label").hidden = entries.length < 2;
  };
  const sideOf = (name) => Number(by(`model-${name}`).value);
  const outcomeText = (o) => state.contents.outcomes[o];

  const openTask = async (task) => {
    const turn = ++state.turn;
    const columns = await unpack(`task-${task}`);
    if (turn !== state.turn) return;
    Object.assign(state, { task, columns, chunks: new Map(), texts: [], chosen: -1 });
    fill(by("group"), [["", "all"], ...columns.groups.map((g, i) => [i, g || "no group"])].slice(0, columns.groups.length > 1 ? undefined : 1));
    fillOutcomes();
    apply();
    collectTexts(turn);
  };
  const fillOutcomes = () => {
    for (const name of ["a", "b"]) {
      const counts = new Map(), side = sideOf(name), select = by(`outcome-${name}`), before = select.value;
      if (side >= 0) for (const o of state.columns.outcomes[side]) counts.set(o, (counts.get(o) || 0) + 1);
      const entries = [...counts].sort((x, y) => x[0] - y[0]).map(([o, n]) => [o, `${outcomeText(o)} (${n})`]);
      fill(select, side < 0 ? [] : [["", "all"], ...entries]);
      if (entries.some(([o]) => String(o) === before)) select.value = before;
    }
  };

  // The texts that a search reads, in lower case. They are unpacked between other work, one chunk at a time.
  const collectTexts = async (turn) => {
    for (let chunk = 0; chunk < state.contents.tasks[state.task].chunks; chunk++) {
      if (!searching()) await new Promise((resume) => (window.requestIdleCallback || setTimeout)(resume));
      if (turn !== state.turn) return;
      const items = await unpack(`task-${state.task}-chunk-${chunk}`);
      if (turn !== state.turn) return;
      items.forEach((entry, i) => {
        const sides = entry.sides.filter(Boolean).flatMap((side) => [...side.answers, side.reason]);
        const id = state.columns.ids[chunk * state.contents.chunk + i];
        state.texts.push([id, entry.prompt, entry.gold, ...sides].join("\n").toLowerCase());
      });
    }
    document.body.dataset.ready = "true";
    if (searching()) apply();
  };
  const searching = () => by("text").value.trim() !== "";

  const apply = () => {
    const { columns, texts } = state, { scores } = columns, n = columns.ids.length, a = sideOf("a"), b = sideOf("b");
    const left = columns.outcomes[a], right = b < 0 ? null : columns.outcomes[b];
    const compare = right ? COMPARE[Number(by("compare").value)][1] : COMPARE[0][1];
    const chosen = (id) => (by(id).value === "" ? -1 : Number(by(id).value));
    const outcomeA = chosen("outcome-a"), outcomeB = right ? chosen("outcome-b") : -1, group = chosen("group");
    const text = by("text").value.trim().toLowerCase(), waiting = text && texts.length < n;
    const found = [];
    if (!waiting) {
      for (let i = 0; i < n; i++) {
        if (outcomeA >= 0 && left[i] !== outcomeA) continue;
        if (outcomeB >= 0 && right[i] !== outcomeB) continue;
        if (group >= 0 && columns.group[i] !== group) continue;
        if (right && !compare(left[i], right[i], scores[a][i], scores[b][i])) continue;
        if (text && !texts[i].includes(text)) continue;
        found.push(i);
      }
    }
    state.found = found;
    count.textContent = waiting ? "Reading the texts…" : `${found.length.toLocaleString("en")} of ${n.toLocaleString("en")} items`;
    rows.style.height = `${found.length * ROW}px`;
    list.scrollTop = 0;
    const place = found.indexOf(state.chosen);
    if (place >= 0) reveal(place);
    draw();
    if (place < 0 && found.length) choose(0);
    if (!found.length) item.replaceChildren();
  };

  // Rows are made once and written again while scrolling.
  const pool = [];
  const draw = () => {
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - SPARE);
    const last = Math.min(state.found.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + SPARE);
    while (pool.length < last - first) {
      const row = make("div", "row");
      row.setAttribute("role", "option");
      row.append(make("span", "id"), make("span", "outcome"), make("span", "outcome"), make("span", "text"));
      row.addEventListener("click", () => choose(Number(row.dataset.place)));
      pool.push(row);
      rows.append(row);
    }
    const { columns } = state, a = sideOf("a"), b = sideOf("b");
    pool.forEach((row, k) => {
      const place = first + k;
      row.hidden = place >= last;
      row.style.display = row.hidden ? "none" : "";
      if (row.hidden) return;
      const i = state.found[place], [id, outcomeA, outcomeB, text] = row.children;
      row.dataset.place = place;
      row.id = `row-${place}`;
      row.style.transform = `translateY(${place * ROW}px)`;
      row.setAttribute("aria-selected", i === state.chosen);
      row.setAttribute("aria-posinset", place + 1);
      row.setAttribute("aria-setsize", state.found.length);
      id.textContent = columns.ids[i];
      text.textContent = columns.lines[i];
      for (const [cell, side] of [[outcomeA, a], [outcomeB, b]]) {
        const o = side < 0 ? -1 : columns.outcomes[side][i];
        cell.hidden = side < 0;
        cell.style.display = side < 0 ? "none" : "";
        const score = o === SCORED ? columns.scores[side][i] : null;
        cell.textContent = side < 0 ? "" : score === null ? outcomeText(o) : String(score);
        cell.className = `outcome ${o === RIGHT ? "right" : o >= MISSING ? "none" : "bad"}`;
      }
    });
    list.setAttribute("aria-activedescendant", `row-${state.found.indexOf(state.chosen)}`);
  };
  const reveal = (place) => {
    const top = place * ROW, bottom = top + ROW;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (bottom > list.scrollTop + list.clientHeight) list.scrollTop = bottom - list.clientHeight;
  };
  const choose = async (place) => {
    const i = state.found[place];
    if (i === undefined) return;
    state.chosen = i;
    reveal(place);
    draw();
    const chunk = Math.floor(i / state.contents.chunk), { chunks, task } = state;
    if (!chunks.has(chunk)) {
      if (chunks.size >= 8) chunks.delete(chunks.keys().next().value);
      chunks.set(chunk, unpack(`task-${task}-chunk-${chunk}`));
    }
    const entry = (await chunks.get(chunk))[i % state.contents.chunk];
    if (state.chosen === i && state.task === task) showItem(i, entry);
  };

  // The chosen item

  const number = (x) => (typeof x !== "number" ? String(x) : Number.isInteger(x) ? String(x) : String(Number(x.toPrecision(4))));
  const pre = (text, className) => make("pre", className || "", text);
  const showItem = (i, entry) => {
    const { columns } = state, a = sideOf("a"), b = sideOf("b"), group = columns.groups[columns.group[i]];
    const parts = [make("h3", "", group ? `${columns.ids[i]} · ${group}` : columns.ids[i]), pre(entry.prompt, "asked")];
    if (entry.gold) parts.push(make("h4", "note", "Expected"), pre(entry.gold));
    const shown = b < 0 ? [a] : [a, b], sides = make("div", shown.length > 1 ? "sides pair" : "sides pair one");
    shown.forEach((side) => sides.append(sideCard(side, entry.sides[side], columns.outcomes[side][i])));
    item.replaceChildren(...parts, sides);
    item.querySelectorAll(".sample pre").forEach((node) => node.dispatchEvent(new CustomEvent("sample", { bubbles: true })));
  };
  const sideCard = (side, data, outcome) => {
    const card = make("div", `side ${outcome === RIGHT || outcome === SCORED ? "passed" : "failed"}`);
    const verdict = make("p", "verdict", `${state.contents.models[side]}: ${outcomeText(outcome)} `);
    card.append(verdict);
    if (!data) return card;
    if (data.reason) verdict.append(make("small", "", data.reason));
    const scores = Object.entries(data.scores);
    if (scores.length) card.append(make("p", "note", scores.map(([name, value]) => `${name} ${number(value)}`).join(" · ")));
    const { tokens, choices, trajectory, other_runs: runs, ...others } = data.details;
    data.answers.forEach((answer, n) => {
      if (data.answers.length > 1) card.append(make("h4", "", `Answer ${n + 1}`));
      card.append(answer ? pre(answer) : make("p", "note", "empty"));
    });
    if (Array.isArray(choices) && choices.length) card.append(make("h4", "", "Choices"), choiceTable(choices));
    if (Array.isArray(tokens) && tokens.length) card.append(make("h4", "", "Tokens"), tokenView(tokens));
    if (Array.isArray(trajectory)) card.append(make("h4", "", `Trajectory, ${trajectory.length} steps`), steps(trajectory));
    if (Array.isArray(runs)) runs.forEach((run, n) => {
      const { trajectory: own, ...rest } = Object(run), fold = make("details");
      fold.append(make("summary", "", `Run ${n + 2}: ${rest.ended}, tests ${rest.tests}`));
      if (Array.isArray(own)) fold.append(steps(own));
      fold.append(pre(JSON.stringify(rest, null, 1).slice(0, MAX_SHOWN), "note"));
      card.append(fold);
    });
    if (Object.keys(others).length) {
      const fold = make("details");
      fold.append(make("summary", "", "Details"), pre(JSON.stringify(others, null, 1).slice(0, MAX_SHOWN)));
      card.append(fold);
    }
    return card;
  };
  const choiceTable = (choices) => {
    const table = make("table"), names = [...new Set(choices.flatMap((c) => Object.keys(Object(c))))];
    const head = table.createTHead().insertRow(), body = table.createTBody(), scroll = make("div", "scroll");
    names.forEach((name) => head.append(make("th", "", name.replaceAll("_", " "))));
    for (const choice of choices) {
      const row = body.insertRow();
      for (const name of names) {
        const value = choice[name], cell = row.insertCell();
        cell.textContent = value === true ? "✓" : value === false || value == null ? "" : typeof value === "object" ? JSON.stringify(value) : number(value);
      }
    }
    scroll.append(table);
    return scroll;
  };
  // Tokens are pairs of text and log-probability in nats. The colour is the surprise in bits; 8 bits and more have one colour.
  const tokenView = (tokens) => {
    const figure = make("figure", "sample"), box = pre("");
    for (const [text, logProb] of tokens) {
      const token = make("span", "t"), p = logProb == null ? 0 : Math.exp(logProb);
      token.style.setProperty("--s", Math.round((Math.min(8, logProb == null ? 8 : -logProb / Math.LN2) * 70) / 8));
      token.dataset.p = p.toPrecision(6);
      token.dataset.text = text;
      String(text).split("\n").forEach((line, n) => {
        if (n) token.append(make("span", "eol", "⏎"), "\n");
        token.append(line);
      });
      box.append(token);
    }
    figure.append(box);
    return figure;
  };
  const steps = (trajectory) => {
    const box = make("ol", "steps");
    trajectory.forEach((step, n) => {
      const entry = make("li"), { role, tool, content, ...rest } = Object(step);
      entry.append(make("b", "", `${n + 1} ${[role, tool].filter(Boolean).join(" · ")}`));
      if (content !== undefined) entry.append(pre(typeof content === "string" ? content : JSON.stringify(content, null, 1)));
      const more = Object.entries(rest).map(([k, v]) => `${k} ${typeof v === "object" ? JSON.stringify(v) : number(v)}`);
      if (more.length) entry.append(pre(more.join("\n"), "note"));
      box.append(entry);
    });
    return box;
  };

  // Events

  let drawing = 0;
  list.addEventListener("scroll", () => {
    if (!drawing) drawing = requestAnimationFrame(() => { drawing = 0; draw(); });
  }, { passive: true });
  list.addEventListener("keydown", (event) => {
    const at = state.found.indexOf(state.chosen), page = Math.floor(list.clientHeight / ROW) - 1, end = state.found.length - 1;
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: end }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(end, to)));
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    event.preventDefault();
    by("text").focus();
  });
  const start = async () => {
    const contents = (state.contents = await unpack("contents"));
    if (!contents.tasks.length) return;
    const names = contents.models.map((name, i) => [i, name]);
    fill(by("task"), contents.tasks.map((task, i) => [i, task.name]));
    fill(by("model-a"), names, 0);
    fill(by("model-b"), names.length > 1 ? [[-1, "none"], ...names] : [[-1, "none"]], names.length > 1 ? 1 : -1);
    fill(by("compare"), COMPARE.map(([name], i) => [i, name]));
    const sides = () => { by("compare").closest("label").hidden = sideOf("b") < 0; };
    sides();
    by("task").addEventListener("change", () => openTask(Number(by("task").value)));
    for (const id of ["model-a", "model-b"]) by(id).addEventListener("change", () => { sides(); fillOutcomes(); state.chosen = -1; apply(); });
    for (const id of ["compare", "outcome-a", "outcome-b", "group"]) by(id).addEventListener("change", apply);
    by("text").addEventListener("input", apply);
    document.querySelector(".filters").addEventListener("submit", (event) => event.preventDefault());
    new ResizeObserver(() => state.columns && draw()).observe(list);
    await openTask(0);
  };
  start();
})();
