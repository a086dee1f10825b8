"""One harness for the steps that train: measure, train, measure again. Also examples of stages after pretraining.

A step gives what differs: how to train, what to measure, and the note of the progress bar. `train_stage` owns the order,
the metrics and events of the run, the folders of checkpoints and heartbeats, the time, and a panel of the report: loss
curve and events. A step that reports more adds blocks to `ctx.report`, or replaces it (`write_curve`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from whorl.errors import DataError
from whorl.recipes.registry import StepContext
from whorl.recipes.stage_recorder import StageRecorder, last_values
from whorl.report.stages import stage_report, training_panel

if TYPE_CHECKING:
    from whorl.align.model.policy_model import PolicyModel
    from whorl.models import LanguageModel
    from whorl.tokens.shards import TokenSet
    from whorl.tokens.token_encoder import LengthFilter, TokenEncoder, TokenizedExample

STAGE_PARENTS = {"model": "model", "tasks": "tasks", "tokens?": "tokens"}
NOT_HASHED = ("run",)
HELD_OUT_BYTES = 60_000  # about, of the pretraining test split, for bits per byte before and after a stage
Metrics = dict[str, float]


@dataclass(frozen=True)
class StageResult:
    """The figures of a stage.

    evaluation: {"before": metrics, "after": metrics}, empty without an evaluation.
    bits_per_byte, perplexity: of held-out pretraining text, {"before": value or None, "after": value or None}.
    final: the last value of every metric. seconds: of evaluation and training.
    trained: the value that the training function returned.
    curve: records of metrics, evaluations and events, over all attempts of the run.
    """

    evaluation: dict[str, Metrics] = field(default_factory=dict)
    bits_per_byte: dict[str, float | None] = field(default_factory=dict)
    perplexity: dict[str, float | None] = field(default_factory=dict)
    final: Metrics = field(default_factory=dict)
    seconds: float = 0.0
    trained: Any = None
    curve: list[dict[str, Any]] = field(default_factory=list)

    @property
    def likelihood(self) -> dict[str, dict[str, float | None]]:
        """Both measures of held-out text, by the names of the summary; empty where they were not measured."""
        return {"bits_per_byte": self.bits_per_byte, "perplexity": self.perplexity}


def train_stage(
    ctx: StepContext,
    title: str,
    train: Callable[..., object],
    *,
    note: Callable[[Metrics], str],
    evaluate: Callable[[str], Metrics] | None = None,
    likelihood: Callable[[], Likelihood | None] | None = None,
    after_step: Callable[..., None] | None = None,
    total: int | None = None,
    unit: str = "steps",
    recorder: Callable[..., StageRecorder] = StageRecorder,
) -> StageResult:
    """Measure, train, and measure again; return the figures, and add a panel to the report.

    Args:
        title, total, unit: of the progress bar. note: newest value of every metric -> text next to the bar.
        train: called with `callback`, `checkpoint_dir`, `heartbeat_dir` and `log`. The callback is a `TrainCallback`, and
            also a function of step and metrics; what follows these goes to `after_step`.
        evaluate: called with "before" and "after"; returns metrics on held-out examples.
        likelihood: of held-out pretraining text, before and after.
        after_step: called with the arguments of the callback, after the metrics are recorded.
        recorder: makes the callback from `ctx`, the bar, `note` and `after_step`; for derived metrics or fewer records.
    """
    started = time.monotonic()
    evaluation, bits, each = dict[str, Metrics](), dict[str, float | None](), dict[str, float | None]()

    def measure(when: str) -> None:
        if evaluate is None and likelihood is None:
            return
        with ctx.progress.task(f"Evaluating {when} training"):
            if evaluate is not None:
                evaluation[when] = evaluate(when)
            if likelihood is not None:
                found = likelihood()
                bits[when] = None if found is None else found.bits_per_byte
                each[when] = None if found is None else found.perplexity

    measure("before")
    with ctx.progress.task(title, total=total, unit=unit) as bar:
        callback = recorder(ctx, bar, note, after_step)
        try:
            trained = train(
                callback=callback,
                checkpoint_dir=ctx.scratch,
                heartbeat_dir=ctx.heartbeat_dir,
                log=ctx.progress.log,
            )
        finally:
            callback.close()
    measure("after")
    curve = [*ctx.run.read_metrics(ctx.name)]
    ctx.report.blocks += training_panel(curve)
    seconds = time.monotonic() - started
    return StageResult(evaluation, bits, each, last_values(curve) | callback.last, seconds, trained, curve)


def load_sft_examples(
    ctx: StepContext, encoder: TokenEncoder, max_length: int, split: str = "train"
) -> tuple[list[TokenizedExample], LengthFilter]:
    """Tokenize the solutions and conversations of the parent `tasks`; also return the filter with its counts.

    Raises:
        DataError: the parent has neither solutions nor conversations to train on.
    """
    from whorl.align.data.dataset_files import read_conversations
    from whorl.align.stage.io import read_prompt_completions
    from whorl.tokens.token_encoder import LengthFilter

    tasks = ctx.parents["tasks"]
    tasks.check()
    length_filter = LengthFilter(
        max_length, f"longer than {max_length - 1:,} ids without the last ({ctx.name}.data.seq_len)"
    )
    pairs, conversations = (
        read_prompt_completions(tasks.path, split),
        read_conversations(tasks.path, split),
    )
    if not pairs and not conversations and split == "train":
        raise DataError(
            f"{tasks.name} has tasks but no solutions to train on",
            expected='pairs or conversations (source = "files": shape = "pairs")',
        )
    examples = length_filter.tokenize(
        pairs, lambda pair: encoder.prompt_completion(pair.prompt, pair.completion)
    )
    examples += length_filter.tokenize(
        conversations, lambda c: encoder.conversation(c.messages, c.tools, c.chat_template_kwargs)
    )
    if length_filter.summary and split == "train":
        ctx.progress.log(f"    {length_filter.summary}")
    return examples, length_filter


def evaluate_held_out(
    network: PolicyModel,
    encoder: TokenEncoder,
    tests: Sequence[Any],
    temperatures: Mapping[str, float],
    *,
    max_tasks: int | None = None,
    max_tokens: int,
    length: int,
    seed: int,
) -> dict[str, float]:
    """Return the accuracy on held-out tasks for each temperature, and the number of tasks; empty without tasks.

    Args:
        tests: `VerifiableTask`s. temperatures: metric name -> temperature; 0 decodes greedily.
        max_tasks: upper limit of the tasks that are answered.
    """
    from whorl.align.rl.evaluation import evaluate_tasks, filter_by_length

    fitting = filter_by_length(encoder, tests, length, max_tokens)[0][:max_tasks]
    if not fitting:
        return {}
    found = {"tasks": float(len(fitting))}
    for name, temperature in temperatures.items():
        result = evaluate_tasks(
            network, encoder, fitting, max_tokens=max_tokens, length=length, temperature=temperature, seed=seed
        )  # fmt: skip
        found[name] = result.measure("passed").value
    return found


@dataclass(frozen=True)
class Likelihood:
    """Bits per byte of a text, and its perplexity per token (`evals/likelihood.py`)."""

    bits_per_byte: float
    perplexity: float


def held_out_likelihood(ctx: StepContext, model: LanguageModel, encoder: TokenEncoder) -> Likelihood | None:
    """Return the likelihood of held-out pretraining text, or None without a parent `tokens`."""
    return token_set_likelihood(open_token_set(ctx), model, encoder) if "tokens" in ctx.parents else None


def token_set_likelihood(tokens: TokenSet, model: LanguageModel, encoder: TokenEncoder) -> Likelihood | None:
    """Return the likelihood of the start of a token set's test split, or None without one."""
    if "test" not in tokens.splits or not tokens.split("test").n_documents:
        return None
    from whorl.evals.likelihood import bits_per_byte, document_nats, perplexity

    split, chosen, n_bytes = tokens.split("test"), [], 0
    for ids in split.iter_documents():
        chosen.append(ids)
        n_bytes += len(encoder.tokenizer.decode(ids[1:-1]))
        if n_bytes >= HELD_OUT_BYTES:
            break
    context_hint, model.context_hint = model.context_hint, None  # the same context as the step `evaluate`
    try:
        nats = sum(document_nats(model.eval(), chosen, model.eval_window))
    finally:
        model.context_hint = context_hint
    return Likelihood(bits_per_byte(nats, n_bytes), perplexity(nats, sum(len(ids) - 1 for ids in chosen)))


