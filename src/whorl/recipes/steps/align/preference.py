"""Learning from preferences: the steps `prefer` and `reward`.

    [steps.preferences]
    parents = ["ingest", "curate"]

    [steps.prefer]                          # DPO, IPO, KTO, SimPO, ORPO
    parents = ["sft", "preferences"]
    objective = "dpo"

    [steps.reward]                          # what is preferred, as a number for every answer
    parents = ["sft", "preferences"]

    [steps.rlvr]
    parents = ["sft", "tasks", "reward"]    # where that number is the reward

Both are measured on pairs that they did not learn from. `prefer` leaves a model; `reward` leaves a folder of its own kind,
with `report.json`: accuracy, calibration, length bias.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from whorl.align.config import PreferenceConfig, PreferenceStageConfig, RewardConfig
from whorl.errors import DataError
from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.align.common import NOT_HASHED, format_bits_change, held_out_bits_per_byte, pad_id_of
from whorl.recipes.steps.model import model_folder

if TYPE_CHECKING:
    from whorl.align.model.example import ExampleTokenizer, LengthFilter
    from whorl.align.model.policy_model import PolicyModel
    from whorl.align.preference.pairs import PreferencePair, UnpairedExample

PREFERENCE_PARENTS = {"model": "model", "preferences": "preferences"}
REFERENCE_FREE = ("simpo", "orpo")


@step(
    "model",
    config=PreferenceConfig,
    parents={**PREFERENCE_PARENTS, "tokens?": "tokens"},
    not_hashed=NOT_HASHED,
)
def preference(ctx: StepContext, config: PreferenceConfig) -> None:
    """Learn which of two answers is the better."""
    from whorl.align.model.policy_model import frozen_reference
    from whorl.align.preference.dpo import train_preferences as learn_preferences
    from whorl.align.stage.io import (
        load_example_tokenizer,
        load_stage_model,
        make_policy_model,
        save_stage_model,
    )

    folder, machine = model_folder(ctx), ctx.machine
    machine.apply()
    scribe = load_example_tokenizer(folder)
    network = make_policy_model(
        load_stage_model(folder, config, machine), scribe, config, context_hint=config.seq_len
    )
    reference = network  # of objectives that ask for none
    if config.objective not in REFERENCE_FREE:
        reference = frozen_reference(load_stage_model(folder, config, machine), network)
    train, test, room = _load_examples(ctx, scribe, config)
    pad, began = pad_id_of(scribe), time.monotonic()

    def look() -> dict[str, float]:
        return _evaluate_held_out(network, reference, test, config, pad)

    found, bits = [look()], [held_out_bits_per_byte(ctx, network.model, scribe)]
    last = dict[str, float]()
    each = (
        "answers" if config.objective == "kto" and len(train) and not hasattr(train[0], "chosen") else "pairs"
    )
    with ctx.progress.task("Preferring", total=None, unit="steps") as bar, ctx.run.metrics(ctx.name) as log:

        def observe(step: int, metrics: dict[str, float]) -> None:
            log.write(step, metrics)
            last.update(metrics)
            note = f"loss {metrics['loss']:.3f}, accuracy {metrics['rewards/accuracy']:.0%}, margin {metrics['rewards/margin']:.3f}"
            bar.update(done=step, note=note)

        learn_preferences(
            network,
            train,
            config,
            pad_id=pad,
            callback=observe,
            checkpoint_dir=ctx.scratch,
            log=ctx.progress.log,
        )
    found.append(look())
    bits.append(held_out_bits_per_byte(ctx, network.model, scribe))
    save_stage_model(network, folder, ctx.out)
    (ctx.out / "curve.json").write_text(json.dumps([*ctx.run.read_metrics(ctx.name)]))
    before, after = found
    headline = f"{len(train):,} {each}; held out: "
    if "implicit_accuracy" in before:
        headline += f"the better one is the likelier in {before['implicit_accuracy']:.0%}, then {after['implicit_accuracy']:.0%}; "
    headline += f"margin {before['rewards/margin']:.3f}, then {after['rewards/margin']:.3f}"
    ctx.summary.update(
        objective=config.objective, items={"train": len(train), "test": len(test)}, left_out=room.rejected,
        final=last, held_out={"before": before, "after": after},
        bits_per_byte={"before": bits[0], "after": bits[1]}, seconds=time.monotonic() - began,
        params=network.model.params(), headline=headline + format_bits_change(*bits),
    )  # fmt: skip


@step("reward_model", config=RewardConfig, parents=PREFERENCE_PARENTS, not_hashed=NOT_HASHED)
def reward_model(ctx: StepContext, config: RewardConfig) -> None:
    """Train a model that says how good an answer is, and report whether it can be believed."""
    from whorl.align.preference.reward_model import RewardModel, save_reward_model, train_reward_model
    from whorl.align.preference.reward_report import evaluate_reward_model
    from whorl.align.stage.io import load_example_tokenizer, load_stage_model

    folder, machine = model_folder(ctx), ctx.machine
    machine.apply()
    scribe = load_example_tokenizer(folder)
    model = RewardModel(load_stage_model(folder, config, machine), lora=config.lora, seed=config.seed)
    train, test, room = _load_examples(ctx, scribe, config, pairs_only=True)
    last, began = dict[str, float](), time.monotonic()
    with ctx.progress.task("Reward model", total=None, unit="steps") as bar, ctx.run.metrics(ctx.name) as log:

        def observe(step: int, metrics: dict[str, float]) -> None:
            log.write(step, metrics)
            last.update(metrics)
            bar.update(
                done=step,
                note=f"loss {metrics['loss']:.3f}, right in {metrics['rewards/accuracy']:.0%} of the pairs",
            )

        train_reward_model(
            model, train, config, pad_id=pad_id_of(scribe), callback=observe, checkpoint_dir=ctx.scratch,
            log=ctx.progress.log,
        )  # fmt: skip
    found = evaluate_reward_model(model, test)
    figures = found.to_json()
    trained_on = {
        "preferences": ctx.parents["preferences"].address,
        "pairs": len(train),
        "left_out": room.rejected,
    }
    save_reward_model(model, ctx.out, config=config, trained_on=trained_on, metrics=figures, base=folder)
    (ctx.out / "report.json").write_text(json.dumps(figures, indent=1))
    (ctx.out / "curve.json").write_text(json.dumps([*ctx.run.read_metrics(ctx.name)]))
    headline = f"{len(train):,} pairs; held out: right in {found.accuracy:.1%}, "
    headline += f"calibration error {found.calibration.expected_error:.3f}"
    if found.length_bias.n_longer + found.length_bias.n_shorter:  # else all answers are as long as each other
        headline += f", prefers the longer in {found.length_bias.model_longer_fraction:.0%} (the data in {found.length_bias.data_longer_fraction:.0%})"
    ctx.progress.log("    " + found.table().replace("\n", "\n    "))
    ctx.summary.update(
        items={"train": len(train), "test": len(test)}, left_out=room.rejected, final=last, held_out=figures,
        seconds=time.monotonic() - began, params=model.model.params(),
        headline=headline,
    )  # fmt: skip


def _load_examples(
    ctx: StepContext, scribe: ExampleTokenizer, config: PreferenceStageConfig, *, pairs_only: bool = False
) -> tuple[list[Any], list[Any], LengthFilter]:
    """(what is learnt from, what is held out, what was left out of both and why).

    Raises:
        DataError: single answers where pairs are needed; nothing is left.
    """
    from whorl.align.data.dataset_files import read_preferences, read_unpaired
    from whorl.align.model.example import LengthFilter
    from whorl.align.preference.pairs import tokenize_pairs, tokenize_unpaired

    given = ctx.parents["preferences"]
    given.check()
    room, found = LengthFilter(config.seq_len), dict[str, list[Any]]()
    paired = bool(read_preferences(given.path, "train"))
    if not paired and (pairs_only or getattr(config, "objective", "") != "kto"):
        raise DataError(
            f"{given.name} has single answers with a label, and {ctx.name} learns from pairs",
            expected="chosen and rejected", do='set {ctx.name}.objective = "kto", or pair the answers',
        )  # fmt: skip
    for split in ("train", "test"):
        if paired:
            found[split] = tokenize_pairs(scribe, read_preferences(given.path, split), room)
        else:
            found[split] = tokenize_unpaired(scribe, read_unpaired(given.path, split), room)
        if not found[split]:
            raise DataError(
                f"{given.name}: nothing is left to {split}; {room.summary}", expected="one pair at least",
                do=f"raise {ctx.name}.seq_len, now {config.seq_len}",
            )  # fmt: skip
    if room.summary:
        ctx.progress.log(f"    {room.summary}")
    return found["train"], found["test"], room


def _evaluate_held_out(
    network: PolicyModel,
    reference: PolicyModel,
    test: list[PreferencePair] | list[UnpairedExample],
    config: PreferenceConfig,
    pad: int,
) -> dict[str, float]:
    """What the objective says of held-out items; of pairs also the share whose better answer is the likelier one, the only
    figure that can be compared before learning and between objectives: a policy has no margin over itself."""
    from whorl.align.preference.dpo import evaluate_preferences
    from whorl.align.preference.pairs import PreferencePair, sequence_log_probs

    network.eval()
    found = evaluate_preferences(network, test, config, pad_id=pad, reference=reference)
    pairs = [item for item in test if isinstance(item, PreferencePair)]
    if pairs:
        said = sequence_log_probs(
            network, [text for pair in pairs for text in (pair.chosen, pair.rejected)], pad
        )
        found["implicit_accuracy"] = float((said[0::2] > said[1::2]).float().mean())
    return found
