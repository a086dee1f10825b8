"""Sampler, stop strings and grammars in the engine, compared with the generation of one request without a cache."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from bench.engine.support.no_cache import generate_without_cache
from hypothesis import given
from hypothesis import strategies as st
from tests.support.engine.parity import assert_same, config, decoder, drain, ids_of, request, run, tokens_of

from whorl.engine.engine import Engine
from whorl.engine.request import Delta, Grammar
from whorl.engine.sampling.grammar import GrammarCompiler
from whorl.engine.sampling.stop_strings import StopStringChecker
from whorl.engine.sampling_params import SamplingParams
from whorl.engine.speculation.prompt_lookup import PromptLookup

# Of 50 ids the last two have no text: 48 is banned, 49 ends an output
WORDS = [bytes([n]) for n in b'abcdefghijklmnopqrstuvwxyz0123456789{}:," '] + [b"ab", b"12", b"xyz", b"cde"]
WORDS += [b"\n", b"-", b"", b""]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "top_p": 1},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1, "top_k": 7, "min_p": 0.05},
    {"temperature": 1, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"temperature": 1, "logit_bias": {3: 4.0, 9: -50.0}},
]


def engine(**more: Any) -> Engine:
    options = {"banned_ids": (48,), "compile_grammar": GrammarCompiler(WORDS, [49]).compile, **more}
    return Engine(decoder(), config(max_num_seqs=8, max_model_len=96), token_bytes=WORDS, **options)


def text_of(deltas: list[Delta]) -> bytes:
    return b"".join(delta.text for delta in deltas)


@pytest.mark.parametrize("prefix", [b"", b"ab"])
@pytest.mark.parametrize("drafts", [False, True])
def test_min_tokens_comes_before_stop_ids_and_stop_strings(drafts: bool, prefix: bytes) -> None:
    one = engine(proposer=PromptLookup()) if drafts else engine()
    sampling = [SamplingParams(temperature=t, seed=3, logit_bias={49: 9.0, 2: 9.0}) for t in (0.0, 2.0)]
    fields: dict[str, Any] = {"stop_ids": {49}, "max_tokens": 30, "forced_prefix": prefix}
    for n in (0, 1, 7):
        for number, each in enumerate(sampling):
            one.add(request(f"{n} {number}", (3, 2, 2, 2, 2), sampling=each, min_tokens=n, **fields))
            one.add(
                request(f"stop {n} {number}", (3, 2, 2), sampling=each, min_tokens=n, stop=(b"c",), **fields)
            )
    found = drain(one)
    for n in (0, 1, 7):
        for number in range(2):
            ids = [token.id for token in tokens_of(found[f"{n} {number}"])]
            assert len(ids) >= n and 49 not in ids[:n]
            assert len(text_of(found[f"stop {n} {number}"])) >= n
    assert tokens_of(found["0 0"])[-1].id == 49  # the end is likely
    ended = engine()
    ended.add(request("g", (1, 2), grammar=Grammar(regex="ab"), stop_ids={49}, max_tokens=30, min_tokens=9))
    assert text_of(drain(ended)["g"]) == b"ab"  # the grammar ends before


@pytest.mark.parametrize("drafts", [False, True])
def test_engine_samples_as_without_cache(drafts: bool) -> None:
    mixed = engine(proposer=PromptLookup()) if drafts else engine()
    requests = []
    for n, settings in enumerate(SETTINGS):
        sampling, prefix = SamplingParams(seed=n + 1, **settings), b"abc" if n % 2 else b""
        options = {"max_tokens": 24, "forced_prefix": prefix, "top_log_probs": 3}
        requests.append(request(str(n), (n + 1, 2, 3, 1, 2, 3), sampling=sampling, **options))
        mixed.add(requests[-1])
        # A scored prompt between them in every batch
        mixed.add(request(f"scored {n}", range(n + 9), max_tokens=3, prompt_log_probs=True))
    found = drain(mixed)
    for one in requests:
        stream = generate_without_cache(
            decoder(), list(one.ids), one.sampling, max_tokens=24, banned_ids=(48,),
            forced_prefix=one.forced_prefix, token_bytes=WORDS, top_log_probs=3,
        )  # fmt: skip
        tokens, alone = tokens_of(found[one.id]), list(stream)
        assert_same(tokens, alone)
        for a, b in zip(tokens, alone, strict=True):
            assert [i for i, _ in a.alternatives] == [i for i, _ in b.alternatives]
            assert [p for _, p in a.alternatives] == pytest.approx([p for _, p in b.alternatives], abs=1e-4)
        assert one.forced_prefix + text_of(found[one.id]) == b"".join(WORDS[t.id] for t in tokens)


def test_grammars_end_only_their_requests() -> None:
    """A grammar with a forced prefix begins after it."""
    patterns = {"digits": "[0-9]{3}", "name": "[a-e]{2,4}", "object": r'\{"a":(12|ab)\}', "healed": "x[0-9]"}
    begun = {name: b"ab " if name == "healed" else b"" for name in patterns}
    sampling = SamplingParams(temperature=1, top_p=1, seed=3)
    mixed = engine(proposer=PromptLookup())
    for name, regex in patterns.items():
        fields = {"forced_prefix": begun[name], "stop_ids": frozenset({49}), "max_tokens": 40}
        mixed.add(request(name, (1, 2, 3), sampling=sampling, grammar=Grammar(regex=regex), **fields))
    mixed.add(request("stuck", (5,), sampling=sampling, grammar=Grammar(regex="a(b|Z)Q")))
    mixed.add(request("free", (1, 2, 3), sampling=sampling, max_tokens=30))
    found = drain(mixed)
    for name, regex in patterns.items():
        text = text_of(found[name])
        assert found[name][-1].finish_reason == "stop" and re.fullmatch(regex.encode(), text)
        assert begun[name] + text == b"".join(WORDS[t.id] for t in tokens_of(found[name]) if t.id != 49)
    assert found["stuck"][-1].finish_reason == "abort" and text_of(found["stuck"]) == b"ab"
    assert [bool(deltas[-1].error) for deltas in found.values()] == [name == "stuck" for name in found]
    assert found["free"][-1].finish_reason == "length" and len(tokens_of(found["free"])) == 30


def test_stop_string_ends_request_across_tokens() -> None:
    one = request(ids=(4, 5), sampling=SamplingParams(temperature=1, seed=8), max_tokens=40)
    text = text_of(drain(engine(), [one])["one"])
    stop = text[11:15]
    deltas = drain(engine(), [one.model_copy(update={"stop": (stop, b"never")})])["one"]
    assert text_of(deltas) == text[: text.index(stop)]
    assert deltas[-1].finish_reason == "stop"


def test_nan_logits_abort_only_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParams(temperature=1, seed=4)
    names = ("healthy", "ill", "sound")
    requests = [request(name, (n, 2), sampling=sampling, max_tokens=9) for n, name in enumerate(names, 1)]
    alone, with_nan = ids_of(run(engine(), requests)), engine()
    real, steps = with_nan.runner.run, iter(range(100))

    def nan_logits(batch: Any) -> torch.Tensor:
        logits = real(batch).clone()
        if next(steps) == 4:
            logits[1] = float("nan")
        return logits

    monkeypatch.setattr(with_nan.runner, "run", nan_logits)
    found = drain(with_nan, requests)
    ends = {name: deltas[-1].finish_reason for name, deltas in found.items()}
    assert ends == {"healthy": "length", "ill": "abort", "sound": "length"}
    got = {name: [t.id for t in tokens_of(deltas)] for name, deltas in found.items()}
    assert got == {**alone, "ill": alone["ill"][:4]}


LETTERS = st.integers(0, 2).map(lambda i: b"abc"[i : i + 1])
TEXTS = st.lists(LETTERS, min_size=1, max_size=4).map(b"".join)


def first_stop(text: bytes, stops: list[bytes]) -> tuple[int, bytes] | None:
    """Start and value of the stop string that is complete first; tries every end."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end - len(stop), stop
    return None


@given(st.lists(st.lists(LETTERS, max_size=5).map(b"".join), max_size=12), st.lists(TEXTS, max_size=4))
def test_stop_strings_match_search_of_whole_text(pieces: list[bytes], stops: list[bytes]) -> None:
    stream, shown, whole = StopStringChecker(stops), b"", b""
    for piece in pieces:
        whole += piece
        shown += stream.add(piece)
        found = first_stop(whole, stops)
        if found is None:
            # No byte is shown that a stop string could still cover, and no other byte is held back.
            swallowed = [n for stop in stops for n in range(len(stop)) if whole.endswith(stop[:n])]
            assert shown == whole[: len(whole) - max(swallowed, default=0)] and stream.matched is None
        else:
            assert (shown, stream.matched) == (whole[: found[0]], found[1])
    shown += stream.flush()
    found = first_stop(whole, stops)
    assert shown == (whole if found is None else whole[: found[0]])
    assert stream.flush() == b""
