"""From a budget to a trained model: the steps `plan` and `pretrain`."""

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
    """Time real steps on this machine and choose what the budget buys."""
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
    """Raw files that training tokenises on its way, in place of the token set's training split."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sources: list[Source] = Field(min_length=1, description="files (patterns, URLs), weight, final_weight")
    shuffle_bytes: int = Field(
        default=1 << 19, ge=1, description="raw text whose documents are shuffled together"
    )
    block_bytes: int = Field(
        default=1 << 14,
        ge=1,
        description="raw text that is read in one piece; for files read from afar 1000000",
    )
    mixture_warmup_records: int = Field(
        default=1000, ge=1, description="records over which weights become the final ones"
    )
    workers: int = Field(default=1, ge=1, description="processes that tokenise, for each replica")
    fingerprints: list[str] = Field(default=[], description="of the files; found by looking at them")


class PretrainConfig(BaseModel):
    """How the planned run is carried out; what is learned is decided by the plan."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stream: PretrainStreamConfig | None = Field(
        default=None, description="learn from raw files, tokenised on the way, instead of the token set"
    )

    seed: int | None = Field(default=None, description="another seed than the plan's")
    ema: float | None = Field(
        default=None, ge=0, lt=1, description="decay a step of averaged weights, 0 for none; else the plan's"
    )
    checkpoint_seconds: float = Field(default=30.0, gt=0, description="time between checkpoints")
    micro_batch_size: int | None = Field(
        default=None, ge=1, description="rows a forward, a replica; fewer need less memory; default all"
    )
    activation_budget: MemoryText | None = Field(
        default=None,
        description="memory for activations, 2GB or 25%; blocks beyond it are computed again in the backward; default all",
    )
    bf16_weights: Literal["nearest", "stochastic"] | None = Field(
        default=None,
        description="keep the blocks' matrices in bfloat16, rounded so at each update; default fp32 masters",
    )
    schedule: ScheduleConfig = ScheduleConfig()
    decay_branches: list[float] = Field(
        default=[],
        description="shares of the steps for which a step `branch` may decay from this run's plateau",
    )
    spike_guard: SpikeGuardConfig = SpikeGuardConfig()
    deterministic: bool = Field(default=False, description="nothing that was timed decides a bit")
    checkpoints: CheckpointConfig = Field(
        default=CheckpointConfig(), description="how many stay, and where else they go"
    )
    serial_loader: bool = Field(default=False, description="fill batches in the training process (debugging)")

    @model_validator(mode="after")
    def _possible(self) -> PretrainConfig:
        check_branches(self.decay_branches, self.schedule)
        return self


