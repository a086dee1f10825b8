"""The step `asynchronous`: one planned model, trained by each asynchronous method at equal tokens and at equal time.

    [steps.asynchronous]
    parents = ["plan", "tokens", "tokenizer"]
    methods = ["synchronous", "asynchronous", "diloco"]

At equal tokens every method trains on the planned batches. At equal time it has the seconds that the first method took for
them. The schedule follows the measure. Kernels are torch's, on one thread per worker, so that the methods alone differ.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from whorl.errors import ConfigError, nearest_divisors
from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.pretrain.pretrain import PretrainConfig, build_job
from whorl.recipes.steps.tokens import open_tokenizer
from whorl.report.blocks import Bar, Column, Curve, Histogram, Line, Table
from whorl.train.asynchronous.methods import METHODS

if TYPE_CHECKING:
    from whorl.train.job import Job

MEASURES = {"tokens": "equal tokens", "seconds": "equal time"}
EVALUATIONS = 10  # on held-out rows during each run
Runs = dict[str, dict[str, Any]]  # measure -> method -> figures


class AsynchronousConfig(BaseModel):
    """Methods and workers; model, data and steps are the plan's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    methods: list[str] = Field(default=[*METHODS], min_length=1, description="the first is the baseline")
    workers: int = Field(default=2, ge=1, description="processes; they share the rows of a batch")
    slowdown: float = Field(default=1.0, ge=1, description="time of the last worker as a multiple")
    seed: int | None = Field(default=None, ge=0, description="default: the seed of the plan")

    @field_validator("methods")
    @classmethod
    def _known(cls, methods: list[str]) -> list[str]:
        for name in methods:
            if name not in METHODS:
                raise ValueError(f"{name!r} is no method: one of {', '.join(METHODS)}")
        return methods


@step(
    "asynchronous",
    config=AsynchronousConfig,
    parents={name: name for name in ("plan", "tokens", "tokenizer")},
)
def asynchronous(ctx: StepContext, config: AsynchronousConfig) -> None:
    """Train one model by each asynchronous method, at equal tokens and at equal time."""
    import torch

    from whorl.parallel.process_group import ProcessGroup
    from whorl.train.asynchronous.problems import LanguageModelProblem
    from whorl.train.asynchronous.server import train
    from whorl.train.asynchronous.worker import Worker
    from whorl.train.metrics.validation import Validator, held_out_bytes_per_target

    job, runs = _job(ctx, config), Runs()
    tokenizer, group = open_tokenizer(ctx), ProcessGroup()
    validator = Validator(job, group)
    bytes_per_target = held_out_bytes_per_target(job, tokenizer.text_bytes(tokenizer.vocab_size))
    if not bytes_per_target:
        raise ConfigError("the validation split has no text to compare methods on", do="give more text")

    def bits(network: Any) -> float:
        return validator(network, group)["held_out_nll"] / math.log(2) / bytes_per_target

    torch.set_num_threads(1)
    for measure, words in MEASURES.items():
        for name in config.methods:
            path = ctx.scratch / f"{measure}-{name}.json"
            seconds = None if measure == "tokens" else runs["tokens"][config.methods[0]]["seconds"]
            if not path.exists():  # a run that was interrupted keeps the others
                slow = [*[1.0] * (config.workers - 1), config.slowdown]
                made = (LanguageModelProblem(job), METHODS[name], config.workers)
                with ctx.progress.task(f"{name}, {words}"):
                    _, found = train(
                        [Worker(*made, each) for each in slow], job.steps, seconds=seconds, evaluate=bits,
                        evaluations=EVALUATIONS, log=ctx.progress.log,
                    )  # fmt: skip
                path.write_text(json.dumps(found))
            runs.setdefault(measure, {})[name] = run = json.loads(path.read_text())
            text = f"{_bits(run):.3f} bits per byte, {run['tokens']:,} tokens in {run['seconds']:.1f} s"
            ctx.progress.log(f"    {name:<13} {words}: {text}")
    (ctx.out / "methods.json").write_text(json.dumps(runs, indent=1))
    final = {m: {name: _bits(run) for name, run in found.items()} for m, found in runs.items()}
    best = [(words, *min((bits, name) for name, bits in final[m].items())) for m, words in MEASURES.items()]
    headline = "; ".join(f"{words}: {name} {bits:.3f} bits per byte" for words, bits, name in best)
    ctx.summary.update(bits_per_byte=final, headline=headline)
    _report(ctx, config, runs)


