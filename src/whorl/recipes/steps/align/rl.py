"""After pretraining: the steps `begin`, `sft` and `rlvr`; what they learn from is made in `align_data.py`.

    [steps.sft]
    parents = ["pretrain", "tasks"]
    lora = {rank = 16}                  # an adapter in place of all weights; --set sft.lora.rank=16

    [steps.rlvr]
    parents = ["sft", "tasks"]          # and "reward", for a reward model as the judge in the verifiers' place

Every stage takes a model and leaves a model, with its lineage: `whorl sample`, `whorl serve` and `whorl export` take any.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.align.config import RLConfig, SFTConfig
from whorl.errors import DataError
from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.model import model_folder

if TYPE_CHECKING:
    from whorl.align.model.example import Room, Scribe, Text
    from whorl.align.model.policy_model import Network
    from whorl.align.rl.experience import Experience
    from whorl.evals.verify.task import Task, Verdict
    from whorl.models import LanguageModel
    from whorl.tokens.shards import TokenSet

HELD_OUT_BYTES = 60_000  # of the test split, for bits per byte before and after


class BeginConfig(BaseModel):
    """A model that has learnt nothing yet, of a vocabulary of bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    d_model: int = Field(default=128, ge=16)
    n_layers: int = Field(default=4, ge=1)
    n_heads: int = Field(default=4, ge=1)
    mlp_hidden: int = Field(default=384, ge=8)
    seed: int = 0

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.d_model // self.n_heads

    @model_validator(mode="after")
    def _possible(self) -> BeginConfig:
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(
                f"d_model ({self.d_model}) over n_heads ({self.n_heads}) gives heads of {self.head_dim}: an even "
                "number is needed, since rotary turns pairs of features"
            )
        return self