def _with_file_hashes(config: PretrainConfig) -> PretrainConfig:
    """Patterns replaced by files, and what these hold, so that the address changes with them."""
    if config.stream is None:
        return config
    sources = [replace(source, files=expand_globs(source.files)) for source in config.stream.sources]
    prints = [RawFiles(source.files, source.text_field).fingerprint for source in sources]
    raw = config.stream.model_copy(update={"sources": sources, "fingerprints": prints})
    return config.model_copy(update={"stream": raw})


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
    """Trains `job` and writes the model, its tokenizer, its curve (after that of `earlier`) and what it came to.

    stable, start: as of `train.pretrain`.
    """
    from whorl.models import save_model
    from whorl.tokens.shards import TokenSet
    from whorl.tokens.tokenizer import Tokenizer
    from whorl.train.checkpoint import size_report as anatomy
    from whorl.train.checkpoint.manager import CheckpointStats
    from whorl.train.lm.pretrain import pretrain as run_training

    tokens = TokenSet(ctx.parents["tokens"].path)
    tokenizer = Tokenizer.load(ctx.parents["tokenizer"].path)
    began, account = time.monotonic(), CheckpointStats()
    per_token = tokens.split("train").n_bytes / max(1, len(tokens.split("train")))
    with ctx.progress.task("Training", total=job.steps, unit="steps") as task:
        watch = _PretrainObserver(ctx, job, per_token, tokenizer, task)
        model = run_training(
            job,
            ctx.scratch,
            watch,
            checkpoint_seconds=checkpoint_seconds,
            checkpoint_config=checkpoints,
            checkpoint_stats=account,
            log=ctx.progress.log,
            branch_points=branch_steps,
            branch_start=start,
            folder=ctx.run.dir / "watch" / ctx.name,
        )
    watch.close()
    save_model(model, ctx.out)
    tokenizer.save(ctx.out)
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    (ctx.out / "generation_config.json").write_text(
        json.dumps(ids, indent=1) + "\n"
    )  # for those who read an export
    curve = [*previous_curve, *ctx.run.read_metrics(ctx.name)]
    (ctx.out / "curve.json").write_text(json.dumps(curve))
    (ctx.out / "job.json").write_text(job.model_dump_json(indent=2))
    seconds = time.monotonic() - began
    last: dict[str, float] = {}  # of all of the run's lives
    for record in curve:
        last |= {name: value for name, value in record.items() if isinstance(value, float | int)}
    speeds = sorted(record["tokens_per_second"] for record in curve if "tokens_per_second" in record)
    speed = speeds[len(speeds) // 2] if speeds else 0.0
    ctx.summary.update(
        seconds=seconds,
        steps=job.steps,
        tokens=job.steps * job.batch_size * job.seq_len,
        params=model.params(),
        peak_memory_bytes=watch.peak_memory,
        events=sum("event" in record for record in curve),
        final=last,
        tokens_per_second=speed,
        checkpoints={
            **asdict(account),
            "line": account.summary(),
            "anatomy": anatomy.format_line(account.size_report),
        },
        headline=(
            f"{model.params()['total'] / 1e6:.1f} M parameters; held-out {last.get('held_out_bits_per_byte', 0):.3f} "
            f"bits per byte; {speed:,.0f} tokens/s"
        ),
    )


def build_job(ctx: StepContext, config: PretrainConfig) -> Job:
    """The planned job over the parents' tokens: what `pretrain` trains and `whorl profile` looks at."""
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
    words = TokenSet(ctx.parents["tokens"].path).vocab_size
    if words > job.model.vocab_size:
        job = job.model_copy(update={"model": job.model.model_copy(update={"vocab_size": words})})
    return job


def _stream_settings(ctx: StepContext, config: PretrainConfig) -> dict[str, object] | None:
    if config.stream is None:
        return None
    words = str(ctx.parents["tokenizer"].path)
    return {**config.stream.model_dump(mode="json", exclude={"fingerprints"}), "tokenizer": words}


class _PretrainObserver:
    """What training tells, into metrics, the progress bar and the log."""

    def __init__(
        self, ctx: StepContext, job: Job, bytes_per_token: float, tokenizer: Tokenizer, task: ProgressTask
    ) -> None:
        self.ctx, self.steps, self.bytes_per_token = ctx, job.steps, bytes_per_token
        flops = ctx.machine.flops  # of the planned type, which may have been forced then and is not now
        self.peak_flops = flops.get(job.dtype, flops["float32"])  # what utilisation is a share of
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

        self._log(step + 1)  # one that was broken off and is made up for: what was told of its step stays
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
        self.ctx.run.log(f"checkpoint of step {step}: the step waited {seconds:.3f} s")

    def on_event(self, step: int, event: dict[str, Any]) -> None:
        self._log(step)
        assert self.metrics is not None
        told = {
            "event": event["kind"],
            "message": event["message"],
            "action": event["action"],
            "documents": json.dumps(event.get("documents", []), ensure_ascii=False),
            "n_documents": event.get("n_documents", 0),
        }
        self.metrics.write(step, told)

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
    """Bytes that this process and its helpers hold, what they share counted once (where the system tells)."""
    import psutil

    me = psutil.Process()
    total = 0
    for process in [me, *me.children(recursive=True)]:
        try:
            info = process.memory_full_info()
            total += getattr(info, "pss", 0) or info.uss
        except psutil.Error:
            continue  # it ended between the listing and the look
    return total


def model_folder(ctx: StepContext) -> Path:
    """The folder of the parent `model`, its files checked."""
    ctx.parents["model"].check()
    return ctx.parents["model"].path
