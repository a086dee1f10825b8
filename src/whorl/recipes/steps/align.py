"""After pretraining: the steps `tasks`, `begin`, `sft` and `rlvr`.

    [steps.tasks]                       # what is to be learnt, and what says whether it was
    parents = ["ingest", "curate"]      # for source = "python"

    [steps.sft]
    parents = ["pretrain", "tasks"]

    [steps.rlvr]
    parents = ["sft", "tasks"]

Every stage takes a model and leaves a model, with its lineage: `whorl sample`, `whorl serve` and `whorl export` take any.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from whorl.align.config import RLConfig, SFTConfig
from whorl.errors import ConfigError, DataError
from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.model import model_folder

if TYPE_CHECKING:
    from whorl.align.experience import Experience
    from whorl.align.texts import Scribe
    from whorl.corpus import Corpus
    from whorl.evals.verify.task import Verdict
    from whorl.models import LanguageModel

HELD_OUT_BYTES = 60_000  # of the test split, for bits per byte before and after


class TasksConfig(BaseModel):
    """What is to be learnt."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: Literal["python", "arithmetic"] = "python"
    seed: int = 0
    n: int = Field(default=2000, ge=1, description="tasks to train on, at most")
    n_test: int = Field(default=128, ge=1, description="held-out tasks, at most")
    files: int = Field(default=700, ge=1, description="python: files of a split to look into, at most")
    prompt_bytes: int = Field(default=600, ge=1, description="python: the longest signature and docstring")
    answer_bytes: int = Field(default=240, ge=20, description="python: the longest body")
    levels: dict[int, float] = Field(
        default={1: 2.0, 2: 1.0, 5: 1.0},
        description="arithmetic: how often each level (align/data/arithmetic.py)",
    )
    columns: bool = Field(default=True, description="arithmetic: solutions digit by digit")
    short: float = Field(
        default=0.0, ge=0, le=1, description="arithmetic: share of solutions that are the answer alone"
    )
    start: int = Field(default=0, ge=0, description="arithmetic: number of the first problem")


@step(
    "tasks",
    config=TasksConfig,
    parents={"documents?": "documents", "selection?": "selection"},
)
def tasks(ctx: StepContext, config: TasksConfig) -> None:
    """Make tasks whose answers can be checked, and solutions to learn from."""
    from whorl.align.stage import write_pairs, write_tasks

    made = _python(ctx, config) if config.source == "python" else _arithmetic(config)
    counts = {}
    for split, (found, solutions) in made.items():
        if not found:
            raise DataError(
                f"there is no {split} task", expected="one at least",
                do="give more text, or raise tasks.prompt_bytes and tasks.answer_bytes",
            )  # fmt: skip
        counts[split] = write_tasks(ctx.out, split, found)
        write_pairs(ctx.out, split, solutions)
    ctx.summary.update(counts=counts, headline=", ".join(f"{n:,} to {split}" for split, n in counts.items()))


def _python(ctx: StepContext, config: TasksConfig) -> dict[str, tuple[list[Any], list[Any]]]:
    """Functions of the corpus: those of its training files to learn from, those of its test files to be tested with."""
    from whorl.align.data.formats import Pair
    from whorl.align.data.mine import functions
    from whorl.align.data.mine_tasks import body_tasks, doctest_tasks, solvable
    from whorl.evals.verify import verify_all
    from whorl.runs.seeds import derive
    from whorl.sandbox import Sandbox

    corpus = _corpus(ctx)
    made = {}
    with Sandbox() as sandbox:
        for split, most in (("train", config.n), ("test", config.n_test)):
            every = [(d.path, d.text) for d in corpus.documents(split) if d.path.endswith(".py")]
            files = sorted(every, key=lambda file: derive(config.seed, file[0]))[: config.files]
            found = functions(
                files,
                seed=config.seed,
                body_bytes=(20, config.answer_bytes),
                header_bytes=config.prompt_bytes,
            )
            mined = body_tasks(one for one in found if ">>>" not in one.docstring)[:most]
            if split == "train":  # there are few: none is spared for the test
                examples = doctest_tasks(every, seed=config.seed, context_bytes=config.prompt_bytes)
                short = [m for m in examples if len(m.task.prompt.encode()) <= 2 * config.prompt_bytes]
                kept, _ = solvable(short, lambda given, said: verify_all(given, said, sandbox))
                mined = [*kept, *mined][:most]
                ctx.progress.say(f"    {len(kept)} functions come with examples that can be run")
            pairs = [Pair(m.task.prompt, m.solution, "python", m.task.id) for m in mined]
            made[split] = ([m.task for m in mined], pairs)
    return made


