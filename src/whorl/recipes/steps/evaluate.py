"""The step `evaluate`: measure a model on the test split and write `evaluation.json`.

Neither the tokenizer nor the model has seen the test split. Each file is scored separately.
"""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from whorl.errors import DataError
from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.corpus import CORPUS_PARENTS, open_corpus
from whorl.report.scores import evaluation_report

if TYPE_CHECKING:
    from whorl.corpus import Document
    from whorl.models import LanguageModel
    from whorl.tokens.tokenizer import Tokenizer

TOP_LOGPROBS = 5  # alternatives per token of a sample


COMPLETION_WINDOW = 512  # tokens of a prompt and its completion
COMPLETION_ROWS = 64  # completed at once


class EvaluateConfig(BaseModel):
    """The measurements and their sizes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    window: int | None = Field(
        default=None,
        ge=16,
        description="tokens of context at most; default: the evaluation window of the model",
    )
    baselines: bool = Field(default=True, description="compressors and an n-gram model on the same files")
    ngram_order: int = Field(default=4, ge=1, le=8)
    completions: int = Field(default=64, ge=0, description="held-out functions to complete")
    completion_tokens: int = Field(default=160, ge=1)
    samples: int = Field(default=4, ge=0, description="samples in the report, with probabilities")
    sample_tokens: int = Field(default=120, ge=1)
    seed: int = 0


@step(
    "evaluation",
    config=EvaluateConfig,
    parents={**CORPUS_PARENTS, "tokens": "tokens", "tokenizer": "tokenizer", "model": "model"},
    version=3,
)
def evaluate(ctx: StepContext, config: EvaluateConfig) -> None:
    """Measure bits per byte against compressors, completions that parse, and speed."""
    import torch

    from whorl.evals.baselines import measure_baselines
    from whorl.evals.likelihood import bits_per_byte, document_nats, perplexity
    from whorl.models import load_model
    from whorl.tokens.shards import TokenSet
    from whorl.tokens.tokenizer import Tokenizer

    machine = ctx.machine
    machine.apply()
    model = load_model(ctx.parent_folder("model"), machine.torch_dtype, machine.device)
    window = config.window or model.eval_window
    if model.max_positions is not None:
        window = min(window, model.max_positions)
        config = config.model_copy(
            update={
                "window": window,
                "completion_tokens": min(config.completion_tokens, model.max_positions // 2),
                "sample_tokens": min(config.sample_tokens, model.max_positions // 2),
            }
        )
    tokenizer = Tokenizer.load(ctx.parents["tokenizer"].path)
    tokens = TokenSet(ctx.parents["tokens"].path)
    test = tokens.split("test")
    corpus = open_corpus(ctx)
    held_out = list(corpus.documents("test"))
    if not held_out:
        raise DataError("the test split is empty", do="raise curate.test_bytes, or give more text")

    began = time.perf_counter()
    with ctx.progress.task("Scoring", total=len(test) - test.n_documents, unit="tokens") as task:
        nats = document_nats(model, test.iter_documents(), window, lambda n: task.advance(n))
    seconds = time.perf_counter() - began
    total_bytes = sum(d.n_bytes for d in held_out)
    score = bits_per_byte(sum(nats), total_bytes)
    per_token = perplexity(sum(nats), len(test) - test.n_documents)
    scored = (len(test) - test.n_documents) * 1.5  # half of each window is read again as context
    forward = model.flops_per_token(window) / 3
    result: dict[str, Any] = {
        "files": len(held_out),
        "bytes": total_bytes,
        "bits_per_byte": score,
        "perplexity": per_token,
        "by_domain": _by_domain(held_out, nats),
        "scoring_tokens_per_second": scored / seconds,
        "scoring_mfu": scored / seconds * forward / machine.peak_flops,
        "peak_flops": machine.peak_flops,
    }
    if config.baselines:
        train = [document.text.encode() for document in corpus.documents("train")]
        result["baselines"] = measure_baselines(
            [d.text.encode() for d in held_out], train, tokens, order=config.ngram_order,
            workers=ctx.machine.cores, progress=ctx.progress,
        )  # fmt: skip
    with torch.inference_mode():
        if config.completions:
            result["completions"] = _completions(ctx, config, model, tokenizer, held_out)
        result["samples"] = _samples(ctx, config, tokenizer, held_out)
    (ctx.out / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    headline = f"{score:.3f} bits per byte (perplexity {per_token:.2f}) on {len(held_out)} held-out files"
    best = {b["name"]: b["bits_per_byte"] for b in result.get("baselines", [])}
    if "xz -9e, one stream" in best:
        headline += (
            f" (xz -9e {best['xz -9e, one stream']:.3f}, PPMd primed {best['PPMd order 10, primed']:.3f})"
        )
    if parsed := result.get("completions"):
        headline += f"; {parsed['parsed']} of {parsed['prompts']} completions parse"
    ctx.summary.update({k: v for k, v in result.items() if k != "samples"}, headline=headline)
    plan = ctx.store.find(ctx.parents["model"].parents.get("plan", ""))
    ctx.report = evaluation_report(result, plan.summary["expected"] if plan is not None else {})


def _by_domain(documents: list[Document], nats: list[float]) -> list[dict[str, Any]]:
    """Return bits per byte by the first folder of a document's path."""
    sums: dict[str, list[float]] = {}
    for document, cost in zip(documents, nats, strict=True):
        domain = document.path.split("/")[0] if "/" in document.path else "(top)"
        entry = sums.setdefault(domain, [0.0, 0.0])
        entry[0] += cost
        entry[1] += document.n_bytes
    return [
        {"domain": domain, "bytes": int(n), "bits_per_byte": cost / math.log(2) / max(1.0, n)}
        for domain, (cost, n) in sorted(sums.items(), key=lambda item: -item[1][1])
    ]


