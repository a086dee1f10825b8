"""Sampling one token for each of 32 rows on one core: the batched sampler against a row-by-row torch implementation.

    python bench/engine/sampler.py [--quick]

The peer takes each row through softmax, sort, cumulative sum, truncation and `multinomial`, and through log-softmax for
the log-probability; without truncation it does not sort. Logits fall with the logarithm of a token's rank, as in
language models, with a slope that differs between rows. Rows with penalties have 200 previous ids; rows with a grammar
have a mask that allows a tenth of the ids. The bar applies to the slowest kind at the larger vocabulary; all kinds are
printed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse_quick, sized
from bench.engine.support import models

from whorl.engine import Sampler, SamplerRow, SamplingParams
from whorl.engine.cpu import NativeStep, unsupported_reason
from whorl.engine.cpu.sampling import row_sampler
from whorl.engine.sampling.penalties import TokenCounts
from whorl.tracking.seeds import generator

ROWS, BEFORE, BAR = 32, 200, 0.25
KINDS = {
    "greedy": SamplingParams(temperature=0),
    "temperature 1": SamplingParams(temperature=1, top_p=1),
    "temperature": SamplingParams(top_p=1),
    "min-p": SamplingParams(top_p=1, min_p=0.05),
    "top-k 50": SamplingParams(top_p=1, top_k=50),
    "top-p 0.95": SamplingParams(),
    "all cuts": SamplingParams(top_k=100, top_p=0.9, min_p=0.01),
    "penalties": SamplingParams(top_p=1, repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.2),
    "biases": SamplingParams(top_p=1, logit_bias=dict.fromkeys(range(20), 1.0)),
    "grammar": SamplingParams(top_p=1),
    "mixed": SamplingParams(),
}


def plain(z: torch.Tensor, row: SamplerRow, g: torch.Generator) -> tuple[int, float, float]:
    """The reference: (id, log-probability, log-probability before temperature and truncation). z: [V]."""
    s, raw = row.sampling, z.log_softmax(-1)
    z = z.clone()
    for number, bias in s.logit_bias.items():
        z[number] += bias
    if row.allowed_mask is not None:
        z[~torch.from_numpy(row.allowed_mask)] = -torch.inf
    if s.has_penalties:
        output = torch.tensor(row.output)
        seen = torch.cat([torch.tensor(row.prompt), output]).unique()
        z[seen] = torch.where(z[seen] > 0, z[seen] / s.repetition_penalty, z[seen] * s.repetition_penalty)
        counts = torch.bincount(output, minlength=len(z))
        z -= s.frequency_penalty * counts + s.presence_penalty * (counts > 0)
    if s.temperature == 0:
        chosen = int(z.argmax())
        return chosen, 0.0, float(raw[chosen])
    shares = (z / s.temperature).softmax(-1)
    if s.min_p:
        shares[shares < s.min_p * shares.max()] = 0
    if s.top_k or s.top_p < 1:
        shares, ids = shares.sort(descending=True)
        if s.top_k:
            shares[s.top_k :] = 0
        reached = shares.cumsum(-1)
        shares[reached - shares >= s.top_p * reached[-1]] = 0
        shares = torch.zeros_like(shares).scatter(0, ids, shares)
    shares /= shares.sum()
    chosen = int(torch.multinomial(shares, 1, generator=g))
    return chosen, float(shares[chosen].log()), float(raw[chosen])


def median_seconds(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each contender; they alternate round by round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in times.items()}


def logits_of(vocab: int, g: torch.Generator) -> torch.Tensor:
    """Logits [32, vocab]: minus 1.2 to 2.2 times the log rank, with noise, ids in random order."""
    slopes = torch.linspace(1.2, 2.2, ROWS)[:, None]
    ranks = torch.stack([torch.randperm(vocab, generator=g) for _ in range(ROWS)])
    return -slopes * (ranks + 1.0).log() + 0.3 * torch.randn(ROWS, vocab, generator=g)


def rows_of(kind: str, vocab: int) -> list[SamplerRow]:
    g = np.random.default_rng(1)
    others = [s for name, s in KINDS.items() if name not in ("mixed", "grammar")]
    rows = []
    for n in range(ROWS):
        settings = others[n % len(others)] if kind == "mixed" else KINDS[kind]
        ids = g.integers(0, vocab, BEFORE).tolist()
        mask = g.random(vocab) < 0.1 if kind == "grammar" else None
        prompt, output = ids[: BEFORE // 2], ids[BEFORE // 2 :]
        rows.append(SamplerRow(settings, n, n, prompt, output, mask, token_counts=TokenCounts(prompt)))
    return rows


def main() -> None:
    quick = parse_quick(__doc__)
    vocabs = sized((8_192, 32_000), (256, 512))
    torch.set_num_threads(1)
    g, found = generator(0, "bench"), []
    model = models.model("4M")
    step = None if unsupported_reason(model) else NativeStep(model, 32, threads=1)
    print(f"{ROWS} rows: milliseconds per step, ours | row by row in torch")
    for vocab in vocabs:
        logits, sampler = logits_of(vocab, g), Sampler(vocab)
        sampler.draw_plain = row_sampler(step, sampler.is_banned)  # as the engine's sampler
        for kind in KINDS:
            rows = rows_of(kind, vocab)

            def reference(logits: torch.Tensor = logits, rows: list[SamplerRow] = rows) -> None:
                for z, row in zip(logits, rows, strict=True):
                    plain(z, row, g)

            def ours(
                logits: torch.Tensor = logits, rows: list[SamplerRow] = rows, sampler: Sampler = sampler
            ) -> None:
                sampler(logits, rows)

            contenders = {"ours": ours, "peer": reference}
            median_seconds(contenders, 1)
            took = median_seconds(contenders, sized(3 if quick else 9, 1))
            found.append({"vocab": vocab, "kind": kind, **{k: round(1e3 * v, 4) for k, v in took.items()}})
            print(f"  {vocab:6,}  {kind:14} {1e3 * took['ours']:7.3f} | {1e3 * took['peer']:7.2f}")
    most = max((f for f in found if f["vocab"] == vocabs[-1]), key=lambda f: f["ours"])
    closest = max(found, key=lambda f: f["ours"] / f["peer"])
    print(
        f"closest to peer: {closest['kind']} at {closest['vocab']:,}, {closest['ours'] / closest['peer']:.2f} of its time"
    )
    ratio = most["ours"] / ROWS / BAR
    claim(
        f"sampling one row of {vocabs[-1]:,} logits in at most {BAR} ms, slowest settings ({most['kind']})",
        ours=most["ours"] / ROWS, peer=most["peer"] / ROWS, unit="ms per row", ratio=ratio, bar=1.0, ok=ratio <= 1,
        samples=found, quick=quick, peer_name="row by row in torch",
    )  # fmt: skip


if __name__ == "__main__":
    main()