def _arithmetic(config: TasksConfig) -> dict[str, tuple[list[Any], list[Any]]]:
    from whorl.align.data.arithmetic import ANSWER, Arithmetic
    from whorl.align.data.formats import Pair
    from whorl.runs.seeds import numpy_rng

    source = Arithmetic(seed=config.seed, weights=config.levels, columns=config.columns)
    rng = numpy_rng(config.seed, "tasks", "short")

    def pair(problem: Any) -> Pair:
        if rng.random() < config.short:
            return Pair(source.prompt(problem), f"{ANSWER}{problem.answer}", "arithmetic", problem.id)
        return source.pair(problem)

    train, test = source.problems(config.start, config.n), source.distinct(config.n_test)
    return {
        "train": ([source.task(p) for p in train], [pair(p) for p in train]),
        "test": ([source.task(p) for p in test], [source.pair(p) for p in test]),
    }


def _corpus(ctx: StepContext) -> Corpus:
    from whorl.recipes.steps.corpus import SOURCES, open_corpus

    missing = [role for role in SOURCES if role not in ctx.parents]
    if missing:
        raise ConfigError(
            f"tasks from Python code need the corpus, and there is no parent {missing[0]!r}",
            expected='parents = ["ingest", "curate"]',
        )
    return open_corpus(ctx)


