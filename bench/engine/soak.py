"""An hour (or minutes) of mixed load on the engine at the limit of its capacity: nothing leaks, nothing is lost or crossed.

.venv/bin/python bench/engine/soak.py [--minutes 60] [--quick]

Three small models (full attention; windows and few key heads; the house's own decoder), one after another, in small caches
with both ways of preemption. Requests of all lengths come in bursts, of several clients and priorities, greedy and sampled,
with shared beginnings; one in eight is aborted at a random moment, one in ten is malformed and must be refused by name. The
books are checked every few steps. At the end of each model: no page is held, every request is accounted for, and a sample
of answers is what the same request gets from an engine that it has for itself. Where two tokens were so nearly equally
likely that rounding may decide (both within 1e-3 in log-probability), the rest of that answer is left out of the
comparison.

Memory is sampled throughout: in the second half of a model's time it may not grow by more than 8 MB beyond the first half.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from pydantic import ValidationError

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.request import Delta, Request, Token
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import WhorlError
from whorl.models import Decoder, DecoderConfig, LanguageModel
from whorl.models.transformer import Transformer
from whorl.models.transformer_config import AttentionConfig, TransformerConfig

VOCAB, LONGEST, GROWTH, SAMPLE = 97, 160, 8e6, 60


def networks() -> Iterator[tuple[str, LanguageModel]]:
    """Small models whose likeliest tokens stand out."""
    full = AttentionConfig(n_heads=4, n_kv_heads=4, head_dim=16)
    near = AttentionConfig(n_heads=4, n_kv_heads=1, head_dim=16, window=24)
    shape = {"vocab_size": VOCAB, "d_model": 64, "n_layers": 2, "mlp_hidden": 128}
    for name, mixers in (("full", {"full": full}), ("windows", {"near": near, "full": full})):
        config = TransformerConfig(**shape, mixers=mixers, tie_embeddings=True)
        yield name, _lively(Transformer(config, torch.Generator().manual_seed(0)))
    own = DecoderConfig(**shape, n_heads=4, n_kv_heads=2, head_dim=16, ngram_buckets=64)
    yield "decoder", _lively(Decoder(own, torch.Generator().manual_seed(0)))


def _lively(model: LanguageModel) -> LanguageModel:
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.add_(torch.randn(p.shape, generator=draw) * 0.2)
    return model.eval()


@dataclass
class Books:
    """What happened, by request. asked: those on their way; kept: a sample of answers, for comparison."""

    name: str
    asked: dict[str, Request] = field(default_factory=dict)
    tokens: dict[str, list[Token]] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    kept: list[tuple[Request, list[Token]]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)

    def count(self, what: str, n: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + n

    def mistake(self, what: str) -> None:
        self.wrong.append(f"{self.name}: {what}")

    def ask(self, request: Request) -> None:
        """It is on its way."""
        self.asked[request.id], self.tokens[request.id] = request, []
        self.count("asked")

    def told(self, delta: Delta, draw: random.Random) -> None:
        """It got further; at its end it is checked, and kept with a chance that keeps the sample even."""
        one = delta.request_id
        if one not in self.asked:
            self.mistake(f"{one} was told of after its end")
            return
        self.tokens[one] += delta.tokens
        if delta.finish_reason is None:
            return
        request, tokens = self.asked.pop(one), self.tokens.pop(one)
        self.count("ended")
        self.count(delta.finish_reason)
        if not self._fits(request, tokens, delta.finish_reason):
            self.mistake(f"{one} ended with {delta.finish_reason} after {len(tokens)} tokens")
        if delta.finish_reason == "abort":
            self.aborted.discard(one)
        elif len(self.kept) < SAMPLE:
            self.kept.append((request, tokens))
        elif (place := draw.randrange(self.counts["ended"])) < SAMPLE:
            self.kept[place] = request, tokens

    def _fits(self, request: Request, tokens: list[Token], finish: str) -> bool:
        if finish == "abort":
            return request.id in self.aborted
        if finish == "stop":
            return 0 < len(tokens) <= request.max_tokens and tokens[-1].id in request.stop_ids
        return len(tokens) == request.max_tokens or len(tokens) + len(request.ids) >= LONGEST


def well_formed(draw: random.Random, number: int) -> Request:
    """Any request that can be served."""
    n = min(int(draw.lognormvariate(2.5, 1.0)) + 1, LONGEST - 2)
    kind = draw.randrange(4)
    begin = [7 * kind + k % 11 for k in range(min(n, 40))] if draw.random() < 0.4 else []
    ids = (*begin, *(draw.randrange(VOCAB) for _ in range(n - len(begin))))
    sampling = draw.choice(
        [
            SamplingParams(temperature=0),
            SamplingParams(),
            SamplingParams(seed=number, temperature=1.3, top_k=20),
        ]
    )
    return Request(
        id=f"r{number}", ids=ids, sampling=sampling, max_tokens=min(int(draw.expovariate(1 / 25)) + 1, LONGEST),
        priority=draw.choice([0, 0, 0, 1, -1]), client=draw.choice("abc"),
        stop_ids=frozenset(draw.sample(range(VOCAB), draw.choice([0, 0, 2]))),
    )  # fmt: skip


def malformed(draw: random.Random, engine: Engine, number: int) -> bool:
    """Asks for something impossible: -> whether it was refused as it should be."""
    fields = draw.choice(
        [
            {"ids": ()}, {"ids": (VOCAB,)}, {"ids": (-1,)}, {"ids": (1,) * LONGEST}, {"ids": (1,), "max_tokens": 0},
            {"ids": (1,), "stop": (b"",)}, {"ids": (1,), "adapter": "none"}, {"ids": (1,), "grammar": {"regex": "a"}},
        ]
    )  # fmt: skip
    try:
        engine.add(Request(**{"id": f"bad {number}", **fields}))  # type: ignore[arg-type]
    except (ValidationError, WhorlError):
        return True
    return False


def soak(name: str, model: LanguageModel, seconds: float, preemption: str) -> Books:
    """Mixed load for so long, then everything that is on its way to its end."""
    config = EngineConfig(
        block_size=8, max_num_seqs=8, max_model_len=LONGEST, kv_cache_tokens=LONGEST + 240, max_num_batched_tokens=48,
        preemption=preemption,
    )  # fmt: skip
    engine, books, draw = Engine(model, config), Books(name), random.Random(name)
    process, numbers = psutil.Process(), itertools.count()
    began = looked = time.monotonic()
    while True:
        now = time.monotonic()
        if now - began < seconds and len(engine.sequences()) < draw.choice([1, 12, 24]):
            for _ in range(draw.choice([1, 1, 6])):
                number = next(numbers)
                if draw.random() < 0.1:
                    books.count("refused")
                    if not malformed(draw, engine, number):
                        books.mistake(f"a malformed request was taken ({number})")
                    continue
                request = well_formed(draw, number)
                books.ask(request)
                engine.add(request)
        elif now - began >= seconds and not engine.busy:
            break
        alive = engine.sequences()
        if alive and draw.random() < 0.02:
            victim = draw.choice(alive).request.id
            books.aborted.add(victim)
            if not engine.abort(victim):
                books.mistake(f"{victim} could not be aborted")
        for delta in engine.step():
            books.told(delta, draw)
        books.count("steps")
        if books.counts["steps"] % 7 == 0:
            engine.check_integrity()
        if now - looked > max(0.2, seconds / 200):
            looked = now
            books.memory.append((now - began, process.memory_info().rss))
    engine.check_integrity()
    for pool in (group.pool for group in engine.cache.groups):
        if pool.n_used:
            books.mistake(f"{pool.n_used} pages are held by nobody")
    for one in books.asked:
        books.mistake(f"{one} never ended")
    books.count("preemptions", engine.stats.n_preemptions)
    books.count("tokens", engine.stats.output_tokens)
    for request, tokens in books.kept:
        _compare(books, model, request, tokens)
    return books


def _compare(books: Books, model: LanguageModel, request: Request, tokens: list[Token]) -> None:
    """An answer against that of an engine which its request has for itself."""
    engine = Engine(model, EngineConfig(max_num_seqs=1, max_model_len=LONGEST, enable_prefix_caching=False))
    engine.add(request)
    alone: list[Token] = []
    while engine.busy:
        for delta in engine.step():
            alone += delta.tokens
    books.count("compared")
    for told, own in itertools.zip_longest(tokens, alone):
        if told is None or own is None or told.id != own.id:
            if told is not None and own is not None and abs(told.raw_log_prob - own.raw_log_prob) < 1e-3:
                books.count("undecided")
            else:
                books.mistake(f"{request.id} is not what it is alone")
            break


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--minutes", type=float, default=60.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    seconds = (0.5 if given.quick else given.minutes) * 60 / 3
    wrong: list[str] = []
    growth, totals = 0.0, dict[str, int]()
    for n, (name, model) in enumerate(networks()):
        books = soak(name, model, seconds, ("recompute", "swap")[n % 2])
        half = seconds / 2
        before = max((rss for at, rss in books.memory if 0.2 * seconds < at <= half), default=0)
        after = max((rss for at, rss in books.memory if at > half), default=before)
        growth = max(growth, after - before)
        wrong += books.wrong
        for what, count in books.counts.items():
            totals[what] = totals.get(what, 0) + count
        print(f"{name}: {books.counts}, {(after - before) / 1e6:+.1f} MB", flush=True)
        gc.collect()
    for line in wrong[:20]:
        print(line)
    claim(
        "mixed load at the limit: mistakes (leaked, lost, crossed), and MB that memory grew by", ours=growth / 1e6,
        peer=GROWTH / 1e6, unit="MB", ratio=float(len(wrong)), bar=0.0, ok=not wrong and growth <= GROWTH,
        samples=[totals], quick=given.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
