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
    from whorl.align.model.example import ExampleTokenizer, LengthFilter, TokenizedExample
    from whorl.align.model.policy_model import PolicyModel
    from whorl.align.rl.experience import Experience
    from whorl.evals.verify.task import Verdict, VerifiableTask
    from whorl.models import LanguageModel
    from whorl.tokens.shards import TokenSet

HELD_OUT_BYTES = 60_000  # of the test split, for bits per byte before and after


class InitModelConfig(BaseModel):
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
    def _possible(self) -> InitModelConfig:
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(
                f"d_model ({self.d_model}) over n_heads ({self.n_heads}) gives heads of {self.head_dim}: an even "
                "number is needed, since rotary turns pairs of features"
            )
        return self


@step("model", config=InitModelConfig)
def init_model(ctx: StepContext, config: InitModelConfig) -> None:
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


STAGE_PARENTS = {"model": "model", "tasks": "tasks", "tokens?": "tokens"}
NOT_HASHED = ("checkpoint_seconds", "replicas")


class SFTStepConfig(SFTConfig):
    """What it is tested with, where the tasks have a verifier."""

    eval_tasks: int = Field(default=64, ge=0, description="held-out tasks answered before and after, at most")
    max_completion_tokens: int = Field(default=96, ge=1, description="of an answer to one of them")


@step("model", config=SFTStepConfig, parents=STAGE_PARENTS, not_hashed=NOT_HASHED)
def sft(ctx: StepContext, config: SFTStepConfig) -> None:
    """Learn from solutions: only what answers is trained, its end included."""
    from whorl.align.stage.io import (
        load_example_tokenizer,
        load_stage_model,
        make_policy_model,
        read_tasks,
        save_stage_model,
    )
    from whorl.align.stage.sft import fine_tune

    folder, machine = model_folder(ctx), ctx.machine
    machine.apply()
    scribe = load_example_tokenizer(folder)
    network = make_policy_model(
        load_stage_model(folder, config, machine), scribe, config, context_hint=config.seq_len
    )
    texts, room = load_sft_examples(ctx, scribe, config.seq_len + 1)
    tests = read_tasks(ctx.parents["tasks"].path, "test")

    def look() -> dict[str, float]:
        return evaluate_held_out(
            network, scribe, tests, {"passed_greedily": None}, max_tasks=config.eval_tasks, max_tokens=config.max_completion_tokens,
            length=config.seq_len, seed=config.seed,
        )  # fmt: skip

    solved = {"before": look()}
    if tests and config.eval_tasks and not solved["before"]:
        ctx.progress.log(
            f"    no held-out task has room for its prompt and {ctx.name}.max_tokens: {config.max_completion_tokens}"
        )
    before = held_out_bits_per_byte(ctx, network.model, scribe)
    began, last = time.monotonic(), dict[str, float]()
    replay = ctx.parents["tokens"].path if "tokens" in ctx.parents else None
    with ctx.progress.task("Fine-tuning", total=None) as bar, ctx.run.metrics(ctx.name) as log:

        def observe(step: int, metrics: dict[str, float]) -> None:
            log.write(step, metrics)
            last.update(metrics)
            bar.update(done=step, note=f"loss {metrics['nll']:.3f}, epoch {metrics['epoch']:.2f}")

        fine_tune(
            network, texts, config, pad_id=pad_id_of(scribe), replay_data=replay, callback=observe,
            checkpoint_dir=ctx.scratch, log=ctx.progress.log,
        )  # fmt: skip
    solved["after"] = look()
    after = held_out_bits_per_byte(ctx, network.model, scribe)
    save_stage_model(network, folder, ctx.out)
    (ctx.out / "curve.json").write_text(json.dumps([*ctx.run.read_metrics(ctx.name)]))
    headline, summary = f"{len(texts):,} texts; loss {last.get('nll', 0.0):.3f}", dict[str, Any]()
    if solved["after"]:
        summary.update(solved=solved, tasks={"test": int(solved["after"]["tasks"])})
        passed = [f"{solved[when]['passed_greedily']:.0%}" for when in ("before", "after")]
        headline += f"; held-out tasks passed: {passed[0]}, then {passed[1]}, greedily"
    ctx.summary.update(
        summary, texts=len(texts), left_out=room.rejected, final=last, seconds=time.monotonic() - began,
        params=network.model.params(), bits_per_byte={"before": before, "after": after},
        headline=headline + format_bits_change(before, after),
    )  # fmt: skip


