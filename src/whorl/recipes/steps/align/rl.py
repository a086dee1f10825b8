"""The step `rl`: reinforcement learning from verifiable rewards, or from a reward model.

    [steps.rl]
    parents = ["sft", "tasks"]          # and "reward_model", which then replaces the verifiers' rewards

`eval` in the summary holds accuracy, reward and greedy accuracy on the held-out tasks, before and after training.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.align.rl.config import RLConfig
from whorl.recipes.registry import StepContext, step
from whorl.recipes.stage import (
    NOT_HASHED,
    STAGE_PARENTS,
    format_likelihood_change,
    held_out_likelihood,
    train_stage,
    write_curve,
)

if TYPE_CHECKING:
    from whorl.align.rl.experience import Experience


@step(
    "model",
    config=RLConfig,
    parents={**STAGE_PARENTS, "reward_model?": "reward_model"},
    not_hashed=NOT_HASHED,
    version=2,
)
def rl(ctx: StepContext, config: RLConfig) -> None:
    """Sample completions, verify them, and reinforce."""
    from whorl.align.data.curriculum import Curriculum
    from whorl.align.model.policy_model import frozen_reference
    from whorl.align.rl.evaluation import evaluate_policy, read_fitting_tasks
    from whorl.align.rl.rollout import RolloutWorker
    from whorl.align.rl.samples import make_samples, rollout_table
    from whorl.align.rl.train import train_policy
    from whorl.align.stage.io import load_stage_model, open_policy, record_pass_criterion, save_stage_model

    folder, machine = ctx.parent_folder("model"), ctx.machine
    tokenizer, network = open_policy(
        folder, config, machine,
        context_hint=config.max_seq_len, temperature=config.temperature, critic=config.uses_critic,
    )  # fmt: skip
    reference = (
        frozen_reference(load_stage_model(folder, config, machine), network) if config.kl.coef else None
    )
    ctx.parents["tasks"].check()
    limits: dict[str, Any] = {
        "length": config.max_seq_len, "max_tokens": config.max_completion_tokens, "environment": config.environment
    }  # fmt: skip
    tasks = read_fitting_tasks(ctx.parents["tasks"].path, tokenizer, ctx.name, **limits)
    for reason, n in tasks.rejected.items():
        ctx.progress.log(f"    {n:,} tasks left out: {reason}")
    reward_model = reward_model_folder(ctx)
    worker = RolloutWorker(
        network.model.config, str(network.model.dtype).removeprefix("torch."), folder, tasks.train, config.group_size,
        config.max_completion_tokens, config.max_seq_len, config.temperature,
        Curriculum([task.difficulty for task in tasks.train], rule=config.sampling.curriculum),
        config.resolved_sampling_rounds, config.async_rollout.update_in_flight,
        threads=1 if config.async_rollout.workers else None, environment=config.environment,
        reward_model=reward_model,
    )  # fmt: skip
    samples: dict[str, Any] = {}
    criterion = record_pass_criterion(tasks.test, ctx.summary, ctx.progress.log)

    def evaluate(name: str) -> dict[str, float]:
        found, sampled = evaluate_policy(
            network, tokenizer, tasks.test, temperature=config.temperature, seed=config.seed,
            reward_model=reward_model, **limits,
        )  # fmt: skip
        samples[name] = make_samples(sampled.items)
        return found

    def note(metrics: dict[str, float]) -> str:
        return f"accuracy {metrics['accuracy']:.0%}, length {metrics['completion_length/mean']:.0f} tokens"

    def after_step(step: int, metrics: dict[str, float], experience: Experience) -> None:
        if step % config.run.log_rollouts_every == 0 and step < config.steps:
            table = rollout_table(tokenizer, tasks.train, experience, config.group_size)
            ctx.progress.log(f"    step {step}: {note(metrics)}\n{table}")

    result = train_stage(
        ctx, "Policy", partial(train_policy, network, worker, config, reference=reference), note=note,
        evaluate=evaluate, likelihood=lambda: held_out_likelihood(ctx, network.model, tokenizer),
        after_step=after_step, total=config.steps,
    )  # fmt: skip
    save_stage_model(network, folder, ctx.out)
    (ctx.out / "samples.json").write_text(json.dumps(samples, indent=1))
    ctx.summary.update(
        eval=result.evaluation, **result.likelihood,
        tasks={"train": len(tasks.train), "test": len(tasks.test)}, left_out=tasks.rejected,
        seconds=result.seconds, params=network.model.params(), rollout_dtype=_rollout_dtype(result.curve),
        headline=_headline(len(tasks.test), **result.evaluation) + criterion
        + format_likelihood_change(**result.likelihood),
    )  # fmt: skip
    write_curve(
        ctx, objective=config.algorithm, loss=("loss", "Loss in nats per trained token"),
        trained_on=f"rewards on {len(tasks.train):,} tasks", samples=samples,
    )  # fmt: skip


def _headline(n_tasks: int, before: dict[str, float], after: dict[str, float]) -> str:
    text = f"accuracy on {n_tasks:,} held-out tasks: sampled {before['accuracy']:.0%} before, "
    text += f"{after['accuracy']:.0%} after; greedy {before['accuracy_greedy']:.0%}, {after['accuracy_greedy']:.0%}"
    text += (
        f", median answer {before['median_characters']:.0f}, then {after['median_characters']:.0f} characters"
    )
    if "reward_model_score" in after:
        text += (
            f"; reward model score {before['reward_model_score']:.2f}, then {after['reward_model_score']:.2f}"
        )
    return text


def _rollout_dtype(curve: list[dict[str, Any]]) -> str | None:
    """Return the type that sampled the last rollout batch."""
    prefix = "rollout_dtype/"
    names = (name for record in reversed(curve) for name in record if name.startswith(prefix))
    return next((name.removeprefix(prefix) for name in names), None)


def reward_model_folder(ctx: StepContext) -> Path | None:
    """Return the folder of the parent `reward_model`, or None without one."""
    return ctx.parent_folder("reward_model") if "reward_model" in ctx.parents else None