def _completions(
    ctx: StepContext,
    config: EvaluateConfig,
    model: LanguageModel,
    tokenizer: Tokenizer,
    held_out: list[Document],
) -> dict[str, Any] | None:
    from whorl.engine import EngineConfig, SamplingParams
    from whorl.engine.engine import Engine
    from whorl.evals.parse_rate import (
        END_OF_DOCUMENT,
        parse_rate,
        reference_parse_rate,
        sample_function_prompts,
    )
    from whorl.tokens.healing import heal
    from whorl.tracking.seeds import derive

    try:
        chosen = sample_function_prompts(
            ((d.id, d.text.encode()) for d in held_out), config.completions, config.seed
        )
    except DataError:
        return None  # no Python in this corpus
    context = max(1, min(config.window or COMPLETION_WINDOW, COMPLETION_WINDOW) - config.completion_tokens)
    speed = {"tokens": 0, "seconds": 0.0}

    def generate(texts: list[bytes]) -> list[bytes]:
        healed, rows = [heal(tokenizer, t.decode()) for t in texts], model.config.vocab_size
        engine = Engine(
            model,
            EngineConfig.for_batch(min(len(texts), COMPLETION_ROWS), context + config.completion_tokens),
            token_bytes=tokenizer.text_bytes(rows),
            banned_ids=tokenizer.banned_ids(rows),
        )
        began = time.perf_counter()
        ends = engine.generate(
            [h.ids[-context:] for h in healed],
            SamplingParams(seed=derive(config.seed, "completions")),
            max_tokens=config.completion_tokens,
            stop_ids=tokenizer.end_ids,
            forced_prefixes=[h.forced_prefix for h in healed],
        )
        speed["seconds"] += time.perf_counter() - began
        speed["tokens"] += sum(len(end.tokens) for end in ends)
        return [end.text + (END_OF_DOCUMENT if end.finish_reason == "stop" else b"") for end in ends]

    with ctx.progress.task("Completing held-out functions", total=None):
        found = parse_rate(chosen, generate)
    reference = reference_parse_rate(chosen)
    return {
        "prompts": found.n,
        "parsed": found.parsed,
        "unfinished": found.unfinished,
        "median_bytes": found.median_bytes,
        "real_parsed": reference.parsed,
        "tokens_per_second": speed["tokens"] / max(1e-9, speed["seconds"]),
    }


def _samples(
    ctx: StepContext,
    config: EvaluateConfig,
    tokenizer: Tokenizer,
    held_out: list[Document],
) -> list[dict[str, Any]]:
    """Return samples with the probability of every token: two fixed prompts, then the start of held-out files."""
    from whorl.engine import EngineConfig, SamplingParams, load_for_sampling
    from whorl.engine.engine import Engine
    from whorl.tokens.healing import heal
    from whorl.tracking.seeds import derive

    model = load_for_sampling(ctx.parent_folder("model"), ctx.machine)
    texts = [b"def ", b'class Node:\n    """', *(d.text.encode()[:300] for d in held_out)][: config.samples]
    sampling, rows = SamplingParams(), model.config.vocab_size
    prompts = [heal(tokenizer, text.decode("utf-8", "ignore")) for text in texts]
    if not prompts:
        return []
    room = max(len(healed.ids) for healed in prompts)
    if model.max_positions is not None:
        room = max(1, min(room, model.max_positions - config.sample_tokens))
    engine = Engine(
        model,
        EngineConfig.for_batch(len(prompts), room + config.sample_tokens),
        token_bytes=tokenizer.text_bytes(rows),
        banned_ids=tokenizer.banned_ids(rows),
    )
    completions = engine.generate(
        [healed.ids[-room:] for healed in prompts],
        [sampling.model_copy(update={"seed": derive(config.seed, "report", n)}) for n in range(len(prompts))],
        max_tokens=config.sample_tokens,
        stop_ids=tokenizer.end_ids,
        forced_prefixes=[healed.forced_prefix for healed in prompts],
        top_log_probs=TOP_LOGPROBS,
    )
    out = []
    for text, healed, completion in zip(texts, prompts, completions, strict=True):
        kept = text[: len(text) - len(healed.forced_prefix)]
        tokens = []
        for token in completion.tokens[: -1 if completion.finish_reason == "stop" else None]:
            tokens.append(
                {
                    "hex": tokenizer.decode([token.id]).hex(),
                    "probability": math.exp(token.raw_log_prob),
                    "alternatives": [
                        [tokenizer.decode([i]).hex(), math.exp(p)] for i, p in token.alternatives
                    ],
                }
            )
        out.append(
            {
                "prompt": kept.decode("utf-8", "replace"),
                "tokens": tokens,
                "note": f"temperature {sampling.temperature}, top-p {sampling.top_p}, seed {config.seed}",
            }
        )
    return out
