"""A smaller model learns what a larger one says: the step `distil`.

    [steps.distil]
    parents = ["rlvr", "tasks"]             # the teacher, and the tasks whose prompts are answered
    student = {layers = 2}                  # or width = 0.5, or heads, mlp_hidden (pruning)
    given = "teacher"                       # learn from the teacher's own answers; "solutions": from those of the tasks
    own = 0.5                               # share of a step's prompts that the student answers itself

    [steps.smaller]
    uses = "distil"
    parents = {model = "pretrain", tokens = "tokens", student = "other"}

Without tasks it learns from documents of pretraining. With `top` the teacher says its likeliest ids once, before the first
step, and is not asked again: that is kept in the scratch folder, so that a run that goes on does not ask twice.

The first parent is the teacher, under the role `model`: what comes out is a stage of it, with its tokenizer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from whorl.align.config import DistilConfig, StudentConfig
from whorl.errors import ConfigError, DataError
from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.align.common import (
    NOT_HASHED,
    evaluate_held_out,
    format_bits_change,
    held_out_bits_per_byte,
    load_sft_examples,
    open_token_set,
    pad_id_of,
)
from whorl.recipes.steps.model import model_folder

if TYPE_CHECKING:
    from whorl.align.distillation.teacher import Teacher
    from whorl.align.model.example import ExampleTokenizer, TokenizedExample
    from whorl.align.model.policy_model import PolicyModel
    from whorl.evals.verify.task import VerifiableTask
    from whorl.models import LanguageModel

PRUNING_EXAMPLES = 64  # texts that say what may be pruned


class DistilStepConfig(DistilConfig):
    """Who the student is, and what it is taught with."""

    student: StudentConfig | None = Field(
        default=None, description="its shape, made from the teacher; or a parent `student`"
    )
    completions_from: Literal["solutions", "teacher"] = Field(
        default="solutions", description="whose answers to the tasks are given: the tasks', or the teacher's"
    )
    teacher_top_k: int = Field(
        default=0, ge=0, description="ids that the teacher says once, before; 0: it is asked in every step"
    )
    max_examples: int = Field(default=2000, ge=1, description="texts to learn from, at most")

    @model_validator(mode="after")
    def _possible(self) -> DistilStepConfig:
        if self.teacher_top_k and self.on_policy_fraction:
            raise ValueError(
                f"on_policy_fraction is {self.on_policy_fraction:g} and teacher_top_k is {self.teacher_top_k}: cached teacher "
                "logits cover given texts only; set teacher_top_k to 0"
            )
        return self


@step(
    "model",
    config=DistilStepConfig,
    parents={"model": "model", "student?": "model", "tasks?": "tasks", "tokens?": "tokens"},
    not_hashed=NOT_HASHED,
)
def distil(ctx: StepContext, config: DistilStepConfig) -> None:
    """Teach a smaller model what a larger one says."""
    from whorl.align.distillation.train import train_student
    from whorl.align.stage.io import (
        load_example_tokenizer,
        load_stage_model,
        make_policy_model,
        read_tasks,
        save_stage_model,
    )

    folder, machine = model_folder(ctx), ctx.machine
    machine.apply()
    scribe = load_example_tokenizer(folder)
    model = load_stage_model(folder, config, machine)
    model.context_hint = config.seq_len + 1
    texts, left = _load_examples(ctx, config, scribe, model)
    student, origin = _make_student(ctx, config, scribe, model, texts)
    network = make_policy_model(
        student, scribe, config, context_hint=config.seq_len + 1, temperature=config.temperature
    )
    tests: list[VerifiableTask] = []
    if "tasks" in ctx.parents:
        tests = read_tasks(ctx.parents["tasks"].path, "test")
    teacher, texts = _make_teacher(ctx, config, scribe, model, texts)
    as_taught = make_policy_model(
        model, scribe, config.model_copy(update={"lora": None}), context_hint=config.seq_len + 1
    )

    def look(at: PolicyModel) -> dict[str, float]:
        return evaluate_held_out(
            at, scribe, tests, {"accuracy": config.temperature, "accuracy_greedy": None},
            max_tokens=config.max_completion_tokens, length=config.seq_len + 1, seed=config.seed,
        )  # fmt: skip

    solved = {"teacher": look(as_taught)}
    model.requires_grad_(False)
    solved["before"] = look(network)
    bits = [held_out_bits_per_byte(ctx, network.model, scribe)]
    last, began = dict[str, float](), time.monotonic()
    with ctx.progress.task("Distilling", total=None, unit="steps") as bar, ctx.run.metrics(ctx.name) as log:

        def observe(step: int, metrics: dict[str, float]) -> None:
            log.write(step, metrics)
            last.update(metrics)
            note = f"{config.divergence} divergence {metrics['kl']:.4f}"
            if "logprob_diff_max" in metrics:
                note += f", log-prob difference {metrics['logprob_diff_max']:.0e}"
            bar.update(done=step, note=note)

        train_student(
            network, teacher, texts, config, example_tokenizer=scribe, pad_id=pad_id_of(scribe), callback=observe,
            checkpoint_dir=ctx.scratch, log=ctx.progress.log,
        )  # fmt: skip
    solved["after"] = look(network)
    bits.append(held_out_bits_per_byte(ctx, network.model, scribe))
    save_stage_model(network, origin, ctx.out)
    (ctx.out / "curve.json").write_text(json.dumps([*ctx.run.read_metrics(ctx.name)]))
    sizes = {"teacher": model.params()["total"], "student": student.params()["total"]}
    headline = f"{sizes['student'] / 1e6:.2f} M of the teacher's {sizes['teacher'] / 1e6:.2f} M parameters; "
    headline += f"divergence {last.get('kl', 0.0):.4f}"
    summary: dict[str, Any] = {}
    if solved["after"]:
        summary.update(eval=solved, tasks={"train": len(texts), "test": int(solved["after"]["tasks"])})
        passed = [f"{solved[who]['accuracy_greedy']:.0%}" for who in ("before", "after", "teacher")]
        headline += (
            f"; held-out tasks passed: {passed[0]}, then {passed[1]} (the teacher {passed[2]}), greedily"
        )
    ctx.summary.update(
        summary, texts=len(texts), left_out=left, final=last, sizes=sizes, params=student.params(),
        bits_per_byte={"before": bits[0], "after": bits[1]}, seconds=time.monotonic() - began,
        headline=headline + format_bits_change(*bits),
    )  # fmt: skip


def _load_examples(
    ctx: StepContext, config: DistilStepConfig, scribe: ExampleTokenizer, teacher: LanguageModel
) -> tuple[list[TokenizedExample], dict[str, int]]:
    """(texts to learn from, what was left out and why): of the tasks, else of pretraining.

    Raises:
        ConfigError: neither is a parent. DataError: nothing is left.
    """
    if "tasks" not in ctx.parents and "tokens" not in ctx.parents:
        raise ConfigError(
            f"{ctx.name} has nothing to learn from", expected="a parent that makes tasks, or tokens",
            do=f'add "tasks" to the parents of {ctx.name}',
        )  # fmt: skip
    if "tasks" not in ctx.parents:
        if config.completions_from == "teacher" or config.on_policy_fraction:
            raise ConfigError(
                f"{ctx.name}: documents of pretraining have no prompts to be answered",
                expected='tasks as a parent, for completions_from = "teacher" or on_policy_fraction above 0',
            )
        return _pretraining_examples(ctx, config, scribe), {}
    if config.completions_from == "teacher":
        texts, left = _teacher_completions(ctx, config, scribe, teacher)
    else:
        texts, room = load_sft_examples(ctx, scribe, config.seq_len + 1)
        left = room.rejected
    if not texts:
        why = "; ".join(f"{n:,} {reason}" for reason, n in left.items())
        raise DataError(
            f"no text is left to distil with: {why}", expected="one at least",
            do=f"raise {ctx.name}.seq_len or max_completion_tokens",
        )  # fmt: skip
    return texts[: config.max_examples], left


def _pretraining_examples(
    ctx: StepContext, config: DistilStepConfig, scribe: ExampleTokenizer
) -> list[TokenizedExample]:
    """The first documents of pretraining, each from its beginning on, as far as a row goes."""
    import numpy as np

    from whorl.align.model.example import TokenizedExample

    found = []
    for ids in islice(open_token_set(ctx, scribe).split("train").iter_documents(), config.max_examples):
        taken = np.asarray(ids[: config.seq_len + 1], np.int64)
        mask = np.ones(len(taken), np.bool_)
        mask[0] = False
        if len(taken) > 1:
            found.append(TokenizedExample(taken, mask))
    return found


def _teacher_completions(
    ctx: StepContext, config: DistilStepConfig, scribe: ExampleTokenizer, teacher: LanguageModel
) -> tuple[list[TokenizedExample], dict[str, int]]:
    """The teacher's answers to the tasks' prompts; the same after a kill, for the draws are of the seed."""
    from whorl.align.distillation.teacher import sample_teacher_completions
    from whorl.align.rl.rollout import filter_by_length
    from whorl.align.stage.io import read_tasks
    from whorl.tracking.seeds import derive

    ctx.parents["tasks"].check()
    length = config.seq_len + 1
    given = read_tasks(ctx.parents["tasks"].path, "train")[: config.max_examples]
    kept, left = filter_by_length(scribe, given, length, config.max_completion_tokens)
    prompts = [scribe.prompt(task.prompt or task.messages) for task in kept]
    if not prompts:
        return [], left
    ctx.progress.log(f"    the teacher answers {len(prompts):,} prompts")
    texts, cut = sample_teacher_completions(
        teacher, scribe, prompts, length=length, max_tokens=config.max_completion_tokens,
        temperature=config.temperature, seed=derive(config.seed, "distil", "teacher"),
    )  # fmt: skip
    return texts, {**left, "the teacher's answer has no end": cut} if cut else left


def _make_student(
    ctx: StepContext,
    config: DistilStepConfig,
    scribe: ExampleTokenizer,
    teacher: LanguageModel,
    texts: Sequence[TokenizedExample],
) -> tuple[LanguageModel, Path]:
    """(the student, the folder whose tokenizer it has).

    Raises:
        ConfigError: no student, or two; another vocabulary than the teacher's.
    """
    from whorl.align.distillation.student import make_student
    from whorl.align.distillation.teacher import check_same_vocabulary
    from whorl.align.model.batch import pad
    from whorl.align.stage.io import load_example_tokenizer, load_stage_model
    from whorl.tracking.seeds import generator

    if ("student" in ctx.parents) == (config.student is not None):
        raise ConfigError(
            f"{ctx.name} has {'two students' if config.student else 'no student'}",
            expected=f"a parent in the role student, or {ctx.name}.student = {{n_layers = 2}}: one of them",
        )
    if config.student is None:
        ctx.parents["student"].check()
        folder = ctx.parents["student"].path
        names = ctx.parents["model"].name, ctx.parents["student"].name
        check_same_vocabulary(scribe.tokenizer, load_example_tokenizer(folder).tokenizer, names=names)
        return load_stage_model(folder, config, ctx.machine), folder
    part = pad(texts[:PRUNING_EXAMPLES], pad_id_of(scribe))
    made = make_student(
        teacher, config.student, generator=generator(config.seed, "student"), calibration_ids=[part["tokens"]]
    )
    return made, ctx.parents["model"].path


def _make_teacher(
    ctx: StepContext,
    config: DistilStepConfig,
    scribe: ExampleTokenizer,
    model: LanguageModel,
    texts: list[TokenizedExample],
) -> tuple[Teacher, list[TokenizedExample]]:
    """(the teacher beside, or what it says now, or has said before the run was interrupted; the texts)."""
    from whorl.align.distillation.teacher import (
        MANIFEST,
        CachedTeacher,
        LiveTeacher,
        cache_teacher_logits,
        tokenizer_fingerprint,
    )
    from whorl.align.stage.trainer import dataset_fingerprint

    words = tokenizer_fingerprint(scribe.tokenizer)
    if not config.teacher_top_k:
        return LiveTeacher(model, words), texts
    place = ctx.scratch / "teacher_logits"
    if (place / MANIFEST).is_file():
        told = CachedTeacher.load(place)
        if dataset_fingerprint(told.examples) == dataset_fingerprint(texts):
            return told, list(told.examples)
    with ctx.progress.task("The teacher speaks", total=len(texts), unit="texts") as bar:
        told = cache_teacher_logits(
            model, texts, pad_id=pad_id_of(scribe), top_k=config.teacher_top_k, temperature=config.temperature, vocab_fingerprint=words,
            teacher_name=ctx.parents["model"].address, on_progress=bar.advance,
        )  # fmt: skip
    told.save(place)
    return told, list(told.examples)
