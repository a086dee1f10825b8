"""Does speculation pay at batch 1 on code? The same tokens, with guesses from the text itself and without.

    .venv/bin/python bench/engine/speculative.py [--model quickstart/pretrain] [--tokens 256] [--prompts 8] [--quick]

The model is the quickstart's (`make quickstart` first). Prompts are the beginnings of held-out files of its own corpus;
each is continued greedily and by sampling, both ways in turn. Printed for both: tokens a second, the share of guesses that
came true, tokens a step. That no token differs is checked on the way.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))
import torch
from bench._run import claim

from whorl.engine import SamplingParams, load_for_sampling
from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.engine.speculative import PromptLookup
from whorl.machine.device_probe import probe
from whorl.store import Store
from whorl.tokens.shards import TokenSet

PROMPT = 128


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--model", default="quickstart/pretrain")
    args.add_argument("--token-set", default="quickstart/tokens")
    args.add_argument("--tokens", type=int, default=256)
    args.add_argument("--prompts", type=int, default=8)
    args.add_argument("--store", default=None)
    args.add_argument("--quick", action="store_true")
    given = args.parse_args()
    n_prompts, n_tokens = (2, 64) if given.quick else (given.prompts, given.tokens)
    store = Store(given.store)
    torch.set_num_threads(1)
    model = load_for_sampling(store.open(given.model).path, probe())
    documents = TokenSet(store.open(given.token_set).path).split("validation").iter_documents()
    prompts = [tuple(int(i) for i in d[:PROMPT]) for d in documents if len(d) > PROMPT][:n_prompts]
    config = EngineConfig(max_num_seqs=1, max_model_len=PROMPT + n_tokens)
    samples, ratios = [], {}
    for name, sampling in (
        ("greedy", SamplingParams(temperature=0)),
        ("sampled at 0.8", SamplingParams(seed=1)),
    ):
        seconds: dict[str, list[float]] = {"plain": [], "guessed": []}
        plain, guessed = Engine(model, config), Engine(model, config, proposer=PromptLookup())
        for number, ids in enumerate(prompts):
            texts = []
            for kind, engine in (("plain", plain), ("guessed", guessed)):
                engine.cache.invalidate_all()
                began = time.perf_counter()
                engine.add(Request(id=str(number), ids=ids, sampling=sampling, max_tokens=n_tokens))
                texts.append([t.id for d in _run(engine) for t in d])
                seconds[kind].append(time.perf_counter() - began)
            if texts[0] != texts[1]:
                print(
                    "texts differ from token",
                    next(i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b),
                )
        stats = guessed.stats
        ratios[name] = median(a / b for a, b in zip(seconds["plain"], seconds["guessed"], strict=True))
        rate = {kind: n_tokens * len(prompts) / sum(s) for kind, s in seconds.items()}
        accepted = stats.accepted_tokens / max(1, stats.drafted_tokens)
        print(
            f"{name}: {rate['plain']:,.0f} tokens/s without, {rate['guessed']:,.0f} with; {accepted:.0%} of "
            f"{stats.drafted_tokens:,} guesses came true; {n_tokens * len(prompts) / stats.steps:.2f} tokens a step; "
            f"{ratios[name]:.2f} x (median prompt)",
            flush=True,
        )
        samples.append({"name": name, **seconds, "accepted": accepted})
    best = max(ratios.values())
    claim(
        "speculation by look-up against none, batch 1, code: tokens a second",
        ours=best, peer=1.0, unit="x", ratio=best, bar=1.5, ok=best >= 1.5, samples=samples, quick=given.quick,
    )  # fmt: skip


def _run(engine: Engine) -> list[tuple]:
    deltas = []
    while engine.busy:
        deltas += [d.tokens for d in engine.step()]
    return deltas


if __name__ == "__main__":
    main()
