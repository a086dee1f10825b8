"""The step `distil`: train a smaller model on the distribution of a larger one.

    [steps.distil]
    parents = ["rl", "tasks"]               # the teacher, and the tasks whose prompts are completed
    student = {n_layers = 2}                # or width_multiplier, or n_heads, mlp_hidden (pruning)
    texts.completions_from = "teacher"            # "solutions": the solutions of the tasks
    on_policy_fraction = 0.5                # share of a step's prompts that the student completes

    [steps.smaller]
    uses = "distil"
    parents = {model = "pretrain", tokens = "tokens", student = "other"}

Without tasks the student trains on pretraining documents. With `texts.teacher_top_k` the teacher's likeliest logits are
computed once, before the first step, and cached in the scratch folder, where a resumed run finds them.

The teacher has the role `model`: the result counts as a stage of the teacher and keeps its tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.align.config import DistilConfig, StageDataConfig, StudentConfig
from whorl.errors import ConfigError, DataError
from whorl.recipes.registry import StepContext, step
from whorl.recipes.stage import (
    NOT_HASHED,
    evaluate_held_out,
    format_likelihood_change,
    held_out_likelihood,
    load_sft_examples,
    open_token_set,
    pad_id_of,
    train_stage,
    write_curve,
)

if TYPE_CHECKING:
    from whorl.align.distillation.teacher import Teacher
    from whorl.align.model.policy_model import PolicyModel
    from whorl.models import LanguageModel
    from whorl.tokens.token_encoder import TokenEncoder, TokenizedExample

PRUNING_EXAMPLES = 64  # texts that measure the importance of heads and channels


class TextSourceConfig(BaseModel):
    """The training texts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    completions_from: Literal["solutions", "teacher"] = Field(
        default="solutions",
        description="completions of the task prompts: the given solutions, or sampled from the teacher",
    )
    max_examples: int = Field(default=2000, ge=1, description="training texts, at most")


class DistilTextsConfig(TextSourceConfig):
    """The training texts, and the logits of the teacher for them."""

    teacher_top_k: int = Field(
        default=0,
        ge=0,
        description="logits per position that the teacher caches before training; 0: it runs in every step",
    )


class DistilStepConfig(DistilConfig):
    """The student, and the texts it trains on."""

    student: StudentConfig | None = Field(
        default=None, description="shape derived from the teacher; alternatively a parent `student`"
    )
    texts: DistilTextsConfig = Field(default=DistilTextsConfig(), description="the training texts")

    @model_validator(mode="after")
    def _validate(self) -> DistilStepConfig:
        if self.texts.teacher_top_k and self.on_policy_fraction:
            raise ValueError(
                f"on_policy_fraction is {self.on_policy_fraction:g} and texts.teacher_top_k is {self.texts.teacher_top_k}: "
                "cached teacher logits cover given texts only; set texts.teacher_top_k to 0"
            )
        return self


