"""The steps `preference` and `reward_model`: training on preferences.

    [steps.preferences]
    parents = ["ingest", "curate"]

    [steps.preference]                      # DPO, IPO, KTO, SimPO, ORPO
    parents = ["sft", "preferences"]
    objective = "dpo"

    [steps.reward_model]                    # a scalar reward for every completion
    parents = ["sft", "preferences"]

    [steps.rl]
    parents = ["sft", "tasks", "reward_model"]

Both are evaluated on held-out pairs. `preference` makes a model. `reward_model` makes an artifact of another
kind, `reward_model`, with `evaluation.json`: accuracy, calibration, length bias.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from whorl.align.config import PreferenceConfig, PreferenceStageConfig, RewardConfig
from whorl.errors import DataError
from whorl.recipes.registry import StepContext, step
from whorl.recipes.stage import (
    NOT_HASHED,
    check_logged_ids,
    format_likelihood_change,
    held_out_likelihood,
    pad_id_of,
    train_stage,
    write_curve,
)
from whorl.report.blocks import Text
from whorl.report.stages import SECTION

if TYPE_CHECKING:
    from whorl.align.model.policy_model import PolicyModel
    from whorl.align.preference.pairs import PreferencePair, UnpairedExample
    from whorl.tokens.token_encoder import LengthFilter, TokenEncoder

PREFERENCE_PARENTS = {"model": "model", "preferences": "preferences"}


@step(
    "model",
    config=PreferenceConfig,
    parents={**PREFERENCE_PARENTS, "tokens?": "tokens"},
    not_hashed=NOT_HASHED,
    version=2,
)
def preference(ctx: StepContext, config: PreferenceConfig) -> None:
    """Train the model to prefer one of two completions."""
    from whorl.align.model.policy_model import frozen_reference
    from whorl.align.preference.dpo import get_objective, train_preferences
    from whorl.align.stage.io import load_stage_model, open_policy, save_stage_model

    config = _with_objective(ctx, config)
    folder, machine = ctx.parent_folder("model"), ctx.machine
    tokenizer, network = open_policy(folder, config, machine, context_hint=config.data.seq_len)
    reference = network  # unused by reference-free objectives
    if get_objective(config).needs_reference:
        reference = frozen_reference(load_stage_model(folder, config, machine), network)
    train, test, length_filter = _load_examples(ctx, tokenizer, config)
    pad = pad_id_of(tokenizer)

    noun = (
        "completions"
        if config.objective == "kto" and len(train) and not hasattr(train[0], "chosen")
        else "pairs"
    )
    result = train_stage(
        ctx, "Preference", partial(train_preferences, network, train, config, pad_id=pad),
        evaluate=lambda _: _evaluate_held_out(network, reference, test, config, pad),
        likelihood=lambda: held_out_likelihood(ctx, network.model, tokenizer),
        note=lambda metrics: f"loss {metrics['loss']:.3f}, accuracy {metrics['rewards/accuracy']:.0%}, "
        f"margin {metrics['rewards/margin']:.3f}",
    )  # fmt: skip
    save_stage_model(network, folder, ctx.out)
    before, after = result.evaluation["before"], result.evaluation["after"]
    headline = f"{len(train):,} {noun}; held out: "
    if "implicit_accuracy" in before:
        headline += "implicit accuracy "
        headline += f"{before['implicit_accuracy']:.0%}, then {after['implicit_accuracy']:.0%}; "
    headline += f"margin {before['rewards/margin']:.3f}, then {after['rewards/margin']:.3f}"
    ctx.summary.update(
        objective=config.objective, items={"train": len(train), "test": len(test)}, left_out=length_filter.rejected,
        final=result.final, held_out=result.evaluation,
        **result.likelihood, seconds=result.seconds,
        params=network.model.params(), headline=headline + format_likelihood_change(**result.likelihood),
    )  # fmt: skip
    noun = "completion" if config.objective == "kto" else "pair"
    write_curve(
        ctx, objective=config.objective, trained_on=f"{len(train):,} preferences",
        loss=("loss", f"Loss of {config.objective.upper()} per {noun}"),
    )  # fmt: skip


@step("reward_model", config=RewardConfig, parents=PREFERENCE_PARENTS, not_hashed=NOT_HASHED, version=2)
def reward_model(ctx: StepContext, config: RewardConfig) -> None:
    """Train a reward model and report its accuracy and calibration."""
    from whorl.align.preference.reward_model import RewardModel, save_reward_model, train_reward_model
    from whorl.align.preference.reward_report import evaluate_reward_model
    from whorl.align.stage.io import load_stage_model
    from whorl.tokens.token_encoder import TokenEncoder

    folder, machine = ctx.parent_folder("model"), ctx.machine
    machine.apply()
    tokenizer = TokenEncoder.load(folder)
    model = RewardModel(load_stage_model(folder, config, machine), lora=config.model.lora, seed=config.seed)
    train, test, length_filter = _load_examples(ctx, tokenizer, config, pairs_only=True)
    result = train_stage(
        ctx, "Reward model", partial(train_reward_model, model, train, config, pad_id=pad_id_of(tokenizer)),
        note=lambda metrics: f"loss {metrics['loss']:.3f}, accuracy {metrics['rewards/accuracy']:.0%}",
    )  # fmt: skip
    found = evaluate_reward_model(model, test)
    figures = found.to_json()
    trained_on = {
        "preferences": ctx.parents["preferences"].address,
        "pairs": len(train),
        "left_out": length_filter.rejected,
    }
    save_reward_model(model, ctx.out, config=config, trained_on=trained_on, metrics=figures, base=folder)
    (ctx.out / "evaluation.json").write_text(json.dumps(figures, indent=1))
    headline = f"{len(train):,} pairs; held out: accuracy {found.accuracy:.1%}, "
    headline += f"calibration error {found.calibration.expected_error:.3f}"
    bias = found.length_bias
    if bias.n_longer + bias.n_shorter:  # otherwise all completions have the same length
        headline += f", prefers the longer completion in {bias.model_longer_fraction:.0%}"
        headline += f" (the data in {bias.data_longer_fraction:.0%})"
    ctx.progress.log("    " + found.table().replace("\n", "\n    "))
    ctx.summary.update(
        items={"train": len(train), "test": len(test)}, left_out=length_filter.rejected,
        final=result.final, held_out=figures,
        seconds=result.seconds, params=model.model.params(),
        headline=headline,
    )  # fmt: skip
    write_curve(
        ctx, objective="reward_model", trained_on=f"{len(train):,} preferences",
        loss=("loss", "Loss of the reward model per pair"),
    )  # fmt: skip
    ctx.report.blocks += [
        Text(section=SECTION, title=f"{ctx.name}: held-out pairs", lines=[headline]),
        Text(
            section=SECTION, title=f"{ctx.name}: calibration", style="code", lines=found.table().split("\n")
        ),
    ]


def _with_objective(ctx: StepContext, config: PreferenceConfig) -> PreferenceConfig:
    """Return the configuration with KTO for single completions, unless it names an objective."""
    given = ctx.parents["preferences"]
    if "objective" in config.model_fields_set or "preferences.train.jsonl" in given.files:
        return config
    ctx.progress.log(f"    {given.name} has single completions with a label, no pairs: KTO")
    return config.model_copy(update={"objective": "kto"})


def _load_examples(
    ctx: StepContext, tokenizer: TokenEncoder, config: PreferenceStageConfig, *, pairs_only: bool = False
) -> tuple[list[Any], list[Any], LengthFilter]:
    """Return (training examples, held-out examples, the filter with its counts).

    Raises:
        DataError: single completions where pairs are needed, or no example is left.
    """
    from whorl.align.data.dataset_files import read_preferences, read_unpaired
    from whorl.align.preference.pairs import tokenize_pairs, tokenize_unpaired
    from whorl.tokens.token_encoder import LengthFilter

    given = ctx.parents["preferences"]
    given.check()
    check_logged_ids(ctx, tokenizer)
    length_filter, found = LengthFilter(config.data.seq_len), dict[str, list[Any]]()
    paired = bool(read_preferences(given.path, "train"))
    if not paired and (pairs_only or getattr(config, "objective", "") != "kto"):
        raise DataError(
            f"{given.name} has single completions with a label, but {ctx.name} needs pairs",
            expected="chosen and rejected",
            do="give pairs" if pairs_only else f'give pairs, or set {ctx.name}.objective = "kto"',
        )  # fmt: skip
    for split in ("train", "test"):
        if paired:
            found[split] = tokenize_pairs(tokenizer, read_preferences(given.path, split), length_filter)
        else:
            found[split] = tokenize_unpaired(tokenizer, read_unpaired(given.path, split), length_filter)
        if not found[split]:
            raise DataError(
                f"{given.name}: no example is left to {split}; {length_filter.summary}", expected="at least one",
                do=length_filter.advice(f"{ctx.name}.data.seq_len, now {config.data.seq_len}"),
            )  # fmt: skip
    if length_filter.summary:
        ctx.progress.log(f"    {length_filter.summary}")
    return found["train"], found["test"], length_filter


def _evaluate_held_out(
    network: PolicyModel,
    reference: PolicyModel,
    test: list[PreferencePair] | list[UnpairedExample],
    config: PreferenceConfig,
    pad: int,
) -> dict[str, float]:
    """Return the metrics of the objective on held-out examples.

    For pairs, `implicit_accuracy` is the share in which the preferred completion is the likelier one. It is comparable
    before training and between objectives; the margin is not, since a policy has no margin over itself.
    """
    from whorl.align.preference.dpo import evaluate_preferences
    from whorl.align.preference.pairs import PreferencePair, sequence_log_probs

    network.eval()
    found = evaluate_preferences(network, test, config, pad_id=pad, reference=reference)
    pairs = [item for item in test if isinstance(item, PreferencePair)]
    if pairs:
        log_probs = sequence_log_probs(
            network, [example for pair in pairs for example in (pair.chosen, pair.rejected)], pad
        )
        found["implicit_accuracy"] = float((log_probs[0::2] > log_probs[1::2]).float().mean())
    return found
