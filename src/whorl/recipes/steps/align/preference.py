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

from whorl.align.config import ChoiceConfig, PreferenceConfig, RewardConfig
from whorl.errors import DataError
from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.align.rl import UNSEEN, bits_line, measured, pad_of
from whorl.recipes.steps.model import model_folder

if TYPE_CHECKING:
    from whorl.align.model.example import Room, Scribe
    from whorl.align.model.policy_model import Network
    from whorl.align.preference.pairs import Choice, Opinion

LEARNT_FROM = {"model": "model", "preferences": "preferences"}
WITHOUT_REFERENCE = ("simpo", "orpo")


@step("model", config=PreferenceConfig, parents={**LEARNT_FROM, "tokens?": "tokens"}, unseen=UNSEEN)
def prefer(ctx: StepContext, config: PreferenceConfig) -> None:
    """Learn which of two answers is the better."""
    from whorl.align.model.policy_model import frozen
    from whorl.align.preference.dpo import prefer as learn_preferences
    from whorl.align.stage.io import network_of, open_model, open_scribe, save_stage

    folder, machine = model_folder(ctx), ctx.machine
    machine.apply()
    scribe = open_scribe(folder)
    network = network_of(open_model(folder, config, machine), scribe, config, room=config.length)
    reference = network  # of objectives that ask for none
    if config.objective not in WITHOUT_REFERENCE:
        reference = frozen(open_model(folder, config, machine), network)
    train, test, room = _items(ctx, scribe, config)
    pad, began = pad_of(scribe), time.monotonic()

    def look() -> dict[str, float]:
        return _held_out(network, reference, test, config, pad)

    found, bits = [look()], [measured(ctx, network.model, scribe)]
    last = dict[str, float]()
    each = (
        "answers" if config.objective == "kto" and len(train) and not hasattr(train[0], "chosen") else "pairs"
    )
    with ctx.progress.task("Preferring", total=None, unit="steps") as bar, ctx.run.metrics(ctx.name) as log:

        def observe(step: int, metrics: dict[str, float]) -> None:
            log.write(step, metrics)
            last.update(metrics)
            note = f"loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.0%}, margin {metrics['margin']:.3f}"
            bar.update(done=step, note=note)

        learn_preferences(
            network, train, config, pad_id=pad, observe=observe, scratch=ctx.scratch, say=ctx.progress.say
        )
    found.append(look())
    bits.append(measured(ctx, network.model, scribe))
    save_stage(network, folder, ctx.out)
    (ctx.out / "curve.json").write_text(json.dumps([*ctx.run.read_metrics(ctx.name)]))
    before, after = found
    headline = f"{len(train):,} {each}; held out: "
    if "likelier" in before:
        headline += (
            f"the better one is the likelier in {before['likelier']:.0%}, then {after['likelier']:.0%}; "
        )
    headline += f"margin {before['margin']:.3f}, then {after['margin']:.3f}"
    ctx.summary.update(
        objective=config.objective, items={"train": len(train), "test": len(test)}, left_out=room.refused,
        final=last, held_out={"before": before, "after": after},
        bits_per_byte={"before": bits[0], "after": bits[1]}, seconds=time.monotonic() - began,
        params=network.model.params(), headline=headline + bits_line(*bits),
    )  # fmt: skip


