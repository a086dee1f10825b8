"""JavaScript modules of the pages in a browser: event parser, token alignment, message tree, state parser."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.serve.fake_server import fake_server

pytestmark = pytest.mark.browser

EVENTS = """async (chunks) => {
  const { events } = await import('/static/client.js');
  const start = (c) => { for (const chunk of chunks) c.enqueue(Uint8Array.from(chunk)); c.close(); };
  const stream = new ReadableStream({ start });
  const out = [];
  for await (const data of events(stream)) out.push(data);
  return out;
}"""
WRITTEN = """async ([moves, finish]) => {
  const { TokenText } = await import('/static/tokens.js');
  const written = new TokenText(), pieces = [];
  for (const [text, tokens] of moves) {
    written.add(text, tokens.map((bytes, i) => ({ bytes: Uint8Array.from(bytes), logprob: -i, alternatives: [] })));
    pieces.push(...written.takePieces());
  }
  if (finish) { written.finish(); pieces.push(...written.takePieces()); }
  return [written.text, pieces.map((p) => [p.text, p.tokens.map((t) => [...t.bytes])])];
}"""


@pytest.fixture(scope="module")
def page(browser: Any) -> Any:
    with fake_server() as fake:
        page = browser.new_context().new_page()
        page.goto(fake.url + "/static/tree.js")  # any URL of the server
        yield page
        page.context.close()


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_events_are_independent_of_chunk_boundaries(page: Any, ending: str) -> None:
    text = ": hello|data: one||event: x|data:  two é€😀|data: three|||id: 4|data:||data: cut off"
    raw = text.replace("|", ending).encode()
    expected = ["one", " two é€😀\nthree", ""]
    cuts = [[raw[:i], raw[i:]] for i in range(len(raw))] + [[bytes([b]) for b in raw]]
    chunks = [[list(chunk) for chunk in cut] for cut in cuts]
    found = page.evaluate(f"async (all) => Promise.all(all.map({EVENTS}))", chunks)
    assert found == [expected] * len(cuts)


@st.composite
def generations(draw: st.DrawFn) -> tuple[str, list[list[int]], list[int], int]:
    """A text, its tokens, the characters shown after each token, and the final length."""
    text = draw(st.text(st.sampled_from("ab \n<é€😀\u0301\ufeff"), max_size=30))
    raw = text.encode()
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(raw) - 1)), max_size=12)))
    bounds = [0, *(c for c in cuts if c < len(raw)), len(raw)]
    tokens = [list(raw[a:b]) for a, b in pairwise(bounds)]
    # The server sends complete characters only, possibly late.
    whole = [len(raw[:b].decode(errors="ignore")) for b in bounds[1:]]
    lags = draw(st.lists(st.integers(0, 3), min_size=len(whole), max_size=len(whole)))
    shown, most = [], 0
    for n, lag in zip(whole, lags, strict=True):
        most = max(most, n - lag)
        shown.append(most)
    return text, tokens, shown, draw(st.integers(shown[-1] if shown else 0, len(text)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(generations())
def test_token_text_pieces_contain_each_token_once(page: Any, generation: Any) -> None:
    text, tokens, shown, end = generation
    moves, before = [], 0
    for token, n in zip(tokens, shown, strict=True):
        moves.append([text[before:n], [token]])
        before = n
    moves.append([text[before:end], []])
    found, pieces = page.evaluate(WRITTEN, [moves, True])
    assert found == text[:end]
    assert "".join(piece for piece, _ in pieces) == text[:end]
    # Up to the end of the text, each token is in the piece of the character that it completes.
    told = [token for _, group in pieces for token in group]
    assert told == tokens[: len(told)]
    assert all(group for _, group in pieces)
    decoded = b"".join(bytes(token) for token in told).decode(errors="ignore")
    assert decoded.startswith(text[:end])


def test_token_text_shows_text_that_differs_from_tokens(page: Any) -> None:
    moves = [["Hi ", [list(b"Hi ")]], ["there", [list(b"their")]], [" you", [list(b" you")]]]
    text, pieces = page.evaluate(WRITTEN, [moves, False])
    assert text == "Hi there you" and "".join(piece for piece, _ in pieces) == text
    assert pieces[0] == ["Hi ", [list(b"Hi ")]] and all(not group for _, group in pieces[1:])


def test_stream_parses_both_logprob_formats(page: Any) -> None:
    """Chat's logprobs carry bytes; completions write bytes that are no text as \\x, and their alternatives as a mapping."""
    logprobs = {"tokens": ["bytes:\\xe2\\x82", "<b>"], "token_logprobs": [-1, None]}
    logprobs["top_logprobs"] = [{"a": -2, "bytes:\\xff": -1}, None]
    completion = {"choices": [{"text": "", "finish_reason": "stop", "logprobs": logprobs}]}
    script = """async (part) => {
      const { stream } = await import('/static/client.js');
      const kept = window.fetch;
      window.fetch = async () => new Response(`data: ${JSON.stringify(part)}\\n\\ndata: [DONE]\\n\\n`);
      try {
        for await (const { tokens } of stream('complete', {}, {}))
          return tokens.map((t) => [[...t.bytes], t.logprob, t.alternatives.map((o) => [[...o.bytes], o.logprob])]);
      } finally { window.fetch = kept; }
    }"""
    first, second = [[0xE2, 0x82], -1, [[[0xFF], -1], [[97], -2]]], [list(b"<b>"), None, []]
    assert page.evaluate(script, completion) == [first, second]


