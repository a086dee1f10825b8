"""The steps `plan` and `pretrain`: from a budget to a trained model."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.corpus.blocks import RawFiles, Source, expand_globs
from whorl.machine.memory import MemoryText
from whorl.plan.config import PlanConfig
from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.corpus import CORPUS_PARENTS, open_corpus
from whorl.recipes.steps.tokens import read_plan
from whorl.train.checkpoint.remote import CheckpointConfig
from whorl.train.config import ScheduleConfig, SpikeGuardConfig
from whorl.train.lm.decay_branches import check_fractions as check_branches

if TYPE_CHECKING:
    from whorl.models import LanguageModel
    from whorl.tokens.tokenizer import Tokenizer
    from whorl.tracking.progress import ProgressTask
    from whorl.tracking.run import MetricsLog
    from whorl.train.job import Job

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 48


@step("plan", config=PlanConfig, parents=CORPUS_PARENTS, version=4)
def plan(ctx: StepContext, config: PlanConfig) -> None:
    """Time training steps on this machine and choose the configuration for the budget."""
    from whorl.plan.planner import make_plan

    corpus = open_corpus(ctx)
    made = make_plan(config, ctx.machine, corpus.bytes("train"), ctx.progress)
    (ctx.out / "plan.json").write_text(json.dumps(asdict(made), indent=2) + "\n")
    for line in made.arithmetic:
        ctx.progress.log(f"    {line}")
    job = made.job
    headline = (
        f"{job['model']['n_layers']} x {job['model']['d_model']}, vocabulary {made.vocab_size:,}, "
        f"{job['steps']:,} steps"
    )
    if "seconds" in made.expected:
        headline += f", {made.expected['seconds']:.0f} s expected"
    ctx.summary.update(
        expected=made.expected, arithmetic=made.arithmetic, budget=made.budget, headline=headline
    )


class PretrainStreamConfig(BaseModel):
    """Raw files that are tokenized during training, instead of the training split of the token set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sources: list[Source] = Field(min_length=1, description="files (patterns, URLs), weight, final_weight")
    shuffle_bytes: int = Field(
        default=1 << 19, ge=1, description="bytes of raw text that are shuffled together"
    )
    block_bytes: int = Field(
        default=1 << 14,
        ge=1,
        description="raw text per read; for remote files use 1000000",
    )
    mixture_warmup_records: int = Field(
        default=1000, ge=1, description="records over which the weights change to final_weight"
    )
    workers: int = Field(default=1, ge=1, description="tokenizing processes per replica")
    fingerprints: list[str] = Field(default=[], description="of the files; computed")