@step(
    "model",
    config=DistilStepConfig,
    parents={"model": "model", "student?": "model", "tasks?": "tasks", "tokens?": "tokens"},
    not_hashed=NOT_HASHED,
    version=2,
)
def distil(ctx: StepContext, config: DistilStepConfig) -> None:
    """Train a student on the distribution of its teacher."""
    from whorl.align.distillation.train import train_student
    from whorl.align.stage.io import (
        load_stage_model,
        make_policy_model,
        read_tasks,
        save_stage_model,
    )
    from whorl.tokens.token_encoder import TokenEncoder

    folder, machine = ctx.parent_folder("model"), ctx.machine
    machine.apply()
    tokenizer = TokenEncoder.load(folder)
    model = load_stage_model(folder, config, machine)
    model.context_hint = config.data.seq_len + 1
    needs_prompts = config.texts.completions_from == "teacher" or config.on_policy_fraction > 0
    texts, left = load_texts(ctx, config, tokenizer, model, needs_prompts=needs_prompts)
    student, origin = _make_student(ctx, config, tokenizer, model, texts)
    network = make_policy_model(
        student, tokenizer, config, context_hint=config.data.seq_len + 1, temperature=config.temperature
    )
    tests = read_tasks(ctx.parents["tasks"].path, "test") if "tasks" in ctx.parents else []
    teacher, texts = _make_teacher(ctx, config, tokenizer, model, texts)
    teacher_policy = make_policy_model(
        model,
        tokenizer,
        config.model_copy(update={"model": config.model.model_copy(update={"lora": None})}),
        context_hint=config.data.seq_len + 1,
    )

    def evaluate(policy: PolicyModel) -> dict[str, float]:
        return evaluate_held_out(
            policy, tokenizer, tests, {"accuracy": config.temperature, "accuracy_greedy": 0.0},
            max_tokens=config.max_completion_tokens, length=config.data.seq_len + 1, seed=config.seed,
        )  # fmt: skip

    of_teacher = evaluate(teacher_policy)
    model.requires_grad_(False)

    def note(metrics: dict[str, float]) -> str:
        text = f"{config.divergence} divergence {metrics['kl']:.4f}"
        if "logprob_diff_max" in metrics:
            text += f", log-prob difference {metrics['logprob_diff_max']:.0e}"
        return text

    train = partial(
        train_student,
        network,
        teacher,
        texts,
        config,
        encoder=tokenizer,
        pad_id=pad_id_of(tokenizer),
    )
    result = train_stage(
        ctx, "Distilling", train, note=note, evaluate=lambda _: evaluate(network),
        likelihood=lambda: held_out_likelihood(ctx, network.model, tokenizer),
    )  # fmt: skip
    measured = {"teacher": of_teacher, **result.evaluation}
    save_stage_model(network, origin, ctx.out)
    sizes = {"teacher": model.params()["total"], "student": student.params()["total"]}
    headline = f"{sizes['student'] / 1e6:.2f} M of the teacher's {sizes['teacher'] / 1e6:.2f} M parameters; "
    headline += f"divergence {result.final.get('kl', 0.0):.4f}"
    summary: dict[str, Any] = {}
    if measured["after"]:
        summary.update(eval=measured, tasks={"train": len(texts), "test": int(measured["after"]["tasks"])})
        accuracy = [f"{measured[name]['accuracy_greedy']:.0%}" for name in ("before", "after", "teacher")]
        headline += (
            f"; greedy accuracy on held-out tasks {accuracy[0]}, then {accuracy[1]} (teacher {accuracy[2]})"
        )
    ctx.summary.update(
        summary, texts=len(texts), left_out=left, final=result.final, sizes=sizes, params=student.params(),
        **result.likelihood, seconds=result.seconds,
        headline=headline + format_likelihood_change(**result.likelihood),
    )  # fmt: skip
    write_curve(
        ctx, objective=config.divergence, trained_on=f"{len(texts):,} texts",
        loss=("kl", "Divergence from the teacher in nats per trained token"),
    )  # fmt: skip