def open_token_set(ctx: StepContext) -> TokenSet:
    """Return the parent `tokens`.

    Raises:
        ConfigError: it was encoded with another tokenizer than the model's.
    """
    from whorl.align.distillation.teacher import check_same_vocabulary
    from whorl.tokens.hf_tokenizer import load_tokenizer
    from whorl.tokens.shards import TokenSet

    tokens, model = ctx.parents["tokens"], ctx.parents["model"]
    tokens.check()
    encoder = ctx.store.find(tokens.parents.get("tokenizer") or tokens.parents.get("model", ""))
    if encoder is not None and (model.path / "tokenizer.json").is_file():
        names, own, others = (model.name, tokens.name), *map(load_tokenizer, (model.path, encoder.path))
        if own.token_bytes[: others.vocab_size] != others.token_bytes:  # a chat format adds tokens at the end
            check_same_vocabulary(own, others, names=names)
    return TokenSet(tokens.path)


def check_logged_ids(ctx: StepContext, tokenizer: TokenEncoder) -> None:
    """Check that preferences with logged ids are of models with this tokenizer. Raises ConfigError."""
    from whorl.align.distillation.teacher import check_same_vocabulary
    from whorl.tokens.hf_tokenizer import load_tokenizer

    for address in ctx.parents["preferences"].summary.get("models", ()):
        if (other := ctx.store.find(address)) is not None:
            names = ctx.parents["model"].name, other.name
            check_same_vocabulary(tokenizer.tokenizer, load_tokenizer(other.path), names=names)