@step(
    "model",
    config=RLConfig,
    parents={**STAGE_PARENTS, "judge?": "reward"},
    not_hashed=(*NOT_HASHED, "max_steps_seconds", "restarts"),
)
def rl(ctx: StepContext, config: RLConfig) -> None:
    """Learn from rewards that a program gives: sample, verify, reinforce."""
    from whorl.align.data.curriculum import Curriculum
    from whorl.align.model.policy_model import frozen_reference
    from whorl.align.preference.reward_model import load_reward_verifier
    from whorl.align.rl.rollout import RolloutWorker, filter_by_length
    from whorl.align.rl.samples import make_samples, rollout_table
    from whorl.align.rl.train import train_policy
    from whorl.align.stage.io import (
        evaluate_tasks,
        load_example_tokenizer,
        load_stage_model,
        make_policy_model,
        read_tasks,
        save_stage_model,
    )
    from whorl.sandbox import Sandbox

    ctx.parents["tasks"].check()
    folder, machine, place = model_folder(ctx), ctx.machine, ctx.parents["tasks"].path
    machine.apply()
    scribe = load_example_tokenizer(folder)
    network = make_policy_model(
        load_stage_model(folder, config, machine), scribe, config,
        context_hint=config.max_seq_len, temperature=config.temperature, critic=config.uses_critic,
    )  # fmt: skip
    reference = (
        frozen_reference(load_stage_model(folder, config, machine), network) if config.kl.coef else None
    )
    train, left = filter_by_length(
        scribe, read_tasks(place, "train"), config.max_seq_len, config.max_completion_tokens
    )
    test, _ = filter_by_length(
        scribe, read_tasks(place, "test"), config.max_seq_len, config.max_completion_tokens
    )
    if not train and not left:
        raise DataError(
            f"{ctx.parents['tasks'].name} has no tasks, only texts to learn from",
            expected='tasks with a verifier (source = "files": shape = "tasks")',
        )
    if not train or not test:
        raise DataError(
            "no task has room for its prompt and an answer",
            expected=f"prompts of at most {config.max_seq_len - config.max_completion_tokens:,} ids", do="raise rlvr.length",
        )  # fmt: skip
    for reason, n in left.items():
        ctx.progress.log(f"    {n:,} tasks left out: {reason}")
    judge = reward_model_folder(ctx)
    dtype = str(network.model.dtype).removeprefix("torch.")
    worker = RolloutWorker(
        network.model.config, dtype, folder, train, config.group_size, config.max_completion_tokens, config.max_seq_len,
        config.temperature, Curriculum([task.difficulty for task in train], rule=config.curriculum),
        config.resolved_sampling_rounds, config.async_rollout.update_in_flight, threads=1 if config.async_rollout.workers else None, reward_model=judge,
    )  # fmt: skip
    began, bits = time.monotonic(), [held_out_bits_per_byte(ctx, network.model, scribe)]
    kept: dict[str, Any] = {}

    def look(name: str) -> dict[str, float]:
        settings = {
            "max_tokens": config.max_completion_tokens,
            "length": config.max_seq_len,
            "seed": config.seed,
        }
        with Sandbox() as sandbox:
            best = evaluate_tasks(network, scribe, test, **settings, sandbox=sandbox)
            drawn = evaluate_tasks(
                network, scribe, test, **settings, temperature=config.temperature, sandbox=sandbox
            )
        kept[name] = make_samples(test, *drawn)
        found = {**_completion_metrics(*drawn), "passed_greedily": _completion_metrics(*best)["passed"]}
        if judge is not None:  # the verifiers still say whether what it likes is right
            said = load_reward_verifier(judge, dtype, machine.device)(test, drawn[0])
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
            if step % config.log_rollouts_every == 0 and step < config.steps:
                ctx.progress.log(
                    f"    step {step}: {note}\n{rollout_table(scribe, train, experience, config.group_size)}"
                )

        train_policy(
            network, worker, config, reference=reference, callback=observe, checkpoint_dir=ctx.scratch,
            log=ctx.progress.log,
        )  # fmt: skip
    solved.append(look("after"))
    bits.append(held_out_bits_per_byte(ctx, network.model, scribe))
    save_stage_model(network, folder, ctx.out)
    (ctx.out / "curve.json").write_text(json.dumps([*ctx.run.read_metrics(ctx.name)]))
    (ctx.out / "samples.json").write_text(json.dumps(kept, indent=1))
    headline = f"held-out tasks passed: {solved[0]['passed']:.0%}, then {solved[1]['passed']:.0%}"
    headline += f" (greedily {solved[0]['passed_greedily']:.0%}, {solved[1]['passed_greedily']:.0%})"
    if judge is not None:
        headline += f"; the judge gives {solved[0]['judged']:.2f}, then {solved[1]['judged']:.2f}"
    ctx.summary.update(
        solved={"before": solved[0], "after": solved[1]}, bits_per_byte={"before": bits[0], "after": bits[1]},
        tasks={"train": len(train), "test": len(test)}, left_out=left, seconds=time.monotonic() - began,
        params=network.model.params(), headline=headline + format_bits_change(*bits),
    )  # fmt: skip