class PretrainConfig(BaseModel):
    """Execution of the planned run; the plan decides model, data and number of steps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stream: PretrainStreamConfig | None = Field(
        default=None, description="train on raw files, tokenized during training, instead of the token set"
    )

    seed: int | None = Field(default=None, description="default: the seed of the plan")
    ema: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="decay per step of averaged weights, 0 for none; default: the plan's",
    )
    checkpoint_seconds: float = Field(default=30.0, gt=0, description="time between checkpoints")
    micro_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="rows per forward pass and replica; fewer need less memory; default: all",
    )
    activation_budget: MemoryText | None = Field(
        default=None,
        description="memory for activations, 2GB or 25%; blocks beyond it are recomputed in the backward; default: no limit",
    )
    bf16_weights: Literal["nearest", "stochastic"] | None = Field(
        default=None,
        description="store the weight matrices of the blocks in bfloat16 with this rounding; default: fp32 master weights",
    )
    schedule: ScheduleConfig = ScheduleConfig()
    decay_branches: list[float] = Field(
        default=[],
        description="fractions of the steps at which a step `decay_branch` may start to decay",
    )
    spike_guard: SpikeGuardConfig = SpikeGuardConfig()
    deterministic: bool = Field(default=False, description="no timing affects the result")
    checkpoints: CheckpointConfig = Field(
        default=CheckpointConfig(), description="how many are kept, and a remote copy"
    )
    serial_loader: bool = Field(
        default=False, description="fill batches in the training process, for debugging"
    )

    @model_validator(mode="after")
    def _validate(self) -> PretrainConfig:
        check_branches(self.decay_branches, self.schedule)
        return self


def _with_file_hashes(config: PretrainConfig) -> PretrainConfig:
    """Replace patterns by files and add their fingerprints, so that the address changes with the content."""
    if config.stream is None:
        return config
    sources = [replace(source, files=expand_globs(source.files)) for source in config.stream.sources]
    fingerprints = [RawFiles(source.files, source.text_field).fingerprint for source in sources]
    stream = config.stream.model_copy(update={"sources": sources, "fingerprints": fingerprints})
    return config.model_copy(update={"stream": stream})


@step(
    "model",
    config=PretrainConfig,
    complete_config=_with_file_hashes,
    not_hashed=("checkpoint_seconds", "checkpoints", "activation_budget", "serial_loader"),
    parents={"plan": "plan", "tokens": "tokens", "tokenizer": "tokenizer"},
    version=2,
)
def pretrain(ctx: StepContext, config: PretrainConfig) -> None:
    """Train the planned model."""
    from whorl.train.lm import decay_branches as branches

    job = build_job(ctx, config)
    points = {share: branches.branch_step(job, share) for share in config.decay_branches}
    train_and_save(
        ctx,
        job,
        config.checkpoints,
        checkpoint_seconds=config.checkpoint_seconds,
        branch_steps=[*points.values()],
    )
    if points:
        ctx.summary["branches"] = branches.export_branches(ctx.scratch, ctx.out, points, ctx.progress.log)


def train_and_save(
    ctx: StepContext,
    job: Job,
    checkpoints: CheckpointConfig,
    *,
    checkpoint_seconds: float,
    branch_steps: Collection[int] = (),
    start: Path | None = None,
    previous_curve: Iterable[dict[str, Any]] = (),
) -> None:
    """Train `job` and write the model, its tokenizer, its curve and a summary.

    Args:
        branch_steps, start: `branch_points` and `branch_start` of `train.lm.pretrain.pretrain`.
        previous_curve: metrics of the run that the job continues.
    """
    from whorl.models import save_model
    from whorl.tokens.shards import TokenSet
    from whorl.tokens.tokenizer import Tokenizer
    from whorl.train.checkpoint import size_report
    from whorl.train.checkpoint.manager import CheckpointStats
    from whorl.train.lm.pretrain import pretrain as run_training

    tokens = TokenSet(ctx.parents["tokens"].path)
    tokenizer = Tokenizer.load(ctx.parents["tokenizer"].path)
    started, stats = time.monotonic(), CheckpointStats()
    bytes_per_token = tokens.split("train").n_bytes / max(1, len(tokens.split("train")))
    with ctx.progress.task("Training", total=job.steps, unit="steps") as task:
        observer = _PretrainObserver(ctx, job, bytes_per_token, tokenizer, task)
        model = run_training(
            job,
            ctx.scratch,
            observer,
            checkpoint_seconds=checkpoint_seconds,
            checkpoint_config=checkpoints,
            checkpoint_stats=stats,
            log=ctx.progress.log,
            branch_points=branch_steps,
            branch_start=start,
            folder=ctx.run.dir / "watch" / ctx.name,
        )
    observer.close()
    save_model(model, ctx.out)
    tokenizer.save(ctx.out)
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    (ctx.out / "generation_config.json").write_text(json.dumps(ids, indent=1) + "\n")
    curve = [*previous_curve, *ctx.run.read_metrics(ctx.name)]
    (ctx.out / "curve.json").write_text(json.dumps(curve))
    (ctx.out / "job.json").write_text(job.model_dump_json(indent=2))
    seconds = time.monotonic() - started
    last: dict[str, float] = {}  # over all attempts of the run
    for record in curve:
        last |= {name: value for name, value in record.items() if isinstance(value, float | int)}
    speeds = sorted(record["tokens_per_second"] for record in curve if "tokens_per_second" in record)
    speed = speeds[len(speeds) // 2] if speeds else 0.0
    ctx.summary.update(
        seconds=seconds,
        steps=job.steps,
        tokens=job.steps * job.batch_size * job.seq_len,
        params=model.params(),
        peak_memory_bytes=observer.peak_memory,
        events=sum("event" in record for record in curve),
        final=last,
        tokens_per_second=speed,
        checkpoints={
            **asdict(stats),
            "line": stats.summary(),
            "size_report": size_report.format_line(stats.size_report),
        },
        headline=(
            f"{model.params()['total'] / 1e6:.1f} M parameters; held-out {last.get('held_out_bits_per_byte', 0):.3f} "
            f"bits per byte; {speed:,.0f} tokens/s"
        ),
    )


def build_job(ctx: StepContext, config: PretrainConfig) -> Job:
    """Return the planned job on the parents' tokens; `pretrain` trains it and `whorl profile` measures it."""
    from whorl.tokens.shards import TokenSet
    from whorl.train.job import Job

    for role in ("tokens", "tokenizer"):
        ctx.parents[role].check()
    planned = read_plan(ctx)["job"]
    job = Job.model_validate(
        {
            **planned,
            "tokens": str(ctx.parents["tokens"].path),
            "serial_loader": config.serial_loader,
            "stream": _stream_settings(ctx, config),
            "bf16_weights": config.bf16_weights,
            "schedule": config.schedule,
            **({"ema": config.ema} if config.ema is not None else {}),
            "spike_guard": config.spike_guard,
            "deterministic": config.deterministic or planned.get("deterministic", False),
            "activation_budget": config.activation_budget,
            **({"micro_batch_size": config.micro_batch_size} if config.micro_batch_size is not None else {}),
            **({"seed": config.seed} if config.seed is not None else {}),
        }
    )
    vocab_size = TokenSet(ctx.parents["tokens"].path).vocab_size
    if vocab_size > job.model.vocab_size:
        job = job.model_copy(update={"model": job.model.model_copy(update={"vocab_size": vocab_size})})
    return job


