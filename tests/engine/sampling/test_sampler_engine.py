"""Sampler, stop strings and grammars in the engine, compared with `generate`, which runs one request."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.support.engine.parity import decoder, drain, tokens_of

from whorl.engine import generate
from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.request import Delta, Grammar, Request
from whorl.engine.sampling.grammar import GrammarCompiler
from whorl.engine.sampling_params import SamplingParams
from whorl.engine.speculative import PromptLookup

# Of 50 ids the last two have no text: 48 is banned, 49 ends an output
WORDS = [bytes([n]) for n in b'abcdefghijklmnopqrstuvwxyz0123456789{}:," '] + [b"ab", b"12", b"xyz", b"cde"]
WORDS += [b"\n", b"-", b"", b""]
CONFIG = EngineConfig(block_size=4, max_num_seqs=8, max_model_len=96, max_num_batched_tokens=16)
SETTINGS = [
    SamplingParams(temperature=0, seed=1),
    SamplingParams(temperature=1, top_p=1, seed=2),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3),
    SamplingParams(temperature=1, top_k=7, min_p=0.05, seed=4),
    SamplingParams(
        temperature=1, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7, seed=5
    ),
    SamplingParams(temperature=1, logit_bias={3: 4.0, 9: -50.0}, seed=6),
]


def engine(**more: Any) -> Engine:
    compiler = GrammarCompiler(WORDS, [49])
    return Engine(
        decoder(), CONFIG, token_bytes=WORDS, banned_ids=(48,), compile_grammar=compiler.compile, **more
    )


def ids(deltas: list[Delta]) -> list[int]:
    return [token.id for token in tokens_of(deltas)]


@pytest.mark.parametrize("drafts", [False, True])
def test_engine_samples_as_generate(drafts: bool) -> None:
    mixed = engine(proposer=PromptLookup()) if drafts else engine()
    for n, settings in enumerate(SETTINGS):
        prefix = b"abc" if n % 2 else b""
        prompt = (n + 1, 2, 3, 1, 2, 3)
        mixed.add(
            Request(
                id=str(n), ids=prompt, sampling=settings, max_tokens=24, forced_prefix=prefix, top_log_probs=3
            )
        )
        # A scored prompt between them in every batch
        mixed.add(Request(id=f"scored {n}", ids=tuple(range(n + 9)), max_tokens=3, prompt_log_probs=True))
    found = drain(mixed)
    for n, settings in enumerate(SETTINGS):
        stream = generate(
            decoder(), [n + 1, 2, 3, 1, 2, 3], settings, torch.Generator(), max_tokens=24, banned_ids=(48,),
            forced_prefix=b"abc" if n % 2 else b"", token_bytes=WORDS, top_log_probs=3,
        )  # fmt: skip
        tokens = tokens_of(found[str(n)])
        for ours, alone in zip(tokens, stream, strict=True):
            assert ours.id == alone.id
            assert [i for i, _ in ours.alternatives] == [i for i, _ in alone.alternatives]
            pairs = [(ours.log_prob, alone.log_prob), (ours.raw_log_prob, alone.raw_log_prob)]
            pairs += [(a[1], b[1]) for a, b in zip(ours.alternatives, alone.alternatives, strict=True)]
            assert all(a == pytest.approx(b, abs=1e-4) for a, b in pairs)
        text = b"".join(delta.text for delta in found[str(n)])
        assert text == b"".join(WORDS[t.id] for t in tokens) and text.startswith(b"abc" if n % 2 else b"")


def test_grammars_end_only_their_requests() -> None:
    mixed = engine(proposer=PromptLookup())
    patterns = {"digits": "[0-9]{3}", "name": "[a-e]{2,4}", "object": r'\{"a":(12|ab)\}', "healed": "x[0-9]"}
    sampling = SamplingParams(temperature=1, top_p=1, seed=3)
    for name, regex in patterns.items():
        mixed.add(
            Request(
                id=name, ids=(1, 2, 3), sampling=sampling, max_tokens=40, grammar=Grammar(regex=regex),
                stop_ids=frozenset({49}), forced_prefix=b"ab " if name == "healed" else b"",
            )
        )  # fmt: skip
    mixed.add(Request(id="stuck", ids=(5,), sampling=sampling, grammar=Grammar(regex="a(b|Z)Q")))
    mixed.add(Request(id="free", ids=(1, 2, 3), sampling=sampling, max_tokens=30))
    found = drain(mixed)
    for name, regex in patterns.items():
        text = b"".join(delta.text for delta in found[name])
        begun = b"ab " if name == "healed" else b""
        assert found[name][-1].finish_reason == "stop" and text.startswith(begun)
        assert re.fullmatch(regex.encode(), text.removeprefix(begun))
    assert found["stuck"][-1].finish_reason == "abort" and b"".join(d.text for d in found["stuck"]) == b"ab"
    assert found["free"][-1].finish_reason == "length" and len(ids(found["free"])) == 30


def test_stop_string_ends_request_across_tokens() -> None:
    free = engine()
    free.add(Request(id="one", ids=(4, 5), sampling=SamplingParams(temperature=1, seed=8), max_tokens=40))
    text = b"".join(delta.text for delta in drain(free)["one"])
    stop = text[11:15]
    stopped = engine()
    stopped.add(
        Request(
            id="one",
            ids=(4, 5),
            sampling=SamplingParams(temperature=1, seed=8),
            max_tokens=40,
            stop=(stop, b"never"),
        )
    )
    deltas = drain(stopped)["one"]
    assert b"".join(delta.text for delta in deltas) == text[: text.index(stop)]
    assert deltas[-1].finish_reason == "stop"


def test_nan_logits_abort_only_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = engine()
    names = ("healthy", "ill", "sound")
    sampling = SamplingParams(temperature=1, seed=4)
    for n, name in enumerate(names):
        mixed.add(Request(id=name, ids=(n + 1, 2), sampling=sampling, max_tokens=9))
    alone = {name: ids(deltas) for name, deltas in drain(mixed).items()}
    with_nan = engine()
    for n, name in enumerate(names):
        with_nan.add(Request(id=name, ids=(n + 1, 2), sampling=sampling, max_tokens=9))
    real, steps = with_nan.runner.run, iter(range(100))

    def nan_logits(batch: Any) -> torch.Tensor:
        logits = real(batch).clone()
        if next(steps) == 4:
            logits[1] = float("nan")
        return logits

    monkeypatch.setattr(with_nan.runner, "run", nan_logits)
    found = drain(with_nan)
    assert {name: deltas[-1].finish_reason for name, deltas in found.items()} == {
        "healthy": "length", "ill": "abort", "sound": "length",
    }  # fmt: skip
    assert ids(found["ill"]) == alone["ill"][:4]
    assert all(ids(found[name]) == alone[name] for name in ("healthy", "sound"))
