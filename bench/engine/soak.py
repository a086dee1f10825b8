"""Mixed load at the limit of the engine's capacity, for an hour by default: no leaks, no lost or mixed-up requests.

    python bench/engine/soak.py [--minutes 60]
    python bench/engine/soak.py --quick     # 24 seconds

Three small models (full attention; sliding windows with few key heads; `whorl_decoder`) run one after another in small
caches with both kinds of preemption. Requests of all lengths arrive in bursts from several clients and with several
priorities, greedy and sampled, with shared prefixes. One in eight is aborted at a random moment. One in ten is
malformed and must be rejected. The block tables are checked every few steps.

At the end of each model, no page is held, every request has finished, and a sample of outputs equals the output of an
engine that runs the request alone. If two tokens are within 1e-3 in log-probability, rounding may decide between them;
the rest of that output is not compared.

Memory is sampled throughout. In the second half of a model's time it may grow by at most 8 MB beyond the first half.
"""

from __future__ import annotations

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
from bench._run import claim, parse, sized

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.request import Delta, Request, Token
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import WhorlError
from whorl.models import LanguageModel, whorl_decoder
from whorl.models.transformer import Transformer
from whorl.models.transformer_config import AttentionConfig, TransformerConfig

VOCAB, LONGEST, GROWTH, SAMPLE = 97, 160, 8e6, sized(60, 4)


def networks() -> Iterator[tuple[str, LanguageModel]]:
    """Small models with peaked distributions."""
    full = AttentionConfig(n_heads=4, n_kv_heads=4, head_dim=16)
    near = AttentionConfig(n_heads=4, n_kv_heads=1, head_dim=16, window=24)
    shape = {"vocab_size": VOCAB, "d_model": 64, "n_layers": 2, "mlp_hidden": 128}
    for name, mixers in (("full", {"full": full}), ("windows", {"near": near, "full": full})):
        config = TransformerConfig(**shape, mixers=mixers, tie_embeddings=True)
        yield name, _perturb(Transformer(config, torch.Generator().manual_seed(0)))
    own = whorl_decoder(**shape, n_heads=4, n_kv_heads=2, head_dim=16, ngram_buckets=64)
    yield "decoder", _perturb(Transformer(own, torch.Generator().manual_seed(0)))


def _perturb(model: LanguageModel) -> LanguageModel:
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.add_(torch.randn(p.shape, generator=draw) * 0.2)
    return model.eval()


