"""The page of an evaluation in Chromium: filters and scrolling with 10,000 items against 100.

    python bench/evals/page.py --save
    python bench/evals/page.py --quick     # a quarter of the events

Both pages compare two models and are open in one browser. One measurement is the time from an event to the next painted
frame:

    filter      choose a filter of the comparison, of the outcomes or of the group, or change the search text
    scroll      move the list by a random distance

The events of both pages alternate. A frame waits for the screen, which hides a slow page behind a slow frame. A second
figure is the time in which the page's main thread was busy with the event: script, style, layout and paint. Figures are
medians, and the bar of each is twice that of 100 items.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
from _run import claim, parse, skip
from tests.support.report.evaluation_example import write_evaluation

from whorl.report.evaluation import write_page

Samples = dict[str, dict[int, list[float]]]
FEW, MANY = 100, 10_000
BAR = 2.0
FLAGS = [
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--disable-frame-rate-limit",
    "--disable-gpu-vsync",
]

# Functions of the page: `change` sets a filter, `scroll` moves the list; both resolve to ms until the frame is painted.
SCRIPT = """
() => {
  const painted = () => new Promise((done) => requestAnimationFrame(() => {
    const channel = new MessageChannel();  // its message runs after the frame's layout and paint
    channel.port1.onmessage = () => done(performance.now());
    channel.port2.postMessage(0);
  }));
  const timed = async (act) => { await painted(); const began = performance.now(); act(); return await painted() - began; };
  window.change = (id, value, event) => timed(() => {
    const node = document.getElementById(id);
    node.value = value;
    node.dispatchEvent(new Event(event, { bubbles: true }));
  });
  const list = document.getElementById("list");
  window.scroll = (share) => timed(() => { list.scrollTop = share * (list.scrollHeight - list.clientHeight); });
}
"""
FILTERS = [
    ("compare", "1", "change"), ("compare", "5", "change"), ("outcome-a", "1", "change"), ("outcome-a", "", "change"),
    ("compare", "0", "change"), ("group", "1", "change"), ("group", "", "change"), ("text", "lamp", "input"),
    ("text", "lamp river", "input"), ("text", "", "input"),
]  # fmt: skip


def open_page(browser: Any, folder: Path, n: int) -> Any:
    """Return an open page of n items of two models, with all texts read."""
    models = [
        write_evaluation(folder / f"{name}-{n}", name, n, seed=seed) for seed, name in enumerate(("a", "b"))
    ]
    path = write_page(models, folder / f"page-{n}.html")
    print(f"{n:6,} items: {path.stat().st_size / 1e6:.2f} MB")
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.goto(path.as_uri())
    page.wait_for_selector("body[data-ready]", timeout=120_000)
    page.evaluate(SCRIPT)
    return page


def busy_seconds(session: Any) -> float:
    """Return the time in which the page's main thread was busy, since it was opened."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))


def measure(pages: dict[int, Any], sessions: dict[int, Any], rounds: int) -> Samples:
    """Return figure -> items -> ms of each event."""
    names = ("filter", "filter, busy", "scroll", "scroll, busy")
    found: Samples = {name: {n: [] for n in pages} for name in names}

    def event(kind: str, call: str, argument: Any) -> None:
        for n, page in pages.items():
            page.bring_to_front()
            before = busy_seconds(sessions[n])
            found[kind][n].append(page.evaluate(call, argument))
            found[f"{kind}, busy"][n].append(1e3 * (busy_seconds(sessions[n]) - before))

    for turn in range(rounds):
        for setting in FILTERS:
            event("filter", "(s) => change(...s)", list(setting))
        for place in range(10):
            event("scroll", "(s) => scroll(s)", (0.37 * (10 * turn + place) + 0.05) % 1.0)
    return found


def main() -> int:
    """Print the JSON lines of filters and of scrolling."""
    smoke, quick = {"rounds": 1}, {"rounds": 3}
    args = parse(
        __doc__, lambda p: p.add_argument("--rounds", type=int, default=12), smoke=smoke, quick=quick
    )
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        skip("needs playwright (pip install playwright)")
    if chromium is None:
        skip("needs Chromium (package chromium)")
    flags = FLAGS + ["--no-sandbox"] * (os.geteuid() == 0)  # Chromium refuses its sandbox to root
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        pages = {n: open_page(browser, Path(folder), n) for n in (FEW, MANY)}
        sessions = {n: page.context.new_cdp_session(page) for n, page in pages.items()}
        for session in sessions.values():
            session.send("Performance.enable")
        measure(pages, sessions, 1)
        found = measure(pages, sessions, args.rounds)
        browser.close()
    ok = True
    for kind, values in found.items():
        few, many = (statistics.median(values[n]) for n in (FEW, MANY))
        p95 = {n: sorted(own)[int(0.95 * len(own))] for n, own in values.items()}
        print(
            f"{kind:<13} median {many:.2f} ms against {few:.2f} ms, 95th percentile {p95[MANY]:.2f} against {p95[FEW]:.2f}"
        )
        ok &= many / few <= BAR
        claim(
            f"page of an evaluation, {kind}, {MANY:,} items against {FEW}", ours=many, peer=few, unit="ms", ratio=many / few,
            bar=BAR, ok=many / few <= BAR, peer_name=f"{FEW} items", variant=kind.replace(", ", "-"),
            samples=[round(ms, 3) for ms in values[MANY]], quick=args.quick,
        )  # fmt: skip
    return 0 if ok or args.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