class BeginConfig(BaseModel):
    """A model that has learnt nothing yet, of a vocabulary of bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    d_model: int = Field(default=128, ge=16)
    n_layers: int = Field(default=4, ge=1)
    n_heads: int = Field(default=4, ge=1)
    mlp_hidden: int = Field(default=384, ge=8)
    seed: int = 0


@step("model", config=BeginConfig)
def begin(ctx: StepContext, config: BeginConfig) -> None:
    """An untrained model that reads bytes, for tasks that need no language."""
    from whorl.models import DecoderConfig, make_model, save_model
    from whorl.runs.seeds import generator
    from whorl.tokens.tokenizer import Tokenizer

    words = Tokenizer([bytes([i]) for i in range(256)])
    shape = DecoderConfig(
        vocab_size=-(-words.vocab_size // 8) * 8, d_model=config.d_model, n_layers=config.n_layers,
        n_heads=config.n_heads, n_kv_heads=config.n_heads, head_dim=config.d_model // config.n_heads,
        mlp_hidden=config.mlp_hidden, ngram_buckets=512,
    )  # fmt: skip
    model = make_model(shape, generator(config.seed, "weights"))
    save_model(model, ctx.out)
    words.save(ctx.out)
    ctx.summary.update(
        params=model.params(), headline=f"{model.params()['total'] / 1e6:.2f} M parameters, untrained"
    )


STAGE = {"model": "model", "tasks": "tasks", "tokens?": "tokens"}
UNSEEN = ("checkpoint_seconds",)


@step("model", config=SFTConfig, parents=STAGE, unseen=UNSEEN)
def sft(ctx: StepContext, config: SFTConfig) -> None:
    """Learn from solutions: only what answers is trained, its end included."""
    from whorl.align.sft import fine_tune
    from whorl.align.stage import network_of, open_model, open_scribe, read_pairs, save_stage
    from whorl.align.texts import Room

    ctx.parents["tasks"].check()
    folder, machine = model_folder(ctx), ctx.machine
    machine.apply()
    scribe = open_scribe(folder)
    network = network_of(open_model(folder, config, machine), scribe, config, room=config.length)
    room = Room(config.length + 1)
    texts = room.take(
        read_pairs(ctx.parents["tasks"].path, "train"),
        lambda pair: scribe.answered(pair.prompt, pair.completion),
    )
    if room.line:
        ctx.progress.say(f"    {room.line}")
    before = _measured(ctx, network.model, scribe)
    began, last = time.monotonic(), dict[str, float]()
    replay = ctx.parents["tokens"].path if "tokens" in ctx.parents else None
    with ctx.progress.task("Fine-tuning", total=None) as bar, ctx.run.metrics(ctx.name) as log:

        def observe(step: int, metrics: dict[str, float]) -> None:
            log.write(step, metrics)
            last.update(metrics)
            bar.update(done=step, note=f"loss {metrics['nll']:.3f}, epoch {metrics['epoch']:.2f}")

        fine_tune(
            network, texts, config, pad_id=_pad(scribe), replay=replay, observe=observe,
            scratch=ctx.scratch, say=ctx.progress.say,
        )  # fmt: skip
    after = _measured(ctx, network.model, scribe)
    save_stage(network, folder, ctx.out)
    (ctx.out / "curve.json").write_text(json.dumps([*ctx.run.read_metrics(ctx.name)]))
    headline = f"{len(texts):,} texts; loss {last.get('nll', 0.0):.3f}{_bits(before, after)}"
    ctx.summary.update(
        texts=len(texts), left_out=room.refused, final=last, seconds=time.monotonic() - began,
        params=network.model.params(), bits_per_byte={"before": before, "after": after}, headline=headline,
    )  # fmt: skip


@step("model", config=RLConfig, parents=STAGE, unseen=(*UNSEEN, "max_steps_seconds"))
def rlvr(ctx: StepContext, config: RLConfig) -> None:
    """Learn from rewards that a program gives: sample, verify, reinforce."""
    from whorl.align.data.curriculum import Curriculum
    from whorl.align.learn import train_policy
    from whorl.align.network import frozen
    from whorl.align.report import rollout_table, samples
    from whorl.align.rollout import RolloutWorker, with_room
    from whorl.align.stage import network_of, open_model, open_scribe, read_tasks, save_stage, solve
    from whorl.sandbox import Sandbox

    ctx.parents["tasks"].check()
    folder, machine, place = model_folder(ctx), ctx.machine, ctx.parents["tasks"].path
    machine.apply()
    scribe = open_scribe(folder)
    network = network_of(
        open_model(folder, config, machine), scribe, config,
        room=config.length, temperature=config.temperature, critic=config.algorithm == "ppo",
    )  # fmt: skip
    reference = frozen(open_model(folder, config, machine), network) if config.kl.weight else None
    train, left = with_room(scribe, read_tasks(place, "train"), config.length, config.max_tokens)
    test, _ = with_room(scribe, read_tasks(place, "test"), config.length, config.max_tokens)
    if not train or not test:
        raise DataError(
            "no task has room for its prompt and an answer",
            expected=f"prompts of at most {config.length - config.max_tokens:,} ids", do="raise rlvr.length",
        )  # fmt: skip
    for reason, n in left.items():
        ctx.progress.say(f"    {n:,} tasks left out: {reason}")
    dtype = str(network.model.dtype).removeprefix("torch.")
    worker = RolloutWorker(
        network.model.config, dtype, folder, train, config.answers, config.max_tokens, config.length,
        config.temperature, Curriculum([task.difficulty for task in train], rule=config.curriculum),
        config.redraws, config.ahead.in_flight, threads=1 if config.ahead.workers else None,
    )  # fmt: skip
    began, bits = time.monotonic(), [_measured(ctx, network.model, scribe)]
    kept: dict[str, Any] = {}

    def look(name: str) -> dict[str, float]:
        settings = {"max_tokens": config.max_tokens, "length": config.length, "seed": config.seed}
        with Sandbox() as sandbox:
            best = solve(network, scribe, test, **settings, sandbox=sandbox)
            drawn = solve(network, scribe, test, **settings, temperature=config.temperature, sandbox=sandbox)
        kept[name] = samples(test, *drawn)
        return {**_told(*drawn), "passed_greedily": _told(*best)["passed"]}

    solved = [look("before")]
    with (
        ctx.progress.task("Policy", total=config.steps, unit="steps") as bar,
        ctx.run.metrics(ctx.name) as log,
    ):

        def observe(step: int, metrics: dict[str, float], experience: Experience) -> None:
            log.write(step, metrics)
            note = f"passed {metrics['passed']:.0%}, length {metrics['length']:.0f}, parity {metrics.get('parity', 0):.0e}"
            bar.update(done=step, note=note)
            if step % config.evaluate_every == 0 and step < config.steps:
                ctx.progress.say(
                    f"    step {step}: {note}\n{rollout_table(scribe, train, experience, config.answers)}"
                )

        train_policy(
            network, worker, config, reference=reference, observe=observe, scratch=ctx.scratch,
            say=ctx.progress.say,
        )  # fmt: skip
    solved.append(look("after"))
    bits.append(_measured(ctx, network.model, scribe))
    save_stage(network, folder, ctx.out)
    (ctx.out / "curve.json").write_text(json.dumps([*ctx.run.read_metrics(ctx.name)]))
    (ctx.out / "samples.json").write_text(json.dumps(kept, indent=1))
    headline = f"held-out tasks passed: {solved[0]['passed']:.0%}, then {solved[1]['passed']:.0%}"
    headline += f" (greedily {solved[0]['passed_greedily']:.0%}, {solved[1]['passed_greedily']:.0%})"
    ctx.summary.update(
        solved={"before": solved[0], "after": solved[1]}, bits_per_byte={"before": bits[0], "after": bits[1]},
        tasks={"train": len(train), "test": len(test)}, left_out=left, seconds=time.monotonic() - began,
        params=network.model.params(), headline=headline + _bits(*bits),
    )  # fmt: skip


def _told(said: list[str], verdicts: list[Verdict]) -> dict[str, float]:
    """Share passed, mean reward, and the middle length of what was said, in characters."""
    lengths = sorted(len(words) for words in said)
    return {
        "passed": sum(v.passed for v in verdicts) / len(verdicts),
        "reward": sum(v.reward for v in verdicts) / len(verdicts),
        "median_characters": float(lengths[len(lengths) // 2]),
    }


def _measured(ctx: StepContext, model: LanguageModel, scribe: Scribe) -> float | None:
    """Bits per byte of some held-out text of pretraining, where its tokens are a parent."""
    if "tokens" not in ctx.parents:
        return None
    from whorl.evals.score import bits_per_byte, score
    from whorl.tokens.shards import TokenSet

    ctx.parents["tokens"].check()
    split, chosen, n_bytes = TokenSet(ctx.parents["tokens"].path).split("test"), [], 0
    for ids in split.iter_documents():
        chosen.append(ids)
        n_bytes += len(scribe.tokenizer.decode(ids[1:-1]))
        if n_bytes >= HELD_OUT_BYTES:
            break
    room, model.room = model.room, None  # as `evaluate` reads
    try:
        return bits_per_byte(sum(score(model.eval(), chosen, model.reads_well)), n_bytes)
    finally:
        model.room = room


def _bits(before: float | None, after: float | None) -> str:
    return "" if before is None or after is None else f"; {before:.3f} then {after:.3f} bits per byte"


def _pad(scribe: Scribe) -> int:
    return int(getattr(scribe.tokenizer, "pad_id", 0))
