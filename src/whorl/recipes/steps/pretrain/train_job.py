"""Train a pretraining job in the harness of the steps, and save the model; for the steps `pretrain` and `decay_branch`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.recipes.registry import StepContext
from whorl.recipes.stage import train_stage
from whorl.recipes.stage_recorder import last_values
from whorl.recipes.steps.pretrain.observer import PretrainObserver, held_out_text, progress_note
from whorl.recipes.steps.tokens import open_tokenizer, write_text_files
from whorl.report.training import training_report
from whorl.train.config import RunConfig

if TYPE_CHECKING:
    from whorl.models import LanguageModel
    from whorl.train.job import Job


def train_and_save(
    ctx: StepContext,
    job: Job,
    run: RunConfig,
    *,
    branch_steps: Collection[int] = (),
    start: Path | None = None,
    previous_curve: Iterable[dict[str, Any]] = (),
) -> LanguageModel:
    """Train `job` and write the model, its tokenizer, its curve and a summary; return the model.

    Args:
        branch_steps, start: `branch_points` and `branch_start` of `train.lm.pretrain.pretrain`.
        previous_curve: metrics of the run that the job continues.
    """
    from whorl.evals.prompts import CHECKED_TEXTS, first_prompt
    from whorl.machine.native_build import start_later_builds
    from whorl.models import save_model
    from whorl.tokens.shards import TokenSet
    from whorl.train.checkpoint.stats import CheckpointStats
    from whorl.train.lm.pretrain import pretrain as run_training
    from whorl.train.metrics.validation import held_out_bytes_per_target

    token_set = TokenSet(ctx.parents["tokens"].path)
    split = token_set.split("train")
    tokenizer, stats = open_tokenizer(ctx), CheckpointStats()
    held_out = token_set.split("validation") if "validation" in token_set.splits else split
    texts = [tokenizer.decode(ids[1:-1]) for ids in islice(held_out.iter_documents(), CHECKED_TEXTS)]
    prompt = first_prompt([text.decode("utf-8", "replace") for text in texts])
    bytes_per_token = held_out_bytes_per_target(job, tokenizer.text_bytes(tokenizer.vocab_size))

    def train(*, callback: Any, checkpoint_dir: Path, heartbeat_dir: Path, log: Any) -> LanguageModel:
        return run_training(
            job, checkpoint_dir, callback, checkpoint_seconds=run.checkpoint_seconds, checkpoint_config=run.checkpoints,
            checkpoint_stats=stats, log=log, branch_points=branch_steps, branch_start=start, heartbeat_dir=heartbeat_dir,
        )  # fmt: skip

    start_later_builds()
    result = train_stage(
        ctx, "Training", train, note=progress_note, total=job.steps,
        recorder=partial(PretrainObserver, job=job, bytes_per_token=bytes_per_token, tokenizer=tokenizer, prompt=prompt),
    )  # fmt: skip
    model: LanguageModel = result.trained
    save_model(model, ctx.out)
    write_text_files(ctx)
    curve = [*previous_curve, *result.curve]
    (ctx.out / "curve.json").write_text(json.dumps(curve))
    # Without the folders of its inputs, which depend on the place of the store; the manifest has their addresses.
    (ctx.out / "job.json").write_text(
        job.model_dump_json(indent=2, exclude={"tokens": True, "stream": {"tokenizer"}})
    )
    last = last_values(curve)
    speeds = sorted(record["tokens_per_second"] for record in curve if "tokens_per_second" in record)
    speed = speeds[len(speeds) // 2] if speeds else 0.0
    params, steps = model.params(), max(record["step"] for record in curve)
    size = f"{params['total'] / 1e6:.1f} M parameters"
    if tables := params.get("ngram"):
        size += f", {tables / 1e6:.1f} M of them in look-up tables"
    ctx.summary.update(
        seconds=result.seconds,
        sample_prompt=prompt,
        steps=steps,
        tokens=steps * job.batch_size * job.seq_len,
        params=params,
        peak_memory_bytes=max((record.get("memory_bytes", 0) for record in curve), default=0),
        events=sum("event" in record for record in curve),
        final=last,
        tokens_per_second=speed,
        checkpoints=stats.to_json(),
        headline=f"{size}; {describe_held_out(last)}; {speed:,.0f} tokens/s"
        + (f"; {steps:,} of {job.steps:,} steps, to end on time" if steps < job.steps else ""),
    )
    ctx.report = training_report(
        curve, ctx.summary, config=json.loads((ctx.out / "config.json").read_text()), objective=job.objective,
        expected=ctx.parents["plan"].summary["expected"] if "plan" in ctx.parents else {},
    )  # fmt: skip
    return model


def describe_held_out(last: Mapping[str, float]) -> str:
    """Return the measures of the validation rows from the last values of all metrics, in words."""
    text = held_out_text(last)
    if not text:
        return "no held-out text: the validation split is empty"
    if "kept_step" in last:
        text += f" (weights of step {last['kept_step']:,.0f}; later ones overfit)"
    return text