def lineage_likelihood(
    ctx: StepContext, role: str, model: LanguageModel, encoder: TokenEncoder
) -> Likelihood | None:
    """Return the likelihood of held-out text of the nearest token set that a parent comes from, or None without one."""
    from whorl.evals.suites.held_out import ancestors
    from whorl.tokens.shards import TokenSet

    found = next((each for each in ancestors(ctx.store, ctx.parents[role]) if each.kind == "tokens"), None)
    if found is None:
        return None
    found.check()
    return token_set_likelihood(TokenSet(found.path), model, encoder)


def format_likelihood_change(
    bits_per_byte: Mapping[str, float | None], perplexity: Mapping[str, float | None]
) -> str:
    """Return the end of a headline, `; first 60 kB of test 1.234 then 1.250 bits per byte, perplexity ...`, or nothing."""
    bits, each = ([found.get(when) for when in ("before", "after")] for found in (bits_per_byte, perplexity))
    if None in bits or None in each:
        return ""
    text = f"; first {HELD_OUT_BYTES / 1e3:.0f} kB of test {bits[0]:.3f} then {bits[1]:.3f} bits per byte"
    return f"{text}, perplexity {each[0]:.2f} then {each[1]:.2f}"


def pad_id_of(encoder: TokenEncoder) -> int:
    """Return the padding id of the tokenizer, 0 if it has none."""
    return int(getattr(encoder.tokenizer, "pad_id", 0))


def write_curve(ctx: StepContext, **options: Any) -> None:
    """Write the metrics of every step of this stage into `curve.json`, and its part of the page.

    Args:
        options: those of `stage_report`; `ctx.summary` must be complete.
    """
    curve = [*ctx.run.read_metrics(ctx.name)]
    (ctx.out / "curve.json").write_text(json.dumps(curve))
    ctx.report = stage_report(ctx.name, ctx.summary, curve, **options)
