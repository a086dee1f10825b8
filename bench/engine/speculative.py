"""Speculative decoding by prompt lookup at batch size 1 on code, against plain decoding.

    python bench/engine/speculative.py [--model quickstart/pretrain] [--tokens 256] [--prompts 8] [--quick]

The model is the quickstart's (run `make quickstart` first); `--smoke` uses random weights. Prompts are the first tokens
of held-out files of its corpus. Each is continued greedily and by sampling, with and without speculation in
alternation. Printed for both: tokens/s, the acceptance rate, tokens per step, and the first token that differs, if any.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))
import torch
from bench._run import PRETRAINED, claim, parse, quickstart_store, smoke
from bench.engine.support import models

from whorl.engine import SamplingParams, load_for_sampling
from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.engine.speculation.prompt_lookup import PromptLookup
from whorl.machine.device_probe import probe
from whorl.models import LanguageModel
from whorl.tokens.shards import TokenSet

PROMPT = 128


def main() -> None:
    given = parse(
        __doc__,
        lambda p: (
            p.add_argument("--model", default=PRETRAINED),
            p.add_argument("--token-set", default="quickstart/tokens"),
            p.add_argument("--tokens", type=int, default=256),
            p.add_argument("--prompts", type=int, default=8),
            p.add_argument("--store", default=None),
            p.add_argument("--quick", action="store_true"),
        ),
        smoke={"tokens": 16, "prompts": 2},
    )
    n_prompts, n_tokens = (2, 64) if given.quick else (given.prompts, given.tokens)
    torch.set_num_threads(1)
    model: LanguageModel
    if smoke():
        model = models.model("4M")
        prompts = [tuple(ids) for ids in models.prompts("4M", n_prompts, PROMPT)]
    else:
        store = quickstart_store(given.store, given.model, given.token_set)
        model = load_for_sampling(store.open(given.model).path, probe())
        documents = TokenSet(store.open(given.token_set).path).split("validation").iter_documents()
        prompts = [tuple(int(i) for i in d[:PROMPT]) for d in documents if len(d) > PROMPT][:n_prompts]
    config = EngineConfig(max_num_seqs=1, max_model_len=PROMPT + n_tokens)
    samples, ratios = [], {}
    for name, sampling in (
        ("greedy", SamplingParams(temperature=0)),
        ("sampled at 0.8", SamplingParams(seed=1)),
    ):
        seconds: dict[str, list[float]] = {"plain": [], "speculative": []}
        plain, speculative = Engine(model, config), Engine(model, config, proposer=PromptLookup())
        for number, ids in enumerate(prompts):
            texts = []
            for kind, engine in (("plain", plain), ("speculative", speculative)):
                engine.cache.invalidate_all()
                began = time.perf_counter()
                engine.add(Request(id=str(number), ids=ids, sampling=sampling, max_tokens=n_tokens))
                texts.append([t.id for d in _run(engine) for t in d])
                seconds[kind].append(time.perf_counter() - began)
            if texts[0] != texts[1]:
                print(
                    "outputs differ from token",
                    next(i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b),
                )
        stats = speculative.stats
        ratios[name] = median(a / b for a, b in zip(seconds["plain"], seconds["speculative"], strict=True))
        rate = {kind: n_tokens * len(prompts) / sum(s) for kind, s in seconds.items()}
        accepted = stats.accepted_tokens / max(1, stats.drafted_tokens)
        print(
            f"{name}: {rate['plain']:,.0f} tokens/s without, {rate['speculative']:,.0f} with; {accepted:.0%} of "
            f"{stats.drafted_tokens:,} draft tokens accepted; {n_tokens * len(prompts) / stats.steps:.2f} tokens per step; "
            f"{ratios[name]:.2f} x (median prompt)",
            flush=True,
        )
        samples.append({"name": name, **seconds, "accepted": accepted})
    best = max(ratios.values())
    claim(
        "speculation by prompt lookup, one row, code: tokens/s",
        ours=best, peer=1.0, unit="x", ratio=best, bar=1.5, ok=best >= 1.5, samples=samples, quick=given.quick,
        peer_name="without speculation",
    )  # fmt: skip


def _run(engine: Engine) -> list[tuple]:
    deltas = []
    while engine.busy:
        deltas += [d.tokens for d in engine.step()]
    return deltas


if __name__ == "__main__":
    main()
