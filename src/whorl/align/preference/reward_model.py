"""A reward model: a language model's trunk, and one number read at the last token of a text.

    r(x, y) = w . h(last token of x y)                                    h [d_model], w [d_model]
    trained on pairs: - log sigma(r(chosen) - r(rejected))                `objectives/reward.py`

(Stiennon et al. 2020, arXiv:2009.01325, section 3.4; w drawn with deviation 1 / sqrt(d_model + 1): its appendix B.1.) It is
told as the difference from the network of every other stage (`network.py`): the head over the vocabulary is not used and
not trained, and the critic's read-out is asked once a text. There is no bias: differences are all that pairs teach, and
`centring` holds the level at 0, so that 0 means "neither good nor bad" and two models can be compared.

The subtle part is *where* it is read. Rows are made for predicting the next token and leave a text's last id out; but
that id is the end of the answer, and whether an answer has ended is much of what there is to judge. So a text is given
one more id that nobody reads, and the mask marks the position of its own last one (`readable`); document masks and
padding then work as they do everywhere.

On disk it is a folder of a language model (`models/serialization.py`), an adapter merged in, with two more files:

    reward.safetensors   value.weight [1, d_model]
    reward.json          what it was trained on and how, and its figures on held-out pairs
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from whorl.align.config import LoRAConfig, RewardConfig
from whorl.align.model.batch import by_length, cut, lay
from whorl.align.model.example import Scribe, Text
from whorl.align.model.policy_model import SCORED, Network
from whorl.align.preference.pairs import Choice, Units
from whorl.align.stage.io import CARRIED, open_scribe
from whorl.align.stage.trainer import Observer, Once, fingerprint, replicas_for, run_stage, take_part
from whorl.errors import CheckpointError, DataError
from whorl.evals.verify.task import Task, Verdict
from whorl.models import LanguageModel, load_model, save_model
from whorl.objectives import Loss
from whorl.objectives.reward import bradley_terry
from whorl.parallel.process_group import World
from whorl.tracking.seeds import generator
from whorl.train.config import OptimConfig
from whorl.train.learner.learner import Shared
from whorl.train.learner.update import Part, Treatment

RECORD, WEIGHTS = "reward.json", "reward.safetensors"
SCORED_TEXTS = 4096


class RewardModel(Network):
    """See the top of this file.

    Args:
        model: its trunk, to be trained. lora: train an adapter of it. seed: of the read-out.
    """

    value: nn.Linear

    def __init__(self, model: LanguageModel, *, lora: LoRAConfig | None = None, seed: int = 0) -> None:
        super().__init__(model, lora=lora, seed=seed)
        width = model.config.d_model
        self.value = nn.Linear(width, 1, bias=False)
        with torch.no_grad():  # drawn on the host: the same numbers on every device
            self.value.weight.normal_(0.0, (width + 1) ** -0.5, generator=generator(seed, "reward"))
        self.value.to(self.device)
        if model.head is not None:
            model.head.requires_grad_(False)

    def treatments(self, optim: OptimConfig) -> dict[str, Treatment]:
        """All but the head over the vocabulary, which no reward asks."""
        return {name: t for name, t in super().treatments(optim).items() if name != "model.head"}

    def rewards(self, part: Part) -> Tensor:
        """[S] fp32, with gradients: of the S texts of a part, each with one target that counts (`readable`)."""
        mask = part["loss_mask"]
        read = self.value(self.hidden(part)[mask].float()).squeeze(-1)
        rewards: Tensor = torch.zeros_like(read).index_add(0, part["sequence"][mask], read)
        return rewards

    @torch.no_grad()
    def score_texts(self, texts: Sequence[Text]) -> Tensor:
        """[S] rewards of S texts, on the host, whatever is marked in them; for best of n, reports, judging rollouts."""
        found = torch.zeros(len(texts))
        for i in range(0, len(texts), SCORED_TEXTS):
            some = texts[i : i + SCORED_TEXTS]
            part = by_length(lay([readable(text) for text in some], 0))
            for piece in cut(part, max(1, SCORED // part["tokens"].shape[1])):
                number = piece["sequence"][:, 0]
                own = {**piece, "sequence": torch.arange(len(number))[:, None].expand_as(piece["sequence"])}
                found[i + number] = self.rewards(self.here(own)).cpu()
        return found

    def best_of(self, groups: Sequence[Sequence[Text]]) -> list[int]:
        """Of each group of texts, the place of the one with the highest reward; of several, the first.

        Raises:
            DataError: a group is empty.
        """
        if not all(groups):
            raise DataError("a group has no texts", expected="one at least to choose the best of")
        scored = self.score_texts([text for group in groups for text in group])
        return [int(part.argmax()) for part in torch.split(scored, [len(group) for group in groups])]


def readable(text: Text) -> Text:
    """The text with one more id, which nobody reads, as the only target: its position is that of the last id."""
    mask = np.zeros(len(text) + 1, np.bool_)
    mask[-1] = True
    return Text(np.append(text.ids, text.ids[-1]), mask)


def train_reward(
    model: RewardModel,
    pairs: Sequence[Choice],
    config: RewardConfig,
    *,
    pad_id: int,
    observe: Observer = lambda step, metrics: None,
    scratch: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> RewardModel:
    """Trains on pairs, from the newest checkpoint if there is one.

    Args:
        pairs: none longer than `config.length` ids (`choices` sees to that).
        observe: told after each step: loss, chosen_reward, rejected_reward, margin, accuracy, count, gradient_norm,
            seconds_*.
        scratch: folder for checkpoints; None keeps none.

    Raises:
        DataError: nothing to learn from.
    """
    if not pairs:
        raise DataError(
            "there is no pair to learn from", expected="one at least", do="see what was left out, and why"
        )
    texts = [text for pair in pairs for text in (pair.chosen, pair.rejected)]
    units = Units([readable(text) for text in texts], 2, config, pad_id, "reward")
    world = World()
    run_stage(
        model,
        config,
        objective_of(config, model),
        lambda first, _: _batches(units, first, world),
        identity={
            "stage": "reward",
            "config": config.model_dump(mode="json", exclude={"checkpoint_seconds", "replicas"}),
            "texts": fingerprint(texts),
        },
        steps=units.steps,
        positions=units.positions,
        observe=observe,
        scratch=scratch,
        say=say,
        replicas=replicas_for(
            model, config.replicas, positions=units.steps * units.positions, length=config.length, most=units.batch
        ),
        replica=partial(_replica, model, config, units),
        world=world,
    )  # fmt: skip
    return model


def _batches(units: Units, first: int, world: World) -> Iterator[list[dict[str, Tensor]]]:
    """This replica's micro-batches of step `first` and of all after it."""
    for number in range(first, units.steps):
        yield list(units.parts(units.share(units.of(number), world), {}))


