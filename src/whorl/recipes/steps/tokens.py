"""The steps `tokenizer` and `tokens`: from text to token ids.

The vocabulary size comes from the plan unless the recipe sets it: the smaller the model, the larger the share of its
embedding and head.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from whorl.corpus import Document
from whorl.errors import ConfigError
from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.corpus import CORPUS_PARENTS, open_corpus
from whorl.report import Bar, Block, Column, Histogram, StepReport, Text
from whorl.report.format import format_si
from whorl.tokens.hf_tokenizer import AnyTokenizer, load_tokenizer
from whorl.tokens.shards import TokensConfig, write_shards
from whorl.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from whorl.plan.training_plan import TrainingPlan


class TokenizerConfig(BaseModel):
    """Size of the vocabulary and special tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int | None = Field(
        default=None, ge=300, le=65_536, description="number of ids; default: the plan's"
    )
    special_tokens: list[str] = Field(
        default=[], description="additional special tokens, never merged or split"
    )


def tokenizer_folder(ctx: StepContext) -> Path:
    """Return the folder of the parent `tokenizer`, or of the model that has one. Raises ConfigError: there is neither."""
    role = next((role for role in ("tokenizer", "model") if role in ctx.parents), None)
    if role is None:
        raise ConfigError(
            f"the step {ctx.name} has no tokenizer",
            do='add "tokenizer" to its parents, or a model with `from`',
        )
    return ctx.parent_folder(role)


def open_tokenizer(ctx: StepContext) -> AnyTokenizer:
    """Return the tokenizer of `tokenizer_folder`."""
    return load_tokenizer(tokenizer_folder(ctx))


def write_text_files(ctx: StepContext) -> None:
    """Write what a model needs to read and write text: the tokenizer, a chat template, and the ids that end a text."""
    from whorl.align.stage.io import copy_text_files

    tokenizer, path = open_tokenizer(ctx), ctx.out / "generation_config.json"
    copy_text_files(tokenizer_folder(ctx), ctx.out)
    if isinstance(tokenizer, Tokenizer) and not path.is_file():
        ends = tokenizer.eos_id if len(tokenizer.end_ids) == 1 else tokenizer.end_ids
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends, "pad_token_id": tokenizer.pad_id}
        path.write_text(json.dumps(ids, indent=1) + "\n")


def read_plan(ctx: StepContext) -> TrainingPlan:
    """Return the plan that the parent `plan` made. Raises ConfigError: it names code that is not permitted."""
    from whorl.plan.training_plan import TrainingPlan
    from whorl.train.job import check_code_of_job

    path = ctx.parents["plan"].file("plan.json")
    plan = TrainingPlan.model_validate_json(path.read_bytes())
    check_code_of_job(plan.job.objective, plan.job.optim.optimizer, path)
    return plan


@step("tokenizer", config=TokenizerConfig, parents={**CORPUS_PARENTS, "plan?": "plan"}, version=2)
def tokenizer(ctx: StepContext, config: TokenizerConfig) -> None:
    """Train a byte-level BPE tokenizer on the training split."""
    size = config.vocab_size
    if size is None:
        if "plan" not in ctx.parents:
            raise ConfigError(
                f"the step {ctx.name} has neither a plan nor a vocab_size",
                do=f'add "plan" to its parents, or --set {ctx.name}.vocab_size=4096',
            )
        size = read_plan(ctx).vocab_size
    corpus = open_corpus(ctx)
    with ctx.progress.task("Training BPE", size, "tokens") as task:
        trained = Tokenizer.train(
            (document.text for document in corpus.documents("train")),
            size,
            special_tokens=config.special_tokens,
            progress=lambda done: task.update(done=done),
        )
        task.update(done=trained.vocab_size)
    trained.save(ctx.out)
    domains = _compression(trained, corpus.documents("validation"))
    ctx.summary.update(
        vocab_size=trained.vocab_size, domains=domains, headline=f"{trained.vocab_size:,} tokens"
    )
    ctx.report = tokenizer_report(trained.vocab_size, domains)


def tokenizer_report(vocab_size: int, domains: Iterable[Mapping[str, Any]]) -> StepReport:
    """Return the bytes per token of each kind of held-out text."""
    line = f"Byte-level BPE, {vocab_size:,} tokens, trained on the training split only."
    blocks: list[Block] = [Text(section="Tokenizer", lines=[line])]
    columns = [
        Column(name="Folder"), Column(name="Size", number=True, optional=True),
        Column(name="Tokens", number=True, optional=True), Column(name="Bytes per token", number=True),
    ]  # fmt: skip
    rows = [(d["domain"], d["bytes"], d["tokens"]) for d in domains if d["tokens"]]
    bars = [
        Bar(cells=[name, format_si(size, "B"), format_si(n, ""), f"{size / n:.2f}"], value=size / n)
        for name, size, n in rows
    ]
    if bars:
        blocks.append(Histogram(section="Tokenizer", columns=columns, bars=bars))
    return StepReport(blocks=blocks)


def _compression(tokenizer: Tokenizer, documents: Iterable[Document]) -> list[dict[str, Any]]:
    """Return bytes and tokens of held-out text by domain, the first folder of a document's path."""
    sums: dict[str, list[int]] = {}
    for document in documents:
        domain = document.path.split("/")[0] if "/" in document.path else "no folder"
        entry = sums.setdefault(domain, [0, 0])
        entry[0] += document.n_bytes
        entry[1] += len(tokenizer.encode(document.text))
    ordered = sorted(sums.items(), key=lambda item: -item[1][0])
    return [{"domain": name, "bytes": n_bytes, "tokens": n} for name, (n_bytes, n) in ordered]


@step(
    "tokens", config=TokensConfig,
    parents={**CORPUS_PARENTS, "tokenizer?": "tokenizer", "model?": "model"},
)  # fmt: skip
def tokens(ctx: StepContext, config: TokensConfig) -> None:
    """Encode every split into memory-mapped shards, with a tokenizer or that of a model."""
    corpus = open_corpus(ctx)
    encoder = open_tokenizer(ctx)
    splits = {
        split: write_shards(
            corpus.documents(split), encoder, ctx.out, split, config, ctx.progress, corpus.bytes(split)
        )
        for split in config.splits
    }
    parts = [f"{name} {found['tokens']:,}" for name, found in splits.items()]
    per_token = next(iter(splits.values()))["bytes_per_token"]
    headline = f"{', '.join(parts)}; {per_token:.2f} bytes per token"
    ctx.summary.update(splits=splits, headline=headline)