def _stream_settings(ctx: StepContext, config: PretrainConfig) -> dict[str, object] | None:
    if config.stream is None:
        return None
    tokenizer = str(ctx.parents["tokenizer"].path)
    return {**config.stream.model_dump(mode="json", exclude={"fingerprints"}), "tokenizer": tokenizer}


class _PretrainObserver:
    """Writes the metrics and events of training to the run, the progress bar and the log."""

    def __init__(
        self, ctx: StepContext, job: Job, bytes_per_token: float, tokenizer: Tokenizer, task: ProgressTask
    ) -> None:
        self.ctx, self.steps, self.bytes_per_token = ctx, job.steps, bytes_per_token
        flops = ctx.machine.flops  # for the planned type, which may differ from the machine's choice
        self.peak_flops = flops.get(job.dtype, flops["float32"])  # denominator of `mfu`
        self.tokenizer, self.task = tokenizer, task
        self.metrics: MetricsLog | None = None
        self.last: dict[str, float] = {}
        self.started = time.monotonic()
        self.peak_memory = 0

    def _log(self, step: int) -> None:
        if self.metrics is None:
            self.metrics = self.ctx.run.metrics(self.ctx.name, resume_at=step)

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self._log(step)
        assert self.metrics is not None
        metrics = {**metrics, "mfu": metrics["flops_per_second"] / self.peak_flops}
        self.metrics.write(step, {**metrics, "seconds": time.monotonic() - self.started})
        self.last.update(metrics)
        held = self.last.get("held_out_bits_per_byte")
        note = f"loss {metrics['nll']:.3f}, {metrics['tokens_per_second']:,.0f} tokens/s"
        self.task.update(done=step, note=note + (f", held-out {held:.3f} bits per byte" if held else ""))

    def on_evaluation(self, step: int, metrics: dict[str, float], model: LanguageModel) -> None:
        import math

        self._log(
            step + 1
        )  # keeps the metrics of `step` itself if the evaluation is repeated after an interruption
        assert self.metrics is not None
        self.peak_memory = max(self.peak_memory, _memory_in_use())
        values: dict[str, float | str] = dict(metrics)
        if "held_out_nll" in metrics:
            values["held_out_bits_per_byte"] = metrics["held_out_nll"] / math.log(2) / self.bytes_per_token
        self.last.update({k: v for k, v in values.items() if isinstance(v, float)})
        if step * 4 // self.steps > (step - max(1, self.steps // 40)) * 4 // self.steps:
            values["sample"] = self._sample(model, step)
        self.metrics.write(step, values)

    def on_checkpoint(self, step: int, seconds: float) -> None:
        self.ctx.run.log(f"checkpoint of step {step}: stall {seconds:.3f} s")

    def on_event(self, step: int, event: dict[str, Any]) -> None:
        self._log(step)
        assert self.metrics is not None
        record = {
            "event": event["kind"],
            "message": event["message"],
            "action": event["action"],
            "documents": json.dumps(event.get("documents", []), ensure_ascii=False),
            "n_documents": event.get("n_documents", 0),
        }
        self.metrics.write(step, record)

    def _sample(self, model: LanguageModel, step: int) -> str:
        from whorl.engine import SamplingParams, generate
        from whorl.tokens.healing import heal
        from whorl.tracking.seeds import generator

        t = self.tokenizer
        healed = heal(t, SAMPLE_PROMPT)
        ids = []
        for token in generate(
            model,
            healed.ids,
            SamplingParams(),
            generator(0, "sample", step),
            max_tokens=SAMPLE_TOKENS,
            banned_ids=(*t.control_ids, *range(t.vocab_size, model.config.vocab_size)),
            forced_prefix=healed.forced_prefix,
            token_bytes=t.token_bytes[: t.n_ordinary],
        ):
            if token.id == t.eos_id:
                break
            ids.append(token.id)
        text = SAMPLE_PROMPT + t.decode(ids)[len(healed.forced_prefix) :].decode("utf-8", "replace")
        self.ctx.progress.log(f"    step {step:,}: " + text.replace("\n", "\n      "))
        return text

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()


def _memory_in_use() -> int:
    """Return the bytes held by this process and its children; shared pages count once where the system reports them."""
    import psutil

    parent = psutil.Process()
    total = 0
    for process in [parent, *parent.children(recursive=True)]:
        try:
            info = process.memory_full_info()
            total += getattr(info, "pss", 0) or info.uss
        except psutil.Error:
            continue  # the process ended in the meantime
    return total


def model_folder(ctx: StepContext) -> Path:
    """Return the folder of the parent `model`, with its files checked."""
    ctx.parents["model"].check()
    return ctx.parents["model"].path
