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
from whorl.recipes.steps.align.rl import UNSEEN, bits_line, held_out, measured, pad_of, solutions, token_set
from whorl.recipes.steps.model import model_folder

if TYPE_CHECKING:
    from whorl.align.distillation.teacher import Teacher
    from whorl.align.model.example import Scribe, Text
    from whorl.align.model.policy_model import Network
    from whorl.evals.verify.task import Task
    from whorl.models import LanguageModel

PRUNED_BY = 64  # texts that say what may be pruned


class DistilStepConfig(DistilConfig):
    """Who the student is, and what it is taught with."""

    student: StudentConfig | None = Field(
        default=None, description="its shape, made from the teacher; or a parent `student`"
    )
    given: Literal["solutions", "teacher"] = Field(
        default="solutions", description="whose answers to the tasks are given: the tasks', or the teacher's"
    )
    top: int = Field(
        default=0, ge=0, description="ids that the teacher says once, before; 0: it is asked in every step"
    )
    n: int = Field(default=2000, ge=1, description="texts to learn from, at most")

    @model_validator(mode="after")
    def _possible(self) -> DistilStepConfig:
        if self.top and self.own:
            raise ValueError(
                f"own is {self.own:g} and top {self.top}: what the teacher said before is of given texts alone; set top to 0"
            )
        return self


@step(
    "model",
    config=DistilStepConfig,
    parents={"model": "model", "student?": "model", "tasks?": "tasks", "tokens?": "tokens"},
    unseen=UNSEEN,
)
def distil(ctx: StepContext, config: DistilStepConfig) -> None:
    """Teach a smaller model what a larger one says."""
    from whorl.align.distillation.train import learn_from
    from whorl.align.stage.io import network_of, open_model, open_scribe, read_tasks, save_stage

    folder, machine = model_folder(ctx), ctx.machine
    machine.apply()
    scribe = open_scribe(folder)
    model = open_model(folder, config, machine)
    model.room = config.length + 1
    texts, left = _texts(ctx, config, scribe, model)
    student, origin = _student(ctx, config, scribe, model, texts)
    network = network_of(student, scribe, config, room=config.length + 1, temperature=config.temperature)
    tests: list[Task] = []
    if "tasks" in ctx.parents:
        tests = read_tasks(ctx.parents["tasks"].path, "test")
    teacher, texts = _teacher(ctx, config, scribe, model, texts)
    as_taught = network_of(model, scribe, config.model_copy(update={"lora": None}), room=config.length + 1)

    def look(at: Network) -> dict[str, float]:
        return held_out(
            at, scribe, tests, {"passed": config.temperature, "passed_greedily": None},
            max_tokens=config.max_tokens, length=config.length + 1, seed=config.seed,
        )  # fmt: skip

    solved = {"teacher": look(as_taught)}
    model.requires_grad_(False)
    solved["before"] = look(network)
    bits = [measured(ctx, network.model, scribe)]
    last, began = dict[str, float](), time.monotonic()
    with ctx.progress.task("Distilling", total=None, unit="steps") as bar, ctx.run.metrics(ctx.name) as log:

        def observe(step: int, metrics: dict[str, float]) -> None:
            log.write(step, metrics)
            last.update(metrics)
            note = f"{config.divergence} divergence {metrics['kl']:.4f}"
            if "parity" in metrics:
                note += f", parity {metrics['parity']:.0e}"
            bar.update(done=step, note=note)

        learn_from(
            network, teacher, texts, config, scribe=scribe, pad_id=pad_of(scribe), observe=observe,
            scratch=ctx.scratch, say=ctx.progress.say,
        )  # fmt: skip
    solved["after"] = look(network)
    bits.append(measured(ctx, network.model, scribe))
    save_stage(network, origin, ctx.out)
    (ctx.out / "curve.json").write_text(json.dumps([*ctx.run.read_metrics(ctx.name)]))
    sizes = {"teacher": model.params()["total"], "student": student.params()["total"]}
    headline = f"{sizes['student'] / 1e6:.2f} M of the teacher's {sizes['teacher'] / 1e6:.2f} M parameters; "
    headline += f"divergence {last.get('kl', 0.0):.4f}"
    summary: dict[str, Any] = {}
    if solved["after"]:
        summary.update(solved=solved, tasks={"train": len(texts), "test": int(solved["after"]["tasks"])})
        passed = [f"{solved[who]['passed_greedily']:.0%}" for who in ("before", "after", "teacher")]
        headline += (
            f"; held-out tasks passed: {passed[0]}, then {passed[1]} (the teacher {passed[2]}), greedily"
        )
    ctx.summary.update(
        summary, texts=len(texts), left_out=left, final=last, sizes=sizes, params=student.params(),
        bits_per_byte={"before": bits[0], "after": bits[1]}, seconds=time.monotonic() - began,
        headline=headline + bits_line(*bits),
    )  # fmt: skip


