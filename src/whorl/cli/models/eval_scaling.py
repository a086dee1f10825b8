"""`whorl eval-scaling`: accuracy against test-time compute."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from whorl.cli.options import RefArgument, StoreOption

if TYPE_CHECKING:
    from whorl.evals.grading import VerifiableTask
    from whorl.evals.test_time.scaling import ScalingResult, Scorer
    from whorl.models import LanguageModel

GSM8K_ADVICE = (
    "download grade_school_math/data/test.jsonl of github.com/openai/grade-school-math; --data FILE"
)


def eval_scaling(
    artifact: RefArgument,
    tasks: Annotated[
        str, typer.Option(metavar="arithmetic|gsm8k|FILE", help="The tasks; a file holds tasks as JSONL.")
    ] = "arithmetic",
    n: Annotated[int, typer.Option("-n", min=1, help="Number of tasks.")] = 100,
    samples: Annotated[int, typer.Option(min=1, help="Samples per task.")] = 16,
    budgets: Annotated[
        str, typer.Option(metavar="N,N,...", help="Thinking budgets in tokens; default: only more samples.")
    ] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Token limit of a sample.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.01, help="Sampling temperature.")] = 1.0,
    level: Annotated[int, typer.Option(min=0, help="Level of arithmetic problems, from 0.")] = 1,
    data: Annotated[
        Path,
        typer.Option(
            help="With gsm8k: its file of test problems, or the folder that holds gsm8k_test.jsonl."
        ),
    ] = Path(),
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--text",
            help="Whether to use the chat template; default: if the model was trained with it.",
        ),
    ] = None,
    answer_marker: Annotated[str, typer.Option(help="Text before an answer.")] = "#### ",
    continuation_text: Annotated[
        str, typer.Option(help="Text that replaces an early end of thinking.")
    ] = "Wait, ",
    reward: Annotated[
        str | None, typer.Option(metavar="ARTIFACT", help="A reward model, for best of n.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed; results also depend on the compute type.")] = 0,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Compute type; default: the fastest on this machine."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Path of the chart.")] = Path("scaling.html"),
    figures: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Path of the figures as JSON.")
    ] = None,
    store: StoreOption = None,
) -> None:
    """Measure accuracy against test-time compute: thinking budgets, majority votes, best of n.

    All curves come from one set of samples. With --budgets, thinking is cut at each budget and the answer is requested;
    thinking that ends earlier is continued. The chart shows every curve with 95 % intervals over the tasks.

    Examples:

        whorl eval-scaling align/sft --tasks arithmetic --level 5 --budgets 8,16,32

        whorl eval-scaling imported/Qwen3-0.6B --tasks gsm8k --data test.jsonl -n 50 --samples 8 --budgets 64,128

        whorl eval-scaling pretrain --tasks tasks.jsonl --samples 32
    """
    import torch

    from whorl.cli.models.scaling_page import scaling_page, write_atomically
    from whorl.engine import load_for_sampling
    from whorl.errors import ConfigError
    from whorl.evals.grading import grade_tasks, needs_sandbox
    from whorl.evals.model.example import ExampleTokenizer
    from whorl.evals.model.sampling import rollout_engine
    from whorl.evals.test_time.scaling import CURVES, ScalingConfig, measure_scaling
    from whorl.machine.device_probe import probe
    from whorl.models import load_model
    from whorl.sandbox import Sandbox
    from whorl.store import Store
    from whorl.tokens.chat import load_chat_template
    from whorl.tokens.hf_tokenizer import load_tokenizer
    from whorl.tracking.progress import Progress

    found = Store(store).open(artifact)
    if found.kind != "model":
        raise ConfigError(
            f"{found.name} is of the kind {found.kind}",
            expected="a model",
            do="list the artifacts with `whorl ls`",
        )
    try:
        config = ScalingConfig(
            n_samples=samples, max_completion_tokens=max_tokens, temperature=temperature,
            thinking_budgets=_parse_budgets(budgets), answer_marker=answer_marker, continuation_text=continuation_text,
            seed=seed,
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"invalid settings: {_first_message(error)}") from error
    found.check()
    tokenizer = load_tokenizer(found.path)
    example_tokenizer = ExampleTokenizer(tokenizer, load_chat_template(found.path, tokenizer))
    chosen = _load_tasks(
        tasks, n, level, data, example_tokenizer.chat.is_trained if chat is None else chat, seed
    )
    machine = probe()
    machine.apply()
    if dtype is None:
        model = load_for_sampling(found.path, machine, batch_size=64)
    else:
        model = load_model(found.path, getattr(torch, dtype), machine.device).eval()
    longest = max(len(example_tokenizer.task_prompt(task)) for task in chosen)
    required = longest + config.max_new_tokens + len(tokenizer.encode("\n" + answer_marker)) + 1
    if model.max_positions is not None and required > model.max_positions:
        raise ConfigError(
            f"the longest prompt has {longest:,} ids; with its answer it needs {required:,}",
            expected=f"at most {model.max_positions:,}, the longest row of {found.name}",
            do="lower --max-tokens, or use shorter tasks",
        )
    engine = rollout_engine(model, example_tokenizer, sequences=64, max_length=required)
    scorers = {} if reward is None else {f"best of n by {reward}": _reward_scorer(reward, store, model)}
    sandbox = Sandbox() if needs_sandbox(chosen) else None
    progress = Progress()
    try:
        with progress.task("Sampling", unit="answers") as bar:
            bar.update(total=len(chosen) * samples)
            scaling = measure_scaling(
                engine, example_tokenizer, chosen, config, lambda some, texts: grade_tasks(some, texts, sandbox),
                scorers=scorers,
                on_finished=lambda k: bar.update(done=bar.done + k, total=max(bar.total or 0, bar.done + k)),
            )  # fmt: skip
    finally:
        if sandbox is not None:
            sandbox.close()
    for name, points in scaling.curves.items():
        print(f"\n{CURVES.get(name, name)}")
        print(
            f"  {'budget' if name in ('stopped', 'continued') else 'n':>8} {'tokens':>9}  {'accuracy':>7}  95 % interval"
        )
        for p in points:
            print(f"  {p.compute:8,} {p.tokens:9,.1f}  {p.accuracy:7.1%}  {p.low:.1%} to {p.high:.1%}")
    about = _summary_lines(scaling, tasks, found.name)
    print("\n" + "\n".join(about))
    write_atomically(scaling_page(scaling, found.name, about), out)
    if figures is not None:
        record = {
            "model": found.address,
            "tasks": tasks,
            "dtype": str(model.dtype),
            "config": config.model_dump(mode="json"),
            **asdict(scaling),
        }
        write_atomically(json.dumps(record, indent=1) + "\n", figures)
    print(f"wrote {out}: open it in a browser")


def _reward_scorer(reward: str, store: str | None, model: LanguageModel) -> Scorer:
    """Return a function that scores texts with the reward model `reward`."""
    from whorl.align.preference.reward_model import load_reward_model
    from whorl.errors import ConfigError
    from whorl.store import Store

    found = Store(store).open(reward)
    if found.kind != "reward_model":
        raise ConfigError(
            f"--reward {found.name} is of the kind {found.kind}",
            expected="a reward_model",
            do="list the artifacts with `whorl ls`",
        )
    found.check()
    reward_model, _ = load_reward_model(found.path, device=str(model.embedding.device))
    rows, expected_rows = reward_model.model.config.vocab_size, model.config.vocab_size
    if rows != expected_rows:
        raise ConfigError(
            f"--reward {found.name} has {rows:,} ids, but the model has {expected_rows:,}",
            expected="a reward model of the same tokenizer",
        )
    return lambda texts: reward_model.score_examples(texts).tolist()


def _summary_lines(scaling: ScalingResult, tasks: str, name: str) -> list[str]:
    """Return the results as sentences."""
    from whorl.evals.test_time.scaling import CURVES

    best, point = scaling.best()
    lines = [
        f"{scaling.n_tasks:,} tasks ({tasks}), {scaling.samples} samples each.",
        f"Best without a verifier: {CURVES.get(best, best)} at {point.compute:,}, {point.accuracy:.1%} accuracy "
        f"({point.low:.1%} to {point.high:.1%}) for {point.tokens:,.0f} tokens per answer.",
    ]
    if scaling.truncated_fraction:
        lines.append(f"{scaling.truncated_fraction:.1%} of the samples were cut at max_tokens.")
    if scaling.n_failed:
        lines.append(
            f"{scaling.n_failed:,} verifications failed and count as incorrect. The first error: {scaling.first_failure}"
        )
    return lines


def _parse_budgets(text: str) -> tuple[int, ...]:
    from whorl.errors import ConfigError

    try:
        return tuple(sorted({int(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        raise ConfigError(f"--budgets is {text!r}", expected="comma-separated numbers: 16,32,64") from None


def _first_message(error: Any) -> str:
    """Return the first message of a validation error, or the text of any other error."""
    return str(error.errors()[0]["msg"]) if hasattr(error, "errors") else str(error)


def _load_tasks(name: str, n: int, level: int, data: Path, chat: bool, seed: int) -> list[VerifiableTask]:
    from whorl.align.data.arithmetic import Arithmetic
    from whorl.align.data.gsm8k import gsm8k
    from whorl.data.quarantine import Quarantine
    from whorl.errors import ConfigError
    from whorl.evals.grading import read_tasks

    if name == "arithmetic":
        source = Arithmetic(seed=seed, weights={level: 1.0})
        return [source.task(problem, chat=chat) for problem in source.distinct(n)]
    quarantine = Quarantine()
    path = Path(name)
    if name == "gsm8k":
        path = data if data.is_file() else data / "gsm8k_test.jsonl"
    if not path.is_file():
        raise ConfigError(
            f"--tasks {name}: there is no {path}",
            expected="arithmetic, gsm8k, or a file of tasks",
            do=GSM8K_ADVICE if name == "gsm8k" else "check the path",
        )  # fmt: skip
    if name == "gsm8k":
        found = [
            problem.task(chat=chat) for problem, _ in zip(gsm8k(path, quarantine), range(n), strict=False)
        ]
    else:
        found = [task for task, _ in zip(read_tasks(path, quarantine), range(n), strict=False)]
    for record in quarantine:
        print(f"skipped: {record}", file=sys.stderr)
    return found