def evaluate_held_out(
    network: PolicyModel,
    scribe: ExampleTokenizer,
    tests: Sequence[VerifiableTask],
    temperatures: Mapping[str, float | None],
    *,
    max_tasks: int | None = None,
    max_tokens: int,
    length: int,
    seed: int,
) -> dict[str, float]:
    """How many held-out tasks there are that have room, and the share passed in each way; nothing where there are none.

    ways: name -> temperature; None takes the likeliest tokens. most: tasks that are answered.
    """
    from whorl.align.rl.rollout import filter_by_length
    from whorl.align.stage.io import evaluate_tasks
    from whorl.sandbox import Sandbox

    given = filter_by_length(scribe, tests, length, max_tokens)[0][:max_tasks]
    if not given:
        return {}
    found = {"tasks": float(len(given))}
    with Sandbox() as sandbox:
        for name, temperature in temperatures.items():
            _, verdicts = evaluate_tasks(
                network, scribe, given, max_tokens=max_tokens, length=length, temperature=temperature, seed=seed,
                sandbox=sandbox,
            )  # fmt: skip
            found[name] = sum(v.passed for v in verdicts) / len(verdicts)
    return found


def reward_model_folder(ctx: StepContext) -> Path | None:
    """The folder of the parent `judge`, if there is one."""
    if "judge" not in ctx.parents:
        return None
    ctx.parents["judge"].check()
    return ctx.parents["judge"].path


def _completion_metrics(said: list[str], verdicts: list[Verdict]) -> dict[str, float]:
    """Share passed, mean reward, and the middle length of what was said, in characters."""
    lengths = sorted(len(words) for words in said)
    return {
        "passed": sum(v.passed for v in verdicts) / len(verdicts),
        "reward": sum(v.reward for v in verdicts) / len(verdicts),
        "median_characters": float(lengths[len(lengths) // 2]),
    }


def load_sft_examples(
    ctx: StepContext, scribe: ExampleTokenizer, max_length: int
) -> tuple[list[TokenizedExample], LengthFilter]:
    """(texts of the parent `tasks` to learn from: solutions and conversations; what was left out, and why).

    Raises:
        DataError: the parent has neither.
    """
    from whorl.align.data.dataset_files import read_conversations
    from whorl.align.model.example import LengthFilter
    from whorl.align.stage.io import read_prompt_completions

    ctx.parents["tasks"].check()
    place, room = ctx.parents["tasks"].path, LengthFilter(max_length)
    pairs, talks = read_prompt_completions(place, "train"), read_conversations(place, "train")
    if not pairs and not talks:
        raise DataError(
            f"{ctx.parents['tasks'].name} has tasks and no solutions: there is nothing to learn from",
            expected='pairs or conversations (source = "files": shape = "pairs")',
        )
    texts = room.tokenize(pairs, lambda pair: scribe.prompt_completion(pair.prompt, pair.completion))
    texts += room.tokenize(talks, lambda talk: scribe.conversation(talk.messages))
    if room.summary:
        ctx.progress.log(f"    {room.summary}")
    return texts, room


def held_out_bits_per_byte(ctx: StepContext, model: LanguageModel, scribe: ExampleTokenizer) -> float | None:
    """Bits per byte of some held-out text of pretraining, where its tokens are a parent."""
    if "tokens" not in ctx.parents:
        return None
    from whorl.evals.likelihood import bits_per_byte, document_nats

    split, chosen, n_bytes = open_token_set(ctx, scribe).split("test"), [], 0
    for ids in split.iter_documents():
        chosen.append(ids)
        n_bytes += len(scribe.tokenizer.decode(ids[1:-1]))
        if n_bytes >= HELD_OUT_BYTES:
            break
    room, model.context_hint = model.context_hint, None  # as `evaluate` reads
    try:
        return bits_per_byte(sum(document_nats(model.eval(), chosen, model.eval_window)), n_bytes)
    finally:
        model.context_hint = room


def open_token_set(ctx: StepContext, scribe: ExampleTokenizer) -> TokenSet:
    """The parent `tokens`, its ids those of the model.

    Raises:
        ConfigError: they were made with another tokenizer.
    """
    from whorl.align.distillation.teacher import check_same_vocabulary
    from whorl.tokens.hf_tokenizer import load_tokenizer
    from whorl.tokens.shards import TokenSet

    given = ctx.parents["tokens"]
    given.check()
    maker = ctx.store.find(given.parents.get("tokenizer", ""))
    if maker is not None:
        names = ctx.parents["model"].name, given.name
        check_same_vocabulary(scribe.tokenizer, load_tokenizer(maker.path), names=names)
    return TokenSet(given.path)


def format_bits_change(before: float | None, after: float | None) -> str:
    return "" if before is None or after is None else f"; {before:.3f} then {after:.3f} bits per byte"


def pad_id_of(scribe: ExampleTokenizer) -> int:
    return int(getattr(scribe.tokenizer, "pad_id", 0))
