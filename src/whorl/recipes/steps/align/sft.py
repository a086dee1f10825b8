"""The step `sft`: supervised fine-tuning on solutions or conversations.

    [steps.sft]
    parents = ["pretrain", "tasks"]
    model.lora = {rank = 16}            # train an adapter instead of all weights; --set sft.model.lora.rank=16

Every stage takes a model and leaves a model with its lineage. `whorl sample`, `whorl serve` and `whorl export` accept any.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import Field

from whorl.align.config import SFTConfig
from whorl.recipes.registry import StepContext, step
from whorl.recipes.stage import (
    NOT_HASHED,
    STAGE_PARENTS,
    evaluate_held_out,
    format_likelihood_change,
    held_out_likelihood,
    load_sft_examples,
    pad_id_of,
    train_stage,
    write_curve,
)


class SFTStepConfig(SFTConfig):
    """Fine-tuning, and the evaluation before and after it where the tasks have a verifier."""

    eval_tasks: int = Field(
        default=64, ge=0, description="held-out tasks answered before and after, at most",
        json_schema_extra={"shrinks_to": 16},
    )  # fmt: skip
    max_completion_tokens: int = Field(default=96, ge=1, description="limit of an answer to a held-out task")


@step("model", config=SFTStepConfig, parents=STAGE_PARENTS, not_hashed=NOT_HASHED, version=2)
def sft(ctx: StepContext, config: SFTStepConfig) -> None:
    """Fine-tune on solutions; only completion tokens and their end token are trained."""
    from whorl.align.stage.io import open_policy, read_tasks, record_pass_criterion, save_stage_model
    from whorl.align.stage.sft import fine_tune

    folder = ctx.parent_folder("model")
    tokenizer, network = open_policy(folder, config, ctx.machine, context_hint=config.data.seq_len)
    examples, length_filter = load_sft_examples(ctx, tokenizer, config.data.seq_len + 1)
    tests = read_tasks(ctx.parents["tasks"].path, "test")

    criterion = record_pass_criterion(tests if config.eval_tasks else [], ctx.summary, ctx.progress.log)

    def evaluate(when: str) -> dict[str, float]:
        found = evaluate_held_out(
            network, tokenizer, tests, {"accuracy_greedy": 0.0}, max_tasks=config.eval_tasks,
            max_tokens=config.max_completion_tokens, length=config.data.seq_len, seed=config.seed,
        )  # fmt: skip
        if when == "before" and tests and config.eval_tasks and not found:
            limit = f"{ctx.name}.max_completion_tokens: {config.max_completion_tokens}"
            ctx.progress.log(f"    no held-out task fits its prompt and {limit}")
        return found

    replay = ctx.parents["tokens"].path if "tokens" in ctx.parents else None
    train = partial(fine_tune, network, examples, config, pad_id=pad_id_of(tokenizer), replay_data=replay)
    result = train_stage(
        ctx, "Fine-tuning", train, evaluate=evaluate,
        likelihood=lambda: held_out_likelihood(ctx, network.model, tokenizer),
        note=lambda metrics: f"loss {metrics['nll']:.3f}, epoch {metrics['epoch']:.2f}",
    )  # fmt: skip
    measured = result.evaluation
    save_stage_model(network, folder, ctx.out)
    headline, summary = f"{len(examples):,} texts; loss {result.final.get('nll', 0.0):.3f}", dict[str, Any]()
    if measured["after"]:
        summary.update(eval=measured, tasks={"test": int(measured["after"]["tasks"])})
        passed = [f"{measured[when]['accuracy_greedy']:.0%}" for when in ("before", "after")]
        n_tasks = int(measured["after"]["tasks"])
        headline += (
            f"; greedy accuracy on {n_tasks} held-out tasks {passed[0]} before, {passed[1]} after{criterion}"
        )
    ctx.summary.update(
        summary, texts=len(examples), left_out=length_filter.rejected, final=result.final, seconds=result.seconds,
        params=network.model.params(), **result.likelihood,
        headline=headline + format_likelihood_change(**result.likelihood),
    )  # fmt: skip
    write_curve(
        ctx, objective="sft" if config.objective == "next_token" else config.objective,
        loss=("nll", "Loss in nats per trained token"), trained_on=f"{len(examples):,} texts",
    )  # fmt: skip