@step("reward", config=RewardConfig, parents=LEARNT_FROM, unseen=UNSEEN)
def reward(ctx: StepContext, config: RewardConfig) -> None:
    """Train a model that says how good an answer is, and report whether it can be believed."""
    from whorl.align.preference.reward_model import RewardModel, save_reward, train_reward
    from whorl.align.preference.reward_report import report
    from whorl.align.stage.io import open_model, open_scribe

    folder, machine = model_folder(ctx), ctx.machine
    machine.apply()
    scribe = open_scribe(folder)
    model = RewardModel(open_model(folder, config, machine), lora=config.lora, seed=config.seed)
    train, test, room = _items(ctx, scribe, config, pairs_alone=True)
    last, began = dict[str, float](), time.monotonic()
    with ctx.progress.task("Reward model", total=None, unit="steps") as bar, ctx.run.metrics(ctx.name) as log:

        def observe(step: int, metrics: dict[str, float]) -> None:
            log.write(step, metrics)
            last.update(metrics)
            bar.update(
                done=step, note=f"loss {metrics['loss']:.3f}, right in {metrics['accuracy']:.0%} of the pairs"
            )

        train_reward(
            model, train, config, pad_id=pad_of(scribe), observe=observe, scratch=ctx.scratch,
            say=ctx.progress.say,
        )  # fmt: skip
    found = report(model, test)
    figures = found.figures()
    trained_on = {
        "preferences": ctx.parents["preferences"].address,
        "pairs": len(train),
        "left_out": room.refused,
    }
    save_reward(model, ctx.out, config=config, trained_on=trained_on, figures=figures, base=folder)
    (ctx.out / "report.json").write_text(json.dumps(figures, indent=1))
    (ctx.out / "curve.json").write_text(json.dumps([*ctx.run.read_metrics(ctx.name)]))
    headline = f"{len(train):,} pairs; held out: right in {found.accuracy:.1%}, "
    headline += f"calibration error {found.calibration.error:.3f}"
    if found.length.n_longer + found.length.n_shorter:  # else all answers are as long as each other
        headline += f", prefers the longer in {found.length.model:.0%} (the data in {found.length.data:.0%})"
    ctx.progress.say("    " + found.table().replace("\n", "\n    "))
    ctx.summary.update(
        items={"train": len(train), "test": len(test)}, left_out=room.refused, final=last, held_out=figures,
        seconds=time.monotonic() - began, params=model.model.params(),
        headline=headline,
    )  # fmt: skip


def _items(
    ctx: StepContext, scribe: Scribe, config: ChoiceConfig, *, pairs_alone: bool = False
) -> tuple[list[Any], list[Any], Room]:
    """(what is learnt from, what is held out, what was left out of both and why).

    Raises:
        DataError: single answers where pairs are needed; nothing is left.
    """
    from whorl.align.data.dataset_files import read_judged, read_preferences
    from whorl.align.model.example import Room
    from whorl.align.preference.pairs import choices, opinions

    given = ctx.parents["preferences"]
    given.check()
    room, found = Room(config.length), dict[str, list[Any]]()
    paired = bool(read_preferences(given.path, "train"))
    if not paired and (pairs_alone or getattr(config, "objective", "") != "kto"):
        raise DataError(
            f"{given.name} has single answers with a label, and {ctx.name} learns from pairs",
            expected="chosen and rejected", do='take prefer.objective = "kto", or pair the answers',
        )  # fmt: skip
    for split in ("train", "test"):
        if paired:
            found[split] = choices(scribe, read_preferences(given.path, split), room)
        else:
            found[split] = opinions(scribe, read_judged(given.path, split), room)
        if not found[split]:
            raise DataError(
                f"{given.name}: nothing is left to {split}; {room.line}", expected="one pair at least",
                do=f"raise {ctx.name}.length, now {config.length}",
            )  # fmt: skip
    if room.line:
        ctx.progress.say(f"    {room.line}")
    return found["train"], found["test"], room


def _held_out(
    network: Network,
    reference: Network,
    test: list[Choice] | list[Opinion],
    config: PreferenceConfig,
    pad: int,
) -> dict[str, float]:
    """What the objective says of held-out items; of pairs also the share whose better answer is the likelier one, the only
    figure that can be compared before learning and between objectives: a policy has no margin over itself."""
    from whorl.align.preference.dpo import measure
    from whorl.align.preference.pairs import Choice, summed

    network.eval()
    found = measure(network, test, config, pad_id=pad, reference=reference)
    pairs = [item for item in test if isinstance(item, Choice)]
    if pairs:
        said = summed(network, [text for pair in pairs for text in (pair.chosen, pair.rejected)], pad)
        found["likelier"] = float((said[0::2] > said[1::2]).float().mean())
    return found