class TextsConfig(Protocol):
    """The settings of training texts."""

    @property
    def data(self) -> StageDataConfig: ...
    @property
    def texts(self) -> TextSourceConfig: ...
    @property
    def max_completion_tokens(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def seed(self) -> int: ...


def load_texts(
    ctx: StepContext,
    config: TextsConfig,
    tokenizer: TokenEncoder,
    teacher: LanguageModel,
    *,
    needs_prompts: bool,
) -> tuple[list[TokenizedExample], dict[str, int]]:
    """Return (training texts, reason -> number of rejected texts) from the tasks, else from pretraining documents.

    Raises:
        ConfigError: neither is a parent, or documents where prompts are needed.
        DataError: no text is left.
    """
    if "tasks" not in ctx.parents and "tokens" not in ctx.parents:
        raise ConfigError(
            f"{ctx.name} has no training texts", expected="a parent that makes tasks, or tokens",
            do=f'add "tasks" to the parents of {ctx.name}',
        )  # fmt: skip
    if "tasks" not in ctx.parents:
        if needs_prompts:
            raise ConfigError(
                f"{ctx.name}: pretraining documents have no prompts to complete",
                expected='a parent that makes tasks, for texts.completions_from = "teacher" or on_policy_fraction above 0',
            )
        return _pretraining_examples(ctx, config, tokenizer), {}
    if config.texts.completions_from == "teacher":
        texts, left = _teacher_completions(ctx, config, tokenizer, teacher)
    else:
        texts, length_filter = load_sft_examples(ctx, tokenizer, config.data.seq_len + 1)
        left = length_filter.rejected
    if not texts:
        why = "; ".join(f"{n:,} {reason}" for reason, n in left.items())
        raise DataError(
            f"no text is left to distil with: {why}", expected="at least one",
            do=f"raise {ctx.name}.data.seq_len or max_completion_tokens",
        )  # fmt: skip
    return texts[: config.texts.max_examples], left


def _pretraining_examples(
    ctx: StepContext, config: TextsConfig, tokenizer: TokenEncoder
) -> list[TokenizedExample]:
    """Return the first pretraining documents, each cut to one row."""
    import numpy as np

    from whorl.tokens.token_encoder import TokenizedExample

    found = []
    for ids in islice(open_token_set(ctx).split("train").iter_documents(), config.texts.max_examples):
        taken = np.asarray(ids[: config.data.seq_len + 1], np.int64)
        mask = np.ones(len(taken), np.bool_)
        mask[0] = False
        if len(taken) > 1:
            found.append(TokenizedExample(taken, mask))
    return found


def _teacher_completions(
    ctx: StepContext, config: TextsConfig, tokenizer: TokenEncoder, teacher: LanguageModel
) -> tuple[list[TokenizedExample], dict[str, int]]:
    """Return the teacher's completions of the task prompts; deterministic in the seed, so a resumed run gets the same."""
    from whorl.align.distillation.teacher import sample_teacher_completions
    from whorl.align.rl.evaluation import filter_by_length
    from whorl.align.stage.io import read_tasks
    from whorl.tracking.seeds import derive

    ctx.parents["tasks"].check()
    length = config.data.seq_len + 1
    tasks = read_tasks(ctx.parents["tasks"].path, "train")[: config.texts.max_examples]
    kept, left = filter_by_length(tokenizer, tasks, length, config.max_completion_tokens)
    prompts = [tokenizer.task_prompt(task) for task in kept]
    if not prompts:
        return [], left
    ctx.progress.log(f"    the teacher completes {len(prompts):,} prompts")
    texts, cut = sample_teacher_completions(
        teacher, tokenizer, prompts, length=length, max_tokens=config.max_completion_tokens,
        temperature=config.temperature, seed=derive(config.seed, "distil", "teacher"),
    )  # fmt: skip
    return texts, {**left, "unfinished completion of the teacher": cut} if cut else left


def _make_student(
    ctx: StepContext,
    config: DistilStepConfig,
    tokenizer: TokenEncoder,
    teacher: LanguageModel,
    texts: Sequence[TokenizedExample],
) -> tuple[LanguageModel, Path]:
    """Return (the student, the folder of its tokenizer).

    Raises:
        ConfigError: no student, or two; or another vocabulary than the teacher's.
    """
    from whorl.align.distillation.student import make_student
    from whorl.align.distillation.teacher import check_same_vocabulary
    from whorl.align.model.batch import pad
    from whorl.align.stage.io import load_stage_model
    from whorl.tokens.token_encoder import TokenEncoder
    from whorl.tracking.seeds import generator

    if ("student" in ctx.parents) == (config.student is not None):
        raise ConfigError(
            f"{ctx.name} has {'two students' if config.student else 'no student'}",
            expected=f"a parent in the role student, or {ctx.name}.student = {{n_layers = 2}}, not both",
        )
    if config.student is None:
        ctx.parents["student"].check()
        folder = ctx.parents["student"].path
        names = ctx.parents["model"].name, ctx.parents["student"].name
        check_same_vocabulary(tokenizer.tokenizer, TokenEncoder.load(folder).tokenizer, names=names)
        return load_stage_model(folder, config, ctx.machine), folder
    batch = pad(texts[:PRUNING_EXAMPLES], pad_id_of(tokenizer))
    made = make_student(
        teacher,
        config.student,
        generator=generator(config.seed, "student"),
        calibration_ids=[batch["tokens"]],
    )
    return made, ctx.parents["model"].path


def _make_teacher(
    ctx: StepContext,
    config: DistilStepConfig,
    tokenizer: TokenEncoder,
    model: LanguageModel,
    texts: list[TokenizedExample],
) -> tuple[Teacher, list[TokenizedExample]]:
    """Return (the live teacher, or its cached top-k logits; the texts that these belong to)."""
    from whorl.align.distillation.cached_teacher import CachedTeacher, cache_teacher_logits
    from whorl.align.distillation.teacher import LiveTeacher, tokenizer_fingerprint

    fingerprint = tokenizer_fingerprint(tokenizer.tokenizer)
    if not config.texts.teacher_top_k:
        return LiveTeacher(model, fingerprint), texts
    folder = ctx.scratch / "teacher_logits"
    if (found := CachedTeacher.find(folder, texts)) is not None:
        return found, list(found.examples)
    with ctx.progress.task("Caching teacher logits", total=len(texts), unit="texts") as bar:
        cached = cache_teacher_logits(
            model, texts, pad_id=pad_id_of(tokenizer), top_k=config.texts.teacher_top_k, temperature=config.temperature,
            vocab_fingerprint=fingerprint, teacher_name=ctx.parents["model"].address, on_progress=bar.advance,
        )  # fmt: skip
    cached.save(folder)
    return cached, list(cached.examples)