def _texts(
    ctx: StepContext, config: DistilStepConfig, scribe: Scribe, teacher: LanguageModel
) -> tuple[list[Text], dict[str, int]]:
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
        if config.given == "teacher" or config.own:
            raise ConfigError(
                f"{ctx.name}: documents of pretraining have no prompts to be answered",
                expected='tasks as a parent, for given = "teacher" or own above 0',
            )
        return _documents(ctx, config, scribe), {}
    if config.given == "teacher":
        texts, left = _said_by(ctx, config, scribe, teacher)
    else:
        texts, room = solutions(ctx, scribe, config.length + 1)
        left = room.refused
    if not texts:
        why = "; ".join(f"{n:,} {reason}" for reason, n in left.items())
        raise DataError(
            f"no text is left to distil with: {why}", expected="one at least",
            do=f"raise {ctx.name}.length or max_tokens",
        )  # fmt: skip
    return texts[: config.n], left


def _documents(ctx: StepContext, config: DistilStepConfig, scribe: Scribe) -> list[Text]:
    """The first documents of pretraining, each from its beginning on, as far as a row goes."""
    import numpy as np

    from whorl.align.model.example import Text

    found = []
    for ids in islice(token_set(ctx, scribe).split("train").iter_documents(), config.n):
        taken = np.asarray(ids[: config.length + 1], np.int64)
        mask = np.ones(len(taken), np.bool_)
        mask[0] = False
        if len(taken) > 1:
            found.append(Text(taken, mask))
    return found


def _said_by(
    ctx: StepContext, config: DistilStepConfig, scribe: Scribe, teacher: LanguageModel
) -> tuple[list[Text], dict[str, int]]:
    """The teacher's answers to the tasks' prompts; the same after a kill, for the draws are of the seed."""
    from whorl.align.distillation.teacher import teacher_texts
    from whorl.align.rl.rollout import with_room
    from whorl.align.stage.io import read_tasks
    from whorl.tracking.seeds import derive

    ctx.parents["tasks"].check()
    length = config.length + 1
    given = read_tasks(ctx.parents["tasks"].path, "train")[: config.n]
    kept, left = with_room(scribe, given, length, config.max_tokens)
    prompts = [scribe.prompt(task.prompt or task.messages) for task in kept]
    if not prompts:
        return [], left
    ctx.progress.say(f"    the teacher answers {len(prompts):,} prompts")
    texts, cut = teacher_texts(
        teacher, scribe, prompts, length=length, max_tokens=config.max_tokens,
        temperature=config.temperature, seed=derive(config.seed, "distil", "teacher"),
    )  # fmt: skip
    return texts, {**left, "the teacher's answer has no end": cut} if cut else left


def _student(
    ctx: StepContext, config: DistilStepConfig, scribe: Scribe, teacher: LanguageModel, texts: Sequence[Text]
) -> tuple[LanguageModel, Path]:
    """(the student, the folder whose tokenizer it has).

    Raises:
        ConfigError: no student, or two; another vocabulary than the teacher's.
    """
    from whorl.align.distillation.student import make_student
    from whorl.align.distillation.teacher import same_words
    from whorl.align.model.batch import lay
    from whorl.align.stage.io import open_model, open_scribe
    from whorl.tracking.seeds import generator

    if ("student" in ctx.parents) == (config.student is not None):
        raise ConfigError(
            f"{ctx.name} has {'two students' if config.student else 'no student'}",
            expected=f"a parent in the role student, or {ctx.name}.student = {{layers = 2}}: one of them",
        )
    if config.student is None:
        ctx.parents["student"].check()
        folder = ctx.parents["student"].path
        names = ctx.parents["model"].name, ctx.parents["student"].name
        same_words(scribe.tokenizer, open_scribe(folder).tokenizer, names=names)
        return open_model(folder, config, ctx.machine), folder
    part = lay(texts[:PRUNED_BY], pad_of(scribe))
    made = make_student(
        teacher, config.student, generator=generator(config.seed, "student"), rows=[part["tokens"]]
    )
    return made, ctx.parents["model"].path


def _teacher(
    ctx: StepContext, config: DistilStepConfig, scribe: Scribe, model: LanguageModel, texts: list[Text]
) -> tuple[Teacher, list[Text]]:
    """(the teacher beside, or what it says now, or has said before the run was interrupted; the texts)."""
    from whorl.align.distillation.teacher import MANIFEST, Beside, Told, fingerprint_of, tell
    from whorl.align.stage.trainer import fingerprint

    words = fingerprint_of(scribe.tokenizer)
    if not config.top:
        return Beside(model, words), texts
    place = ctx.scratch / "told"
    if (place / MANIFEST).is_file():
        told = Told.load(place)
        if fingerprint(told.texts) == fingerprint(texts):
            return told, list(told.texts)
    with ctx.progress.task("The teacher speaks", total=len(texts), unit="texts") as bar:
        told = tell(
            model, texts, pad_id=pad_of(scribe), top=config.top, temperature=config.temperature, words=words,
            teacher=ctx.parents["model"].address, advance=bar.advance,
        )  # fmt: skip
    told.save(place)
    return told, list(told.texts)
