"""The step `evaluate`: measure a model on the test split, and on a suite of tasks.

    evaluation.json       bits per byte of whole files, compressors on the same files, samples, figures of the tasks
    suite/                results of the tasks with all items, as of `whorl eval`

Neither the tokenizer nor the model has seen the test split. Each file is scored separately. By default the suite is `own`,
whose items come from the test split (`evals/suites/own.py`).
"""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from whorl.errors import NotApplicableError
from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.corpus import CORPUS_PARENTS, open_corpus
from whorl.recipes.steps.evaluation.generations import CHECKED_TEXTS, draw_samples
from whorl.recipes.steps.evaluation.tasks import files_result, run_suite, summary_of
from whorl.report.scores import BITS_PER_BYTE_FIGURES, evaluation_report

if TYPE_CHECKING:
    from whorl.corpus import Document


class EvaluateConfig(BaseModel):
    """The measurements and their sizes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    window: int | None = Field(
        default=None,
        ge=16,
        description="tokens of context at most; default: the evaluation window of the model",
    )
    held_out_fraction: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="of the test files, that are scored",
        json_schema_extra={"shrinks_to": 0.1},
    )
    baselines: bool = Field(default=True, description="compressors and an n-gram model on the same files")
    baseline_train_fraction: float = Field(
        default=1.0, gt=0, le=1, json_schema_extra={"shrinks_to": 0.02},
        description="of the training files, that primed compressors and the n-gram model read",
    )  # fmt: skip
    ngram_order: int = Field(default=4, ge=1, le=8)
    suite: str = Field(default="own", description="a suite of tasks: its name, or a TOML file")
    items: int = Field(
        default=100,
        ge=0,
        description="of each task of the suite; 0: no suite",
        json_schema_extra={"shrinks_to": 8},
    )
    samples: int = Field(default=4, ge=0, description="samples in the report, with probabilities")
    sample_tokens: int = Field(default=120, ge=1)
    seed: int = Field(default=0, ge=0)
    deterministic: bool = Field(default=False, description="no timing affects the result")


@step(
    "evaluation",
    config=EvaluateConfig,
    parents={**CORPUS_PARENTS, "tokens": "tokens", "tokenizer": "tokenizer", "model": "model"},
    version=5,
)
def evaluate(ctx: StepContext, config: EvaluateConfig) -> None:
    """Measure bits per byte against compressors, the tasks of a suite, and speed."""
    import torch

    from whorl.align.distillation.teacher import check_same_vocabulary
    from whorl.evals.baselines import measure_baselines, spread
    from whorl.evals.likelihood import bits_per_byte, document_nats, perplexity
    from whorl.models import load_model
    from whorl.tokens.hf_tokenizer import load_tokenizer
    from whorl.tokens.shards import TokenSet
    from whorl.tokens.tokenizer import Tokenizer

    machine = ctx.machine
    machine.apply()
    model = load_model(ctx.parent_folder("model"), machine.torch_dtype, machine.device)
    window = config.window or model.eval_window
    if model.max_positions is not None:
        window = min(window, model.max_positions)
    sample_tokens = min(config.sample_tokens, model.declared_length // 2)
    config = config.model_copy(update={"window": window, "sample_tokens": sample_tokens})
    tokenizer = Tokenizer.load(ctx.parents["tokenizer"].path)
    names = ctx.parents["model"].name, ctx.parents["tokenizer"].name
    check_same_vocabulary(load_tokenizer(ctx.parents["model"].path), tokenizer, names=names)
    tokens, corpus = TokenSet(ctx.parents["tokens"].path), open_corpus(ctx)
    test = tokens.split("test")
    held_out = spread([*corpus.documents("test")], config.held_out_fraction)
    if not held_out:
        raise NotApplicableError("the test split is empty", do="raise curate.test_bytes, or give more text")

    began = time.perf_counter()
    chosen = [test.document(i) for i in spread(range(test.n_documents), config.held_out_fraction)]
    n_tokens = sum(map(len, chosen)) - len(chosen)
    with ctx.progress.task("Scoring", total=n_tokens, unit="tokens") as task:
        nats = document_nats(model, chosen, window, lambda n: task.advance(n))
    seconds = time.perf_counter() - began
    total_bytes = sum(d.n_bytes for d in held_out)
    score = bits_per_byte(sum(nats), total_bytes)
    per_token = perplexity(sum(nats), n_tokens)
    scored = n_tokens * 1.5  # half of each window is read again as context
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
            [d.text.encode() for d in held_out], train, tokens, chosen, fraction=config.baseline_train_fraction,
            order=config.ngram_order, workers=ctx.machine.cores, progress=ctx.progress,
        )  # fmt: skip
        result["baseline_train_fraction"] = config.baseline_train_fraction
    files = files_result(ctx, held_out, nats)
    tasks = run_suite(ctx, config.suite, held_out, result, files, n=config.items, seed=config.seed)
    result["tasks"] = [summary_of(each) for each in tasks]
    with torch.inference_mode():
        result["samples"] = draw_samples(
            ctx, tokenizer, [d.text for d in held_out[: max(CHECKED_TEXTS, config.samples)]], n=config.samples,
            max_tokens=config.sample_tokens, seed=config.seed,
        )  # fmt: skip
    (ctx.out / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    ctx.progress.log(f"    {BITS_PER_BYTE_FIGURES}")
    headline = f"test {score:.3f} bits per byte (perplexity {per_token:.2f}) on {len(held_out)} whole files"
    best = {b["name"]: b["bits_per_byte"] for b in result.get("baselines", [])}
    if "xz -9e, one stream" in best:
        xz, ppmd = best["xz -9e, one stream"], best["PPMd order 10, primed"]
        headline += f" (xz -9e {xz:.3f}, PPMd primed {ppmd:.3f})"
    if parsed := result.get("completions"):
        headline += f"; {parsed['parsed']} of {parsed['prompts']} completed functions parse"
    ctx.summary.update({k: v for k, v in result.items() if k != "samples"}, headline=headline)
    plan = ctx.store.find(ctx.parents["model"].parents.get("plan", ""))
    ctx.report = evaluation_report(result, plan.summary["expected"] if plan is not None else {}, tasks)


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
