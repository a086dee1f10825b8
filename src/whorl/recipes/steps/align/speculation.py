"""The steps `draft` and `multi_token`: what drafts tokens for a model, for speculative decoding.

    [steps.draft]                           # a small model of the same vocabulary, distilled from the model
    parents = ["sft", "tasks"]              # or ["pretrain", "tokens"]: the model's training text
    texts.completions_from = "teacher"      # the model's own outputs

    [steps.multi_token]                     # heads on the model, which predict several tokens ahead
    parents = ["pretrain", "tokens"]
    n_predict = 4

    whorl serve mine/sft --draft mine/draft
    whorl serve mine/multi_token --multi-token

Both measure the acceptance rate and the speed on held-out prompts: greedy, one sequence at a time, on this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from whorl.align.config import MultiTokenConfig, StudentConfig
from whorl.errors import DataError
from whorl.recipes.registry import StepContext, step
from whorl.recipes.stage import (
    NOT_HASHED,
    format_likelihood_change,
    held_out_likelihood,
    open_token_set,
    pad_id_of,
    train_stage,
    write_curve,
)
from whorl.recipes.steps.align.distillation import (
    DistilStepConfig,
    DistilTextsConfig,
    TextSourceConfig,
    distil,
    load_texts,
)
from whorl.report.blocks import Column, Table
from whorl.report.stages import SECTION

if TYPE_CHECKING:
    from whorl.engine.speculation.load import Speculation
    from whorl.tokens.token_encoder import TokenEncoder, TokenizedExample

DRAFT_PARENTS = {"model": "model", "tasks?": "tasks", "tokens?": "tokens"}
PROMPT_IDS = 32  # of a held-out document
LAYER_FRACTION = 4  # the default draft has a quarter of the model's layers


class HeldOutPromptsConfig(TextSourceConfig):
    """The training texts, and the held-out prompts that measure the drafts."""

    max_examples: int = Field(default=20_000, ge=1, description="training texts, at most")
    held_out_prompts: int = Field(default=8, ge=1, description="held-out prompts that measure the drafts")
    held_out_tokens: int = Field(default=64, ge=2, description="tokens generated for each of them")


class DraftTextsConfig(HeldOutPromptsConfig, DistilTextsConfig):
    """The same, and the logits of the teacher for the training texts."""

    max_examples: int = Field(default=2000, ge=1, description="training texts, at most")


class DraftStepConfig(DistilStepConfig):
    """Distillation of a draft model, and the measurement of its drafts."""

    student: StudentConfig | None = Field(
        default=None,
        description="shape of the draft; alternatively a parent `student`; default: a quarter of the layers",
    )
    texts: DraftTextsConfig = Field(
        default=DraftTextsConfig(), description="the training texts, and held-out prompts"
    )


class MultiTokenStepConfig(MultiTokenConfig):
    """The heads, their training texts, and the measurement of their drafts."""

    max_completion_tokens: int = Field(default=64, ge=1, description="ids of a sampled completion")
    temperature: float = Field(default=1.0, gt=0, description="of sampled completions")
    texts: HeldOutPromptsConfig = Field(
        default=HeldOutPromptsConfig(), description="the training texts, and held-out prompts"
    )


@step(
    "model",
    config=DraftStepConfig,
    parents={**DRAFT_PARENTS, "student?": "model"},
    not_hashed=NOT_HASHED,
)
def draft(ctx: StepContext, config: DraftStepConfig) -> None:
    """Distil a small draft model for speculative decoding, and measure its acceptance rate and speed."""
    from whorl.engine.speculation.load import Speculation
    from whorl.models import read_config
    from whorl.tokens.token_encoder import TokenEncoder

    folder = ctx.parent_folder("model")
    if config.student is None and "student" not in ctx.parents:
        layers = max(1, read_config(folder).n_layers // LAYER_FRACTION)
        config = config.model_copy(update={"student": StudentConfig(n_layers=layers)})
    distil(ctx, config)
    tokenizer = TokenEncoder.load(folder)
    prompts = _held_out_prompts(ctx, tokenizer, [], config.texts.held_out_prompts)
    _measure(ctx, folder, Speculation(draft=ctx.out), tokenizer, prompts, config.texts.held_out_tokens)


@step("model", config=MultiTokenStepConfig, parents=DRAFT_PARENTS, not_hashed=NOT_HASHED)
def multi_token(ctx: StepContext, config: MultiTokenStepConfig) -> None:
    """Train heads that predict several tokens ahead, and measure their acceptance rate and speed."""
    from whorl.align.stage.io import load_stage_model, save_stage_model
    from whorl.align.stage.multi_token import MultiTokenModel, MultiTokenTask
    from whorl.align.stage.sft import fine_tune
    from whorl.engine.speculation.load import Speculation
    from whorl.models.multi_token import save_multi_token
    from whorl.tokens.token_encoder import TokenEncoder

    folder, machine = ctx.parent_folder("model"), ctx.machine
    machine.apply()
    tokenizer = TokenEncoder.load(folder)
    model = load_stage_model(folder, config, machine)
    model.context_hint = config.data.seq_len + 1
    texts, left = load_texts(
        ctx, config, tokenizer, model, needs_prompts=config.texts.completions_from == "teacher"
    )
    network = MultiTokenModel(model.train(), config)
    replay = ctx.parents["tokens"].path if "tokens" in ctx.parents else None
    train = partial(
        fine_tune, network, texts, config, pad_id=pad_id_of(tokenizer), replay_data=replay, task_type=MultiTokenTask
    )  # fmt: skip
    result = train_stage(
        ctx, "Multi-token heads", train,
        note=lambda metrics: f"loss {metrics['nll']:.3f}, epoch {metrics['epoch']:.2f}",
        likelihood=(lambda: held_out_likelihood(ctx, model, tokenizer)) if config.train_trunk else None,
    )  # fmt: skip
    save_stage_model(network, folder, ctx.out)
    save_multi_token(network.heads, ctx.out)
    ahead = [f"{result.final[f'nll/{n}']:.2f}" for n in range(1, config.n_predict + 1)]
    ctx.summary.update(
        result.likelihood, texts=len(texts), left_out=left, final=result.final, seconds=result.seconds,
        params=model.params(), head_params=sum(p.numel() for p in network.heads.parameters()),
        headline=f"{len(texts):,} texts; nats of tokens 1 to {config.n_predict} ahead: {', '.join(ahead)}"
        + format_likelihood_change(**result.likelihood),
    )  # fmt: skip
    write_curve(
        ctx, objective="multi_token", trained_on=f"{len(texts):,} texts",
        loss=("nll", "Loss in nats per predicted token, over all heads"),
    )  # fmt: skip
    prompts = _held_out_prompts(ctx, tokenizer, texts, config.texts.held_out_prompts)
    _measure(ctx, ctx.out, Speculation(multi_token=True), tokenizer, prompts, config.texts.held_out_tokens)


def _held_out_prompts(
    ctx: StepContext, tokenizer: TokenEncoder, texts: Sequence[TokenizedExample], n: int
) -> list[list[int]]:
    """Return up to `n` prompts: of held-out tasks, else the starts of held-out documents, else of `texts`.

    Raises:
        DataError: no prompt is found.
    """
    from whorl.align.stage.io import read_tasks

    found: list[list[int]] = []
    if "tasks" in ctx.parents:
        tests = read_tasks(ctx.parents["tasks"].path, "test")[:n]
        found = [tokenizer.task_prompt(task) for task in tests]
    if not found and "tokens" in ctx.parents:
        documents = open_token_set(ctx).split("test").iter_documents()
        found = [[int(i) for i in ids[:PROMPT_IDS]] for ids in islice(documents, n)]
    found = found or [text.ids[: text.prompt_length].tolist() for text in texts[:n]]
    if not found:
        raise DataError(
            f"{ctx.name} has no prompt to measure drafts with",
            expected="held-out tasks, or a parent `tokens` with a test split",
        )
    return found


def _measure(
    ctx: StepContext,
    folder: Path,
    speculation: Speculation,
    tokenizer: TokenEncoder,
    prompts: list[list[int]],
    max_tokens: int,
) -> None:
    """Add the figures of `speculation` for the model in `folder` to the summary and the report."""
    from whorl.engine.speculation.measure import measure_folder
    from whorl.models import read_config

    found = measure_folder(
        folder, speculation, prompts, machine=ctx.machine, stop_ids=tokenizer.stop_ids,
        banned_ids=tokenizer.banned_ids(read_config(folder).vocab_size), max_tokens=max_tokens,
    )  # fmt: skip
    ctx.summary["speculation"] = found.to_json()
    ctx.summary["headline"] += (
        f"; {found.acceptance_rate:.0%} of drafts accepted, {found.tokens_per_step:.2f} tokens per step, "
        f"{found.speedup:.2f} x the speed"
    )
    figures = {
        "Drafts accepted": f"{found.acceptance_rate:.0%}", "Tokens per step": f"{found.tokens_per_step:.2f}",
        "Tokens/s": f"{found.tokens_per_second:,.0f}", "Tokens/s without": f"{found.plain_tokens_per_second:,.0f}",
        "Speed-up": f"{found.speedup:.2f}",
    }  # fmt: skip
    ctx.report.blocks.append(
        Table(
            section=SECTION, title="Speculative decoding",
            note=f"{len(prompts)} held-out prompts, at most {max_tokens} tokens each, greedy, one sequence at a time.",
            columns=[Column(name="Step"), *(Column(name=name, number=True) for name in figures)],
            rows=[[ctx.name, *figures.values()]],
        )
    )  # fmt: skip
