"""Parts of the steps that train a model further: parents, examples, and one harness.

A step gives what differs: how to train, what to measure, and the note of the progress bar. `train_stage` owns the order
(measure, train, measure again), the metrics log, the folders of checkpoints and heartbeats, and the time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from whorl.errors import DataError
from whorl.recipes.registry import StepContext
from whorl.report.stages import stage_report

if TYPE_CHECKING:
    from whorl.align.model.example import ExampleTokenizer, LengthFilter, TokenizedExample
    from whorl.align.model.policy_model import PolicyModel
    from whorl.evals.verify.task import VerifiableTask
    from whorl.models import LanguageModel
    from whorl.tokens.shards import TokenSet

STAGE_PARENTS = {"model": "model", "tasks": "tasks", "tokens?": "tokens"}
NOT_HASHED = ("activation_budget", "checkpoint_seconds", "checkpoints", "replicas")
HELD_OUT_BYTES = 60_000  # of the pretraining test split, for bits per byte before and after a stage
Metrics = dict[str, float]


class TrainFunction(Protocol):
    """Train; it takes the arguments that every training function of `align` has in common."""

    def __call__(self, **options: Any) -> object: ...


@dataclass(frozen=True)
class StageResult:
    """The figures of a stage.

    evaluation: {"before": metrics, "after": metrics}, empty without an evaluation.
    bits_per_byte: {"before": value or None, "after": value or None}.
    final: the last value of every metric. seconds: of evaluation and training.
    """

    evaluation: dict[str, Metrics] = field(default_factory=dict)
    bits_per_byte: dict[str, float | None] = field(default_factory=dict)
    final: Metrics = field(default_factory=dict)
    seconds: float = 0.0


def train_stage(
    ctx: StepContext,
    title: str,
    train: TrainFunction,
    *,
    note: Callable[[Metrics], str],
    evaluate: Callable[[str], Metrics] | None = None,
    bits_per_byte: Callable[[], float | None] | None = None,
    after_step: Callable[..., None] | None = None,
    total: int | None = None,
    unit: str = "steps",
) -> StageResult:
    """Measure, train, and measure again; return the figures.

    Args:
        title, total, unit: of the progress bar. note: a step's metrics next to the bar.
        train: called with `callback`, `checkpoint_dir`, `heartbeat_dir` and `log`.
        evaluate: called with "before" and "after"; returns metrics on held-out examples.
        bits_per_byte: of held-out pretraining text, before and after.
        after_step: called with the arguments of the callback, after the metrics are logged.
    """
    started, result = time.monotonic(), StageResult()

    def measure(when: str) -> None:
        if evaluate is not None:
            result.evaluation[when] = evaluate(when)
        if bits_per_byte is not None:
            result.bits_per_byte[when] = bits_per_byte()

    measure("before")
    with ctx.progress.task(title, total=total, unit=unit) as bar, ctx.run.metrics(ctx.name) as log:

        def on_step(step: int, metrics: Metrics, *more: Any) -> None:
            log.write(step, metrics)
            result.final.update(metrics)
            bar.update(done=step, note=note(metrics))
            if after_step is not None:
                after_step(step, metrics, *more)

        train(
            callback=on_step,
            checkpoint_dir=ctx.scratch,
            heartbeat_dir=ctx.heartbeat_dir,
            log=ctx.progress.log,
        )
    measure("after")
    return StageResult(result.evaluation, result.bits_per_byte, result.final, time.monotonic() - started)


def load_sft_examples(
    ctx: StepContext, example_tokenizer: ExampleTokenizer, max_length: int
) -> tuple[list[TokenizedExample], LengthFilter]:
    """Tokenize the solutions and conversations of the parent `tasks`; also return the filter with its counts.

    Raises:
        DataError: the parent has neither solutions nor conversations.
    """
    from whorl.align.data.dataset_files import read_conversations
    from whorl.align.model.example import LengthFilter
    from whorl.align.stage.io import read_prompt_completions

    tasks = ctx.parents["tasks"]
    tasks.check()
    length_filter = LengthFilter(max_length)
    pairs, conversations = (
        read_prompt_completions(tasks.path, "train"),
        read_conversations(tasks.path, "train"),
    )
    if not pairs and not conversations:
        raise DataError(
            f"{tasks.name} has tasks but no solutions to train on",
            expected='pairs or conversations (source = "files": shape = "pairs")',
        )
    examples = length_filter.tokenize(
        pairs, lambda pair: example_tokenizer.prompt_completion(pair.prompt, pair.completion)
    )
    examples += length_filter.tokenize(
        conversations, lambda conversation: example_tokenizer.conversation(conversation.messages)
    )
    if length_filter.summary:
        ctx.progress.log(f"    {length_filter.summary}")
    return examples, length_filter


def evaluate_held_out(
    network: PolicyModel,
    example_tokenizer: ExampleTokenizer,
    tests: Sequence[VerifiableTask],
    temperatures: Mapping[str, float | None],
    *,
    max_tasks: int | None = None,
    max_tokens: int,
    length: int,
    seed: int,
) -> dict[str, float]:
    """Return the accuracy on held-out tasks for each temperature, and the number of tasks; empty without tasks.

    Args:
        temperatures: metric name -> temperature; None decodes greedily.
        max_tasks: upper limit of the tasks that are answered.
    """
    from whorl.align.rl.evaluation import filter_by_length
    from whorl.align.stage.io import evaluate_tasks
    from whorl.sandbox import Sandbox

    fitting = filter_by_length(example_tokenizer, tests, length, max_tokens)[0][:max_tasks]
    if not fitting:
        return {}
    found = {"tasks": float(len(fitting))}
    with Sandbox() as sandbox:
        for name, temperature in temperatures.items():
            _, verdicts = evaluate_tasks(
                network, example_tokenizer, fitting, max_tokens=max_tokens, length=length, temperature=temperature,
                seed=seed, sandbox=sandbox,
            )  # fmt: skip
            found[name] = sum(v.passed for v in verdicts) / len(verdicts)
    return found


def held_out_bits_per_byte(
    ctx: StepContext, model: LanguageModel, example_tokenizer: ExampleTokenizer
) -> float | None:
    """Return the bits per byte of held-out pretraining text, or None without a parent `tokens`."""
    if "tokens" not in ctx.parents:
        return None
    from whorl.evals.likelihood import bits_per_byte, document_nats

    split, chosen, n_bytes = open_token_set(ctx, example_tokenizer).split("test"), [], 0
    for ids in split.iter_documents():
        chosen.append(ids)
        n_bytes += len(example_tokenizer.tokenizer.decode(ids[1:-1]))
        if n_bytes >= HELD_OUT_BYTES:
            break
    context_hint, model.context_hint = model.context_hint, None  # the same context as the step `evaluate`
    try:
        return bits_per_byte(sum(document_nats(model.eval(), chosen, model.eval_window)), n_bytes)
    finally:
        model.context_hint = context_hint


def open_token_set(ctx: StepContext, example_tokenizer: ExampleTokenizer) -> TokenSet:
    """Return the parent `tokens`.

    Raises:
        ConfigError: it was encoded with another tokenizer than the model's.
    """
    from whorl.align.distillation.teacher import check_same_vocabulary
    from whorl.tokens.hf_tokenizer import load_tokenizer
    from whorl.tokens.shards import TokenSet

    tokens = ctx.parents["tokens"]
    tokens.check()
    encoder = ctx.store.find(tokens.parents.get("tokenizer", ""))
    if encoder is not None:
        names = ctx.parents["model"].name, tokens.name
        check_same_vocabulary(example_tokenizer.tokenizer, load_tokenizer(encoder.path), names=names)
    return TokenSet(tokens.path)


def format_bits_change(before: float | None, after: float | None) -> str:
    """Return the end of a headline: `; 1.234 then 1.250 bits per byte`, or nothing if it was not measured."""
    return "" if before is None or after is None else f"; {before:.3f} then {after:.3f} bits per byte"


def pad_id_of(example_tokenizer: ExampleTokenizer) -> int:
    """Return the padding id of the tokenizer, 0 if it has none."""
    return int(getattr(example_tokenizer.tokenizer, "pad_id", 0))


def write_curve(ctx: StepContext, **options: Any) -> None:
    """Write the metrics of every step of this stage into `curve.json`, and its part of the page.

    Args:
        options: those of `stage_report`; `ctx.summary` must be complete.
    """
    curve = [*ctx.run.read_metrics(ctx.name)]
    (ctx.out / "curve.json").write_text(json.dumps(curve))
    ctx.report = stage_report(ctx.name, ctx.summary, curve, **options)