def _bits(run: dict[str, Any]) -> float:
    """Return bits per byte at the end of a run."""
    return float(run["curve"][-1]["value"])


def _job(ctx: StepContext, config: AsynchronousConfig) -> Job:
    """Return the planned job, for workers on this machine's processor."""
    job = build_job(ctx, PretrainConfig(seed=config.seed))
    if job.batch_size % config.workers:
        what = f"{config.workers} workers share batches of {job.batch_size} rows"
        near = nearest_divisors(job.batch_size, config.workers)
        raise ConfigError(what, expected=f"a divisor, such as {near}", do=f"set {ctx.name}.workers")
    if job.model.experts is not None or job.model.masked is not None:
        raise ConfigError("workers train decoders without experts", do="omit plan.model.experts")
    dtype = job.dtype if job.dtype in ("float32", "bfloat16") else "float32"
    one = {"device": "cpu", "compile": False, "replicas": 1, "threads": 1, "serial_loader": True}
    return job.model_copy(update={**one, "long_ratio": 0.0, "layout": None, "dtype": dtype})


def _report(ctx: StepContext, config: AsynchronousConfig, runs: Runs) -> None:
    """Write curves, the table and the staleness of each method."""
    from whorl.report.agents import STYLES

    section, blocks = "Asynchronous", ctx.report.blocks
    for measure, found in runs.items():
        title, lines = f"Held-out bits per byte at {MEASURES[measure]}", []
        for (name, run), style in zip(found.items(), STYLES, strict=False):
            x, y = ([point[key] for point in run["curve"]] for key in (measure, "value"))
            lines.append(Line(name=name, x=x, y=y, style=style))
        blocks.append(Curve(section=section, title=title, lines=lines, label=title, x_label=measure))
    rows, bars = list[list[Any]](), list[Bar]()
    for name, run in runs["tokens"].items():
        lags = sorted((int(lag), n) for lag, n in run["lags"].items()) if METHODS[name].staleness != 0 else []
        bars += [Bar(cells=[name, str(lag), f"{n:,}"], value=n) for lag, n in lags]
        timed = runs["seconds"][name]
        rows.append(
            [name, METHODS[name].about, f"{_bits(run):.3f}", f"{run['seconds']:.1f}", f"{_bits(timed):.3f}",
             f"{timed['tokens']:,}", f"{run['waited']:.0%}", f"{run['lost']:,} of {run['moved']:,}",
             str(sum(run["refused"].values())), str(len(run["left_out"]))]
        )  # fmt: skip
    texts, shown = (
        ("Method", "A step"),
        ("Bits per byte", "Seconds", "At equal time", "Tokens", "Workers wait"),
    )
    counts = ("Lost rows", "Dropped", "Left out")
    columns = [Column(name=name, number=name not in texts) for name in (*texts, *shown, *counts)]
    note = (
        f"{config.workers} workers; the last one takes {config.slowdown:g} x the time. Lost rows: moved without a lock, and "
        "undone by another's write. Dropped: gradients that were not finite. Left out: workers that died."
    )
    blocks.append(Table(section=section, title="Methods", note=note, columns=columns, rows=rows))
    columns = [columns[0], *(Column(name=name, number=True) for name in ("Versions behind", "Gradients"))]
    note = "Versions between the weights of a gradient and those that it moved, at equal tokens."
    blocks.append(Histogram(section=section, title="Staleness", note=note, columns=columns, bars=bars))