def test_message_tree_packs_and_rejects_invalid_data(page: Any) -> None:
    script = """async () => {
      const { MessageTree } = await import('/static/tree.js');
      const tree = new MessageTree();
      const a = tree.add(tree.root, 'user', 'A'), one = tree.add(a, 'assistant', '1');
      tree.add(a, 'assistant', '2');
      const b = tree.add(tree.root, 'user', 'B');
      tree.selectSibling(b, -1);
      tree.selectSibling(tree.leaf(), -1);
      tree.selectSibling(one, -1);
      const again = MessageTree.unpack(JSON.parse(JSON.stringify(tree.pack())));
      const texts = (t) => t.path().map((node) => node.text);
      const before = [texts(tree), texts(again), again.messages(again.leaf())];
      again.remove(again.leaf());
      const nonsense = [null, {}, [1], ['root', '', [['user']], 0]];
      return [...before, texts(again), ...nonsense.map((x) => MessageTree.unpack(x).path().length)];
    }"""
    told = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "1"}]
    assert page.evaluate(script) == [["A", "1"], ["A", "1"], told, ["A", "2"], 0, 0, 0, 0]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=40))
def test_quantile_and_log_bins_cover_all_samples(page: Any, values: list[float]) -> None:
    script = """async (values) => {
      const { quantile, logBins } = await import('/static/state.js');
      return [[0.25, 0.5, 0.75, 1].map((q) => quantile(values, q)), logBins(values)];
    }"""
    quantiles, bins = page.evaluate(script, values)
    expected = [*statistics.quantiles(values, n=4, method="inclusive"), max(values)]
    assert quantiles == pytest.approx(expected, rel=1e-9)
    assert sum(bins["counts"]) == len(values) and len(bins["edges"]) == len(bins["counts"]) + 1
    for i, count in enumerate(bins["counts"]):
        low, high = bins["edges"][i] * (1 - 1e-6), bins["edges"][i + 1] * (1 + 1e-6)
        assert count <= sum(low <= v <= high for v in values)


def test_parse_state_accepts_missing_fields(page: Any) -> None:
    script = """async (states) => {
      const { parseState, pageMap } = await import('/static/state.js');
      const steps = states.map((s) => parseState(s).batches.length);
      return [steps, pageMap([1, [0, 3], [-1, 2], [2, 1]]), pageMap([[0, 1e12]], 5)];
    }"""
    states = [None, {}, {"batches": None, "pages": None}]
    states += [{"batches": [{}], "sequences": [{"id": 3}], "latencies": {}}]
    found = page.evaluate(script, states)
    assert found == [[0, 0, 0, 1], [1, 0, 0, 0, -1, -1, 2], [0] * 5]
