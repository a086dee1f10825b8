"""Masked diffusion of text against next-token prediction: equal networks, tokens and steps, on code.

    python bench/generative/text.py [--steps 2000] [--seeds 2]      # 15 minutes on a shared core

A decoder without n-grams and smeared keys (2 layers, width 96) trains on the standard library's source: as a model of the
next token, as masked diffusion of whole rows, and in blocks of 4. Printed and claimed, over the seeds:

- bits per byte of held-out rows: exact for the next token, an upper bound of the others (64 rows, 16 masks of each);
- hidden lines: 2 to 8 tokens of a held-out line, filled greedily by the model of whole rows that sees both sides, or
  continued greedily from the left by the model of the next token;
- four tokens of a pass against one at batch 1, in blocks of 4: tokens/s, and the quality of the text as its nats per token
  under the model of the next token.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
import torch
from bench._run import claim, parse, sized, smoke
from bench.train.precision import WORDS, token_set

from whorl.engine import Engine, EngineConfig, SamplingParams
from whorl.engine.request import Request
from whorl.models import LanguageModel, TransformerConfig, whorl_decoder
from whorl.models.transformer_config import masked_decoder
from whorl.tokens.shards import TokenSet
from whorl.tokens.tokenizer import Tokenizer
from whorl.train.job import Job
from whorl.train.lm.pretrain import pretrain
from whorl.train.metrics import validation

LENGTH = 128
BARS = {"whole rows": 1.35, "blocks of 4": 1.15}


class Last:
    """A callback that keeps the last evaluation."""

    nll = math.nan

    def on_step(self, step: int, metrics: dict[str, float]) -> None: ...
    def on_evaluation(self, step: int, metrics: dict[str, float], model: Any) -> None:
        self.nll = metrics["held_out_nll"]

    def on_checkpoint(self, step: int, seconds: float) -> None: ...
    def on_event(self, step: int, event: dict[str, Any]) -> None: ...


def shapes() -> dict[str, TransformerConfig]:
    decoder = whorl_decoder(
        WORDS, 96, 2, 3, 3, head_dim=32, mlp_hidden=384, smear_keys=False, ngram_orders=(), max_length=LENGTH
    )
    parts = {"whole rows": None, "blocks of 4": 4}
    return {"next token": decoder} | {
        name: masked_decoder(decoder, WORDS, block, LENGTH) for name, block in parts.items()
    }


def train(
    tokens: Path, model: TransformerConfig, steps: int, seed: int, scratch: Path
) -> tuple[LanguageModel, float]:
    last, began = Last(), time.perf_counter()
    objective = "next_token" if model.masked is None else "masked"
    job = Job.model_validate({
        "tokens": str(tokens), "model": model, "objective": objective, "seq_len": LENGTH, "batch_size": 8,
        "steps": steps, "seed": seed, "compile": False, "evaluations": 1, "serial_loader": True,
    })  # fmt: skip
    network = pretrain(job, scratch, last)  # type: ignore[arg-type]
    print(
        f"    seed {seed}, {model.masked}: {last.nll:.3f} nats, {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    return network.eval().requires_grad_(False), last.nll


def hidden_lines(tokens: Path, tokenizer: Tokenizer, n: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Up to `n` (before, line, behind) of held-out documents, spread evenly."""
    ends = {i for i, text in enumerate(tokenizer.text_bytes(WORDS)) if b"\n" in text}
    found = []
    for document in TokenSet(tokens).split("validation").iter_documents():
        ids = [int(i) for i in document]
        breaks = [at for at, i in enumerate(ids) if i in ends]
        for left, right in pairwise(breaks):
            if 2 <= right - left - 1 <= 8 and left >= 32 and right + 24 <= len(ids):
                found.append(
                    (ids[max(0, left - 63) : left + 1], ids[left + 1 : right], ids[right : right + 24])
                )
    return found[:: max(1, len(found) // n)][:n]


def filled(
    model: LanguageModel,
    gaps: list[tuple[list[int], list[int], list[int]]],
    both_sides: bool,
    banned: list[int],
) -> list[tuple[bool, float]]:
    """Whether each line is correct, and its share of correct tokens."""
    engine = Engine(model, EngineConfig.for_batch(8, LENGTH), banned_ids=banned, compile_native=False)
    out: dict[int, list[int]] = {n: [] for n in range(len(gaps))}
    requests = [
        Request(
            id=str(n), ids=tuple(before), suffix=tuple(behind) if both_sides else (), max_tokens=len(line),
            sampling=SamplingParams(temperature=0),
        )
        for n, (before, line, behind) in enumerate(gaps)
    ]  # fmt: skip
    for delta in engine.stream(requests):
        out[int(delta.request_id)] += [token.id for token in delta.tokens]
    pairs = [(out[n], line) for n, (_, line, _) in enumerate(gaps)]
    return [(a == b, mean(x == y for x, y in zip(a, b, strict=True))) for a, b in pairs]


def speed_and_quality(
    model: LanguageModel, judge: LanguageModel, prompts: list[list[int]], steps: int, banned: list[int]
) -> tuple[float, float]:
    """Return tokens/s at batch 1 and nats per token under `judge`."""
    engine = Engine(model, EngineConfig(max_num_seqs=1, max_model_len=LENGTH), banned_ids=banned)
    params, n = SamplingParams(temperature=1, top_p=1, seed=0, steps=steps), LENGTH - 16
    engine.generate(prompts[:1], params, max_tokens=16)
    began = time.perf_counter()
    texts = [engine.generate([ids], params, max_tokens=n)[0].ids for ids in prompts]
    rate = sum(map(len, texts)) / (time.perf_counter() - began)
    nats = []
    for before, ids in zip(prompts, texts, strict=True):
        row = torch.tensor([before + ids])
        log_probs = judge.logits(judge(row[:, :-1])).log_softmax(-1)
        nats.append(-float(log_probs.gather(-1, row[:, 1:, None])[0, len(before) - 1 :].mean()))
    return rate, mean(nats)


def main() -> None:
    args = parse(
        __doc__,
        lambda p: (
            p.add_argument("--steps", type=int, default=2000),
            p.add_argument("--seeds", type=int, default=2),
        ),
        smoke={"steps": 10, "seeds": 1},
    )
    torch.set_num_threads(1)
    validation.HELD_OUT_ROWS, validation.MASKINGS = sized((64, 16), (4, 2))
    nll: dict[str, list[float]] = {name: [] for name in shapes()}
    lines: dict[str, list[float]] = {"both sides": [], "left": []}
    pace: dict[int, list[tuple[float, float]]] = {1: [], 4: []}
    with tempfile.TemporaryDirectory() as folder:
        tokens = token_set(Path(folder) / f"tokens-{smoke()}")
        tokenizer = Tokenizer.load(tokens)
        banned = tokenizer.banned_ids(WORDS)
        gaps = hidden_lines(tokens, tokenizer, sized(400, 8))
        for seed in range(args.seeds):
            models = {}
            for name, shape in shapes().items():
                models[name], found = train(tokens, shape, args.steps, seed, Path(folder) / f"{name}{seed}")
                nll[name].append(found)
            for way, name in (("both sides", "whole rows"), ("left", "next token")):
                results = filled(models[name], gaps, way == "both sides", banned)
                lines[way].append(mean(correct for correct, _ in results))
                print(
                    f"    {way}: {lines[way][-1]:.3f} of lines, {mean(s for _, s in results):.3f} of tokens",
                    flush=True,
                )
            prompts = [before[:16] for before, _, _ in gaps[:: max(1, len(gaps) // 8)]][:8]
            for steps, found_pace in pace.items():
                rate, nats = speed_and_quality(
                    models["blocks of 4"], models["next token"], prompts, steps, banned
                )
                found_pace.append((rate, nats))
                print(
                    f"    {steps} passes of a block: {rate:.0f} tokens/s, {nats:.3f} nats per token",
                    flush=True,
                )
    for name, bar in BARS.items():
        ratios = [ours / exact for ours, exact in zip(nll[name], nll["next token"], strict=True)]
        claim(
            f"bits per byte of masked diffusion, {name}, at most, against the next token", ours=mean(nll[name]),
            peer=mean(nll["next token"]), unit="nats/token", ratio=mean(ratios), bar=bar, ok=mean(ratios) <= bar,
            peer_name="next token", variant=name.replace(" ", "-"), samples=ratios,
        )  # fmt: skip
    ours, peer = mean(lines["both sides"]), mean(lines["left"])
    claim(
        "hidden lines filled from both sides against continued from the left", ours=ours, peer=peer, unit="share",
        ratio=ours / max(peer, 1e-9), bar=1.0, ok=ours > peer, peer_name="next token", variant="lines",
        samples=lines["both sides"] + lines["left"],
    )  # fmt: skip
    fast, slow = (mean(rate for rate, _ in pace[steps]) for steps in (1, 4))
    losses = [mean(nats for _, nats in pace[steps]) for steps in (1, 4)]
    print(f"four tokens of a pass cost {losses[0] - losses[1]:.3f} nats per token under the next-token model")
    claim(
        "tokens/s at batch 1, four tokens of a pass against one", ours=fast, peer=slow, unit="tokens/s",
        ratio=fast / slow, bar=2.0, ok=fast >= 2 * slow, peer_name="one token of a pass", variant="passes",
        samples=losses,
    )  # fmt: skip


if __name__ == "__main__":
    main()
