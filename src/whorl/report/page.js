// Tooltips for curves and for the tokens of samples, by pointer, touch and keyboard.
// All content is inserted as text, never as markup.
(() => {
  "use strict";
  const tip = document.getElementById("tip");
  const make = (name, text) => {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const rowsOf = (pairs) => {
    const table = make("table");
    for (const [left, right] of pairs) {
      const row = table.insertRow();
      row.insertCell().textContent = left;
      const cell = row.insertCell();
      cell.textContent = right;
      cell.className = "n";
    }
    return table;
  };
  const show = (parts, x, top, bottom) => {
    tip.replaceChildren(...parts);
    const width = tip.offsetWidth, height = tip.offsetHeight, page = document.documentElement.clientWidth;
    const left = Math.max(8, Math.min(x - width / 2, page - width - 8));
    const above = top - height - 8;
    tip.style.left = `${left + window.scrollX}px`;
    tip.style.top = `${(above > 4 ? above : bottom + 8) + window.scrollY}px`;
    tip.style.visibility = "visible";
  };
  // A hidden tooltip still has a size: at its old position it would widen a page that becomes narrower.
  const hide = () => Object.assign(tip.style, { visibility: "hidden", left: "0", top: "0" });

  for (const chart of document.querySelectorAll("[data-chart]")) {
    const data = JSON.parse(chart.dataset.chart);
    const nearest = (list, value) => {
      let best = 0;
      for (let i = 1; i < list.length; i++) if (Math.abs(list[i] - value) < Math.abs(list[best] - value)) best = i;
      return best;
    };
    const cursors = chart.querySelectorAll(".cursor");
    const leave = () => { cursors.forEach((c) => { c.style.visibility = "hidden"; }); hide(); };
    chart.addEventListener("pointermove", (event) => {
      const svg = [...chart.querySelectorAll(":scope > svg")].find((s) => s.getBoundingClientRect().width > 0);
      const box = svg.getBoundingClientRect(), full = svg.viewBox.baseVal.width;
      const [low, high] = data.domain, span = full - data.left - data.right;
      const at = ((event.clientX - box.left) * full / box.width - data.left) / span;
      if (at < -0.02 || at > 1.02) return leave();
      const main = data.series.find((s) => s.style === "main") || data.series[0];
      const x = main.x[nearest(main.x, low + at * (high - low))];
      const px = data.left + (x - low) / (high - low) * span;
      const cursor = svg.querySelector(".cursor");
      cursor.setAttribute("x1", px);
      cursor.setAttribute("x2", px);
      cursor.style.visibility = "visible";
      const values = data.series.map((s) => [s.name, s.y[nearest(s.x, x)]]);
      show([make("b", `${data.x} ${x.toLocaleString("en", { maximumFractionDigits: data.digits || 0 })}`), rowsOf(values)],
        box.left + px * box.width / full, box.top, box.bottom);
    });
    chart.addEventListener("pointerleave", leave);
  }

  const percent = (p) => (p >= 0.9995 ? "100 %" : p >= 0.1 ? `${(100 * p).toFixed(1)} %` : p >= 0.0001 ? `${(100 * p).toFixed(2)} %` : "< 0.01 %");
  // Visible signs for white space.
  const sign = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·");
  const showToken = (token) => {
    const others = JSON.parse(token.dataset.others || "[]");
    const parts = [make("b", `${sign(token.dataset.text)}  ${percent(Number(token.dataset.p))}`)];
    if (others.length) parts.push(rowsOf(others.map(([text, p]) => [sign(text), percent(p)])));
    const box = token.getClientRects()[0] || token.getBoundingClientRect();
    show(parts, box.left + box.width / 2, box.top, box.bottom);
  };
  const addTips = (sample) => {
    const tokens = [...sample.querySelectorAll(".t")];
    tokens.forEach((token, i) => {
      token.removeAttribute("title"); // the title is for pages without script
      token.tabIndex = i ? -1 : 0; // one Tab stop; arrow keys move within the sample
      token.addEventListener("pointerenter", () => showToken(token));
      token.addEventListener("pointerleave", hide);
      token.addEventListener("focus", () => showToken(token));
      token.addEventListener("blur", hide);
      token.addEventListener("click", () => { token.focus({ preventScroll: true }); showToken(token); });
    });
    sample.addEventListener("keydown", (event) => {
      const at = tokens.indexOf(document.activeElement);
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tokens.length - 1 }[event.key];
      if (event.key === "Escape") hide();
      if (at < 0 || to === undefined || !tokens[to]) return;
      event.preventDefault();
      tokens[at].tabIndex = -1;
      tokens[to].tabIndex = 0;
      tokens[to].focus();
    });
  };
  document.querySelectorAll(".sample pre").forEach(addTips);
  document.addEventListener("sample", (event) => addTips(event.target)); // of a script that made one later
})();