@step("model", config=BeginConfig)
def begin(ctx: StepContext, config: BeginConfig) -> None:
    """An untrained model that reads bytes, for tasks that need no language."""
    from whorl.models import DecoderConfig, make_model, save_model
    from whorl.tokens.tokenizer import Tokenizer
    from whorl.tracking.seeds import generator

    words = Tokenizer([bytes([i]) for i in range(256)])
    shape = DecoderConfig(
        vocab_size=-(-words.vocab_size // 8) * 8, d_model=config.d_model, n_layers=config.n_layers,
        n_heads=config.n_heads, n_kv_heads=config.n_heads, head_dim=config.head_dim,
        mlp_hidden=config.mlp_hidden, ngram_buckets=512,
    )  # fmt: skip
    model = make_model(shape, generator(config.seed, "weights"))
    save_model(model, ctx.out)
    words.save(ctx.out)
    ctx.summary.update(
        params=model.params(), headline=f"{model.params()['total'] / 1e6:.2f} M parameters, untrained"
    )


STAGE = {"model": "model", "tasks": "tasks", "tokens?": "tokens"}
UNSEEN = ("checkpoint_seconds", "replicas")


class SFTStepConfig(SFTConfig):
    """What it is tested with, where the tasks have a verifier."""

    tested: int = Field(default=64, ge=0, description="held-out tasks answered before and after, at most")
    max_tokens: int = Field(default=96, ge=1, description="of an answer to one of them")


@step("model", config=SFTStepConfig, parents=STAGE, unseen=UNSEEN)
def sft(ctx: StepContext, config: SFTStepConfig) -> None:
    """Learn from solutions: only what answers is trained, its end included."""
    from whorl.align.stage.io import network_of, open_model, open_scribe, read_tasks, save_stage
    from whorl.align.stage.sft import fine_tune

    folder, machine = model_folder(ctx), ctx.machine
    machine.apply()
    scribe = open_scribe(folder)
    network = network_of(open_model(folder, config, machine), scribe, config, room=config.length)
    texts, room = solutions(ctx, scribe, config.length + 1)
    tests = read_tasks(ctx.parents["tasks"].path, "test")

    def look() -> dict[str, float]:
        return held_out(
            network, scribe, tests, {"passed_greedily": None}, most=config.tested, max_tokens=config.max_tokens,
            length=config.length, seed=config.seed,
        )  # fmt: skip

    solved = {"before": look()}
    if tests and config.tested and not solved["before"]:
        ctx.progress.say(
            f"    no held-out task has room for its prompt and {ctx.name}.max_tokens: {config.max_tokens}"
        )
    before = measured(ctx, network.model, scribe)
    began, last = time.monotonic(), dict[str, float]()
    replay = ctx.parents["tokens"].path if "tokens" in ctx.parents else None
    with ctx.progress.task("Fine-tuning", total=None) as bar, ctx.run.metrics(ctx.name) as log:

        def observe(step: int, metrics: dict[str, float]) -> None:
            log.write(step, metrics)
            last.update(metrics)
            bar.update(done=step, note=f"loss {metrics['nll']:.3f}, epoch {metrics['epoch']:.2f}")

        fine_tune(
            network, texts, config, pad_id=pad_of(scribe), replay=replay, observe=observe,
            scratch=ctx.scratch, say=ctx.progress.say,
        )  # fmt: skip
    solved["after"] = look()
    after = measured(ctx, network.model, scribe)
    save_stage(network, folder, ctx.out)
    (ctx.out / "curve.json").write_text(json.dumps([*ctx.run.read_metrics(ctx.name)]))
    headline, summary = f"{len(texts):,} texts; loss {last.get('nll', 0.0):.3f}", dict[str, Any]()
    if solved["after"]:
        summary.update(solved=solved, tasks={"test": int(solved["after"]["tasks"])})
        passed = [f"{solved[when]['passed_greedily']:.0%}" for when in ("before", "after")]
        headline += f"; held-out tasks passed: {passed[0]}, then {passed[1]}, greedily"
    ctx.summary.update(
        summary, texts=len(texts), left_out=room.refused, final=last, seconds=time.monotonic() - began,
        params=network.model.params(), bits_per_byte={"before": before, "after": after},
        headline=headline + bits_line(before, after),
    )  # fmt: skip


@step(
    "model",
    config=RLConfig,
    parents={**STAGE, "judge?": "reward"},
    unseen=(*UNSEEN, "max_steps_seconds", "restarts"),
)
def rlvr(ctx: StepContext, config: RLConfig) -> None:
    """Learn from rewards that a program gives: sample, verify, reinforce."""
    from whorl.align.data.curriculum import Curriculum
    from whorl.align.model.policy_model import frozen
    from whorl.align.preference.reward_model import judged_by
    from whorl.align.rl.rollout import RolloutWorker, with_room
    from whorl.align.rl.samples import rollout_table, samples
    from whorl.align.rl.train import train_policy
    from whorl.align.stage.io import network_of, open_model, open_scribe, read_tasks, save_stage, solve
    from whorl.sandbox import Sandbox

    ctx.parents["tasks"].check()
    folder, machine, place = model_folder(ctx), ctx.machine, ctx.parents["tasks"].path
    machine.apply()
    scribe = open_scribe(folder)
    network = network_of(
        open_model(folder, config, machine), scribe, config,
        room=config.length, temperature=config.temperature, critic=config.critic,
    )  # fmt: skip
    reference = frozen(open_model(folder, config, machine), network) if config.kl.weight else None
    train, left = with_room(scribe, read_tasks(place, "train"), config.length, config.max_tokens)
    test, _ = with_room(scribe, read_tasks(place, "test"), config.length, config.max_tokens)
    if not train and not left:
        raise DataError(
            f"{ctx.parents['tasks'].name} has no tasks, only texts to learn from",
            expected='tasks with a verifier (source = "files": shape = "tasks")',
        )
    if not train or not test:
        raise DataError(
            "no task has room for its prompt and an answer",
            expected=f"prompts of at most {config.length - config.max_tokens:,} ids", do="raise rlvr.length",
        )  # fmt: skip
    for reason, n in left.items():
        ctx.progress.say(f"    {n:,} tasks left out: {reason}")
    judge = judge_of(ctx)
    dtype = str(network.model.dtype).removeprefix("torch.")
    worker = RolloutWorker(
        network.model.config, dtype, folder, train, config.answers, config.max_tokens, config.length,
        config.temperature, Curriculum([task.difficulty for task in train], rule=config.curriculum),
        config.draws_again, config.ahead.in_flight, threads=1 if config.ahead.workers else None, judge=judge,
    )  # fmt: skip
    began, bits = time.monotonic(), [measured(ctx, network.model, scribe)]
    kept: dict[str, Any] = {}

    def look(name: str) -> dict[str, float]:
        settings = {"max_tokens": config.max_tokens, "length": config.length, "seed": config.seed}
        with Sandbox() as sandbox:
            best = solve(network, scribe, test, **settings, sandbox=sandbox)
            drawn = solve(network, scribe, test, **settings, temperature=config.temperature, sandbox=sandbox)
        kept[name] = samples(test, *drawn)
        found = {**_told(*drawn), "passed_greedily": _told(*best)["passed"]}
        if judge is not None:  # the verifiers still say whether what it likes is right
            said = judged_by(judge, dtype, machine.device)(test, drawn[0])
            found["judged"] = sum(verdict.reward for verdict in said) / len(said)
        return found

    solved = [look("before")]
    with (
        ctx.progress.task("Policy", total=config.steps, unit="steps") as bar,
        ctx.run.metrics(ctx.name) as log,
    ):

        def observe(step: int, metrics: dict[str, float], experience: Experience) -> None:
            log.write(step, metrics)
            note = f"passed {metrics['passed']:.0%}, length {metrics['length']:.0f}"
            note += f", parity {metrics['parity']:.0e}" if "parity" in metrics else ""
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
    bits.append(measured(ctx, network.model, scribe))
    save_stage(network, folder, ctx.out)
    (ctx.out / "curve.json").write_text(json.dumps([*ctx.run.read_metrics(ctx.name)]))
    (ctx.out / "samples.json").write_text(json.dumps(kept, indent=1))
    headline = f"held-out tasks passed: {solved[0]['passed']:.0%}, then {solved[1]['passed']:.0%}"
    headline += f" (greedily {solved[0]['passed_greedily']:.0%}, {solved[1]['passed_greedily']:.0%})"
    if judge is not None:
        headline += f"; the judge gives {solved[0]['judged']:.2f}, then {solved[1]['judged']:.2f}"
    ctx.summary.update(
        solved={"before": solved[0], "after": solved[1]}, bits_per_byte={"before": bits[0], "after": bits[1]},
        tasks={"train": len(train), "test": len(test)}, left_out=left, seconds=time.monotonic() - began,
        params=network.model.params(), headline=headline + bits_line(*bits),
    )  # fmt: skip


def held_out(
    network: Network,
    scribe: Scribe,
    tests: Sequence[Task],
    ways: Mapping[str, float | None],
    *,
    most: int | None = None,
    max_tokens: int,
    length: int,
    seed: int,
) -> dict[str, float]:
    """How many held-out tasks there are that have room, and the share passed in each way; nothing where there are none.

    ways: name -> temperature; None takes the likeliest tokens. most: tasks that are answered.
    """
    from whorl.align.rl.rollout import with_room
    from whorl.align.stage.io import solve
    from whorl.sandbox import Sandbox

    given = with_room(scribe, tests, length, max_tokens)[0][:most]
    if not given:
        return {}
    found = {"tasks": float(len(given))}
    with Sandbox() as sandbox:
        for name, temperature in ways.items():
            _, verdicts = solve(
                network, scribe, given, max_tokens=max_tokens, length=length, temperature=temperature, seed=seed,
                sandbox=sandbox,
            )  # fmt: skip
            found[name] = sum(v.passed for v in verdicts) / len(verdicts)
    return found


def judge_of(ctx: StepContext) -> Path | None:
    """The folder of the parent `judge`, if there is one."""
    if "judge" not in ctx.parents:
        return None
    ctx.parents["judge"].check()
    return ctx.parents["judge"].path


def _told(said: list[str], verdicts: list[Verdict]) -> dict[str, float]:
    """Share passed, mean reward, and the middle length of what was said, in characters."""
    lengths = sorted(len(words) for words in said)
    return {
        "passed": sum(v.passed for v in verdicts) / len(verdicts),
        "reward": sum(v.reward for v in verdicts) / len(verdicts),
        "median_characters": float(lengths[len(lengths) // 2]),
    }


def solutions(ctx: StepContext, scribe: Scribe, longest: int) -> tuple[list[Text], Room]:
    """(texts of the parent `tasks` to learn from: solutions and conversations; what was left out, and why).

    Raises:
        DataError: the parent has neither.
    """
    from whorl.align.data.dataset_files import read_conversations
    from whorl.align.model.example import Room
    from whorl.align.stage.io import read_pairs

    ctx.parents["tasks"].check()
    place, room = ctx.parents["tasks"].path, Room(longest)
    pairs, talks = read_pairs(place, "train"), read_conversations(place, "train")
    if not pairs and not talks:
        raise DataError(
            f"{ctx.parents['tasks'].name} has tasks and no solutions: there is nothing to learn from",
            expected='pairs or conversations (source = "files": shape = "pairs")',
        )
    texts = room.take(pairs, lambda pair: scribe.answered(pair.prompt, pair.completion))
    texts += room.take(talks, lambda talk: scribe.conversation(talk.messages))
    if room.line:
        ctx.progress.say(f"    {room.line}")
    return texts, room


def measured(ctx: StepContext, model: LanguageModel, scribe: Scribe) -> float | None:
    """Bits per byte of some held-out text of pretraining, where its tokens are a parent."""
    if "tokens" not in ctx.parents:
        return None
    from whorl.evals.likelihood import bits_per_byte, score

    split, chosen, n_bytes = token_set(ctx, scribe).split("test"), [], 0
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


def token_set(ctx: StepContext, scribe: Scribe) -> TokenSet:
    """The parent `tokens`, its ids those of the model.

    Raises:
        ConfigError: they were made with another tokenizer.
    """
    from whorl.align.distillation.teacher import same_words
    from whorl.tokens.hf_tokenizer import open_tokenizer
    from whorl.tokens.shards import TokenSet

    given = ctx.parents["tokens"]
    given.check()
    maker = ctx.store.find(given.parents.get("tokenizer", ""))
    if maker is not None:
        names = ctx.parents["model"].name, given.name
        same_words(scribe.tokenizer, open_tokenizer(maker.path), names=names)
    return TokenSet(given.path)


def bits_line(before: float | None, after: float | None) -> str:
    return "" if before is None or after is None else f"; {before:.3f} then {after:.3f} bits per byte"


def pad_of(scribe: Scribe) -> int:
    return int(getattr(scribe.tokenizer, "pad_id", 0))