def _replica(
    model: RewardModel, config: RewardConfig, units: Units, world: World, first: int, shared: Shared, _: Once
) -> None:
    """What the replicas beside the first do: the same, and nobody watches."""
    take_part(
        world, model, config, objective_of(config, model), _batches(units, first, world), shared,
        positions=units.positions, first=first, steps=units.steps,
    )  # fmt: skip


def objective_of(config: RewardConfig, model: RewardModel) -> Callable[[Part], Loss]:
    """The loss of a micro-batch of pairs."""

    def objective(part: Part) -> Loss:
        rewards = model.rewards(part)
        return bradley_terry(rewards[0::2], rewards[1::2], centring=config.centring)

    return objective


def reward_all(
    model: RewardModel, scribe: Scribe, tasks: Sequence[Task], completions: Sequence[str]
) -> list[Verdict]:
    """What a reward model says of answers to tasks, in the form of the verifiers (`evals/verify`): a reward for learning.

    The reward is sigma(r), from 0 to 1: how likely the answer is to be preferred to one of reward 0. So no single answer can
    outweigh a batch, and what cannot be judged gets 0, the least there is. passed: r is above 0.

    Returns:
        a verdict for each answer; for one that cannot be judged (no room, no text) it is marked as failed.
    """
    if len(tasks) != len(completions):
        raise DataError(f"{len(completions):,} answers to {len(tasks):,} tasks", expected="as many of both")
    texts: dict[int, Text] = {}
    found = [Verdict(0.0, False, "")] * len(tasks)
    longest = model.model.longest
    for n, (task, completion) in enumerate(zip(tasks, completions, strict=True)):
        try:
            text = scribe.answered(task.prompt or task.messages, completion)
        except DataError as error:
            found[n] = Verdict(0.0, False, f"verifier: {str(error).splitlines()[0]}", failed=True)
            continue
        if longest is not None and len(text) > longest:
            found[n] = Verdict(0.0, False, f"verifier: longer than {longest:,} ids", failed=True)
        else:
            texts[n] = text
    for n, r in zip(texts, model.score_texts(list(texts.values())).tolist(), strict=True):
        found[n] = Verdict(float(torch.sigmoid(torch.tensor(r))), r > 0, f"reward {r:.3f}")
    return found


def judged_by(
    folder: Path, dtype: str, device: str = "cpu"
) -> Callable[[Sequence[Task], Sequence[str]], list[Verdict]]:
    """A reward model as a judge: `reward_all` of the one in `folder`, computing in `dtype` on `device`.

    It reads words, in its own tokenizer; so it may judge a policy that has another.

    Raises:
        CheckpointError: there is no reward model.
    """
    model, _ = load_reward(folder, getattr(torch, dtype), device)
    scribe = open_scribe(folder)
    return lambda tasks, completions: reward_all(model, scribe, tasks, completions)


def save_reward(
    model: RewardModel,
    folder: Path,
    *,
    config: RewardConfig,
    trained_on: Mapping[str, Any],
    figures: Mapping[str, Any] | None = None,
    base: Path | None = None,
) -> None:
    """Writes a reward model into an empty folder.

    Args:
        base: folder of the model that its trunk began as, whose tokenizer and chat template come along.
        trained_on: what its pairs were, as JSON: their source, how many, what was left out.
        figures: of `reward_report.py`.
    """
    save_model(model.copied(), folder)
    if base is not None:
        for name in CARRIED:
            if (base / name).is_file() and not (folder / name).exists():
                shutil.copyfile(base / name, folder / name)
    save_file({"value.weight": model.value.weight.detach().cpu().clone()}, folder / WEIGHTS)
    record = {
        "kind": "reward",
        "trained_on": dict(trained_on),
        "config": config.model_dump(mode="json"),
        "figures": dict(figures or {}),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def load_reward(
    folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[RewardModel, dict[str, Any]]:
    """(the reward model of `folder`, to be asked, on `device`; its record).

    Raises:
        CheckpointError: a file is missing or damaged, or the read-out does not fit the trunk.
    """
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        weights = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"no reward model could be read from {folder}: {error}",
            expected=f"a model's files, {RECORD} and {WEIGHTS}",
            do="name a folder that `save_reward` wrote",
        ) from error
    model = RewardModel(load_model(folder, dtype, device))
    given = weights.get("value.weight")
    if given is None or given.shape != model.value.weight.shape:
        raise CheckpointError(
            f"{folder / WEIGHTS}: tensor 'value.weight' is {None if given is None else list(given.shape)}",
            expected=f"{list(model.value.weight.shape)}, as wide as the model",
        )
    with torch.no_grad():
        model.value.weight.copy_(given)
    model.requires_grad_(False)
    return model.eval(), record