@dataclass
class Record:
    """Events by request. pending: requests in progress; kept: a sample of outputs, for comparison."""

    name: str
    pending: dict[str, Request] = field(default_factory=dict)
    tokens: dict[str, list[Token]] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    kept: list[tuple[Request, list[Token]]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)

    def count(self, what: str, n: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + n

    def mistake(self, what: str) -> None:
        self.mistakes.append(f"{self.name}: {what}")

    def start(self, request: Request) -> None:
        """Record a new request."""
        self.pending[request.id], self.tokens[request.id] = request, []
        self.count("requests")

    def receive(self, delta: Delta, draw: random.Random) -> None:
        """Record new tokens. A finished output is checked, and kept by reservoir sampling."""
        one = delta.request_id
        if one not in self.pending:
            self.mistake(f"{one}: tokens after its end")
            return
        self.tokens[one] += delta.tokens
        if delta.finish_reason is None:
            return
        request, tokens = self.pending.pop(one), self.tokens.pop(one)
        self.count("ended")
        self.count(delta.finish_reason)
        if not self._is_complete(request, tokens, delta.finish_reason):
            self.mistake(f"{one} ended with {delta.finish_reason} after {len(tokens)} tokens")
        if delta.finish_reason == "abort":
            self.aborted.discard(one)
        elif len(self.kept) < SAMPLE:
            self.kept.append((request, tokens))
        elif (place := draw.randrange(self.counts["ended"])) < SAMPLE:
            self.kept[place] = request, tokens

    def _is_complete(self, request: Request, tokens: list[Token], finish: str) -> bool:
        if finish == "abort":
            return request.id in self.aborted
        if finish == "stop":
            return 0 < len(tokens) <= request.max_tokens and tokens[-1].id in request.stop_ids
        return len(tokens) == request.max_tokens or len(tokens) + len(request.ids) >= LONGEST


def well_formed(draw: random.Random, number: int) -> Request:
    """A random valid request."""
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
    """Add an invalid request. Return whether it was rejected."""
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


def soak(name: str, model: LanguageModel, seconds: float, preemption: str) -> Record:
    """Run mixed load for `seconds`, then finish all pending requests."""
    config = EngineConfig(
        block_size=8, max_num_seqs=8, max_model_len=LONGEST, kv_cache_tokens=LONGEST + 240, max_num_batched_tokens=48,
        preemption=preemption,
    )  # fmt: skip
    engine, record, draw = Engine(model, config), Record(name), random.Random(name)
    process, numbers = psutil.Process(), itertools.count()
    began = looked = time.monotonic()
    while True:
        now = time.monotonic()
        if now - began < seconds and len(engine.sequences()) < draw.choice([1, 12, 24]):
            for _ in range(draw.choice([1, 1, 6])):
                number = next(numbers)
                if draw.random() < 0.1:
                    record.count("rejected")
                    if not malformed(draw, engine, number):
                        record.mistake(f"a malformed request was accepted ({number})")
                    continue
                request = well_formed(draw, number)
                record.start(request)
                engine.add(request)
        elif now - began >= seconds and not engine.busy:
            break
        alive = engine.sequences()
        if alive and draw.random() < 0.02:
            victim = draw.choice(alive).request.id
            record.aborted.add(victim)
            if not engine.abort(victim):
                record.mistake(f"{victim} could not be aborted")
        for delta in engine.step():
            record.receive(delta, draw)
        record.count("steps")
        if record.counts["steps"] % 7 == 0:
            engine.check_integrity()
        if now - looked > max(0.2, seconds / 200):
            looked = now
            record.memory.append((now - began, process.memory_info().rss))
    engine.check_integrity()
    for pool in (group.pool for group in engine.cache.groups):
        if pool.n_used:
            record.mistake(f"{pool.n_used} pages are held after the last request")
    for one in record.pending:
        record.mistake(f"{one} never ended")
    record.count("preemptions", engine.stats.n_preemptions)
    record.count("tokens", engine.stats.output_tokens)
    for request, tokens in record.kept:
        _compare(record, model, request, tokens)
    return record


def _compare(record: Record, model: LanguageModel, request: Request, tokens: list[Token]) -> None:
    """Compare an output with that of an engine that runs the request alone."""
    engine = Engine(model, EngineConfig(max_num_seqs=1, max_model_len=LONGEST, enable_prefix_caching=False))
    engine.add(request)
    alone: list[Token] = []
    while engine.busy:
        for delta in engine.step():
            alone += delta.tokens
    record.count("compared")
    for token, own in itertools.zip_longest(tokens, alone):
        if token is None or own is None or token.id != own.id:
            if token is not None and own is not None and abs(token.raw_log_prob - own.raw_log_prob) < 1e-3:
                record.count("undecided")
            else:
                record.mistake(f"{request.id} differs from its output alone")
            break


def main() -> None:
    given = parse(
        __doc__,
        lambda p: (
            p.add_argument("--quick", action="store_true"),
            p.add_argument("--minutes", type=float, default=60.0),
        ),
        smoke={"minutes": 0.03},
    )
    torch.set_num_threads(1)
    seconds = (0.4 if given.quick else given.minutes) * 60 / 3
    mistakes: list[str] = []
    growth, totals = 0.0, dict[str, int]()
    for n, (name, model) in enumerate(networks()):
        record = soak(name, model, seconds, ("recompute", "swap")[n % 2])
        half = seconds / 2
        before = max((rss for at, rss in record.memory if 0.2 * seconds < at <= half), default=0)
        after = max((rss for at, rss in record.memory if at > half), default=before)
        growth = max(growth, after - before)
        mistakes += record.mistakes
        for what, count in record.counts.items():
            totals[what] = totals.get(what, 0) + count
        print(f"{name}: {record.counts}, {(after - before) / 1e6:+.1f} MB", flush=True)
        gc.collect()
    for line in mistakes[:20]:
        print(line)
    claim(
        "memory growth under mixed load at the limit; ratio: leaked pages, lost or mixed-up requests", ours=growth / 1e6,
        peer=GROWTH / 1e6, unit="MB", ratio=float(len(mistakes)), bar=0.0, ok=not mistakes and growth <= GROWTH,
        samples=[totals], quick=given.quick, peer_name="bar",
    )  # fmt: skip


if __name__ == "__main__":
    main()
