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
from whorl.align.model.batch import micro_batches, pad, sort_by_length
from whorl.align.model.example import ExampleTokenizer, TokenizedExample
from whorl.align.model.policy_model import SCORE_POSITIONS, PolicyModel
from whorl.align.preference.pairs import PairBatches, PreferencePair
from whorl.align.stage.io import COPIED_FILES, load_example_tokenizer
from whorl.align.stage.trainer import (
    Precomputed,
    StepCallback,
    choose_replicas,
    dataset_fingerprint,
    run_stage,
    train_replica,
)
from whorl.errors import CheckpointError, DataError
from whorl.evals.verify.task import Verdict, VerifiableTask
from whorl.models import LanguageModel, load_model, save_model
from whorl.objectives.next_token import Loss
from whorl.objectives.reward import bradley_terry
from whorl.parallel.process_group import ProcessGroup
from whorl.tracking.seeds import generator
from whorl.train.config import OptimConfig
from whorl.train.learner.learner import SharedState
from whorl.train.learner.update import MicroBatch, ParamOptim

METADATA_FILE, WEIGHTS_FILE = "reward.json", "reward.safetensors"
MAX_SCORED_EXAMPLES = 4096


class RewardModel(PolicyModel):
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

    def param_optims(self, optim: OptimConfig) -> dict[str, ParamOptim]:
        """All but the head over the vocabulary, which no reward asks."""
        return {name: t for name, t in super().param_optims(optim).items() if name != "model.head"}

    def rewards(self, batch: MicroBatch) -> Tensor:
        """[S] fp32, with gradients: of the S texts of a part, each with one target that counts (`readable`)."""
        mask = batch["loss_mask"]
        read = self.value(self.hidden(batch)[mask].float()).squeeze(-1)
        rewards: Tensor = torch.zeros_like(read).index_add(0, batch["sequence"][mask], read)
        return rewards

    @torch.no_grad()
    def score_examples(self, examples: Sequence[TokenizedExample]) -> Tensor:
        """[S] rewards of S texts, on the host, whatever is marked in them; for best of n, reports, judging rollouts."""
        found = torch.zeros(len(examples))
        for i in range(0, len(examples), MAX_SCORED_EXAMPLES):
            some = examples[i : i + MAX_SCORED_EXAMPLES]
            part = sort_by_length(pad([append_read_token(text) for text in some], 0))
            for piece in micro_batches(part, max(1, SCORE_POSITIONS // part["tokens"].shape[1])):
                number = piece["sequence"][:, 0]
                own = {**piece, "sequence": torch.arange(len(number))[:, None].expand_as(piece["sequence"])}
                found[i + number] = self.rewards(self.to_device(own)).cpu()
        return found

    def best_indices(self, groups: Sequence[Sequence[TokenizedExample]]) -> list[int]:
        """Of each group of texts, the place of the one with the highest reward; of several, the first.

        Raises:
            DataError: a group is empty.
        """
        if not all(groups):
            raise DataError("a group has no texts", expected="one at least to choose the best of")
        scored = self.score_examples([text for group in groups for text in group])
        return [int(part.argmax()) for part in torch.split(scored, [len(group) for group in groups])]


def append_read_token(example: TokenizedExample) -> TokenizedExample:
    """The text with one more id, which nobody reads, as the only target: its position is that of the last id."""
    mask = np.zeros(len(example) + 1, np.bool_)
    mask[-1] = True
    return TokenizedExample(np.append(example.ids, example.ids[-1]), mask)


def train_reward_model(
    model: RewardModel,
    pairs: Sequence[PreferencePair],
    config: RewardConfig,
    *,
    pad_id: int,
    callback: StepCallback = lambda step, metrics: None,
    checkpoint_dir: Path | None = None,
    log: Callable[[str], None] = lambda text: None,
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
    units = PairBatches([append_read_token(text) for text in texts], 2, config, pad_id, "reward")
    world = ProcessGroup()
    run_stage(
        model,
        config,
        reward_objective(config, model),
        lambda first, _: _batches(units, first, world),
        identity={
            "stage": "reward",
            "config": config.model_dump(mode="json", exclude={"checkpoint_seconds", "replicas"}),
            "texts": dataset_fingerprint(texts),
        },
        steps=units.steps,
        positions=units.positions,
        callback=callback,
        checkpoint_dir=checkpoint_dir,
        log=log,
        replicas=choose_replicas(
            model, config.replicas, positions=units.steps * units.positions, length=config.seq_len, max_replicas=units.batch_size
        ),
        replica=partial(_replica_main, model, config, units),
        world=world,
    )  # fmt: skip
    return model


def _batches(units: PairBatches, first: int, world: ProcessGroup) -> Iterator[list[dict[str, Tensor]]]:
    """This replica's micro-batches of step `first` and of all after it."""
    for number in range(first, units.steps):
        yield list(units.micro_batches(units.shard(units.step_units(number), world), {}))


def _replica_main(
    model: RewardModel,
    config: RewardConfig,
    units: PairBatches,
    world: ProcessGroup,
    first: int,
    shared: SharedState,
    _: Precomputed,
) -> None:
    """What the replicas beside the first do: the same, and nobody watches."""
    train_replica(
        world, model, config, reward_objective(config, model), _batches(units, first, world), shared,
        positions=units.positions, first=first, steps=units.steps,
    )  # fmt: skip


def reward_objective(config: RewardConfig, model: RewardModel) -> Callable[[MicroBatch], Loss]:
    """The loss of a micro-batch of pairs."""

    def objective(part: MicroBatch) -> Loss:
        rewards = model.rewards(part)
        return bradley_terry(rewards[0::2], rewards[1::2], center_rewards_coef=config.center_rewards_coef)

    return objective


def score_completions(
    model: RewardModel,
    example_tokenizer: ExampleTokenizer,
    tasks: Sequence[VerifiableTask],
    completions: Sequence[str],
) -> list[Verdict]:
    """What a reward model says of answers to tasks, in the form of the verifiers (`evals/verify`): a reward for learning.

    The reward is sigma(r), from 0 to 1: how likely the answer is to be preferred to one of reward 0. So no single answer can
    outweigh a batch, and what cannot be judged gets 0, the least there is. passed: r is above 0.

    Returns:
        a verdict for each answer; for one that cannot be judged (no room, no text) it is marked as failed.
    """
    if len(tasks) != len(completions):
        raise DataError(f"{len(completions):,} answers to {len(tasks):,} tasks", expected="as many of both")
    texts: dict[int, TokenizedExample] = {}
    found = [Verdict(0.0, False, "")] * len(tasks)
    longest = model.model.max_positions
    for n, (task, completion) in enumerate(zip(tasks, completions, strict=True)):
        try:
            text = example_tokenizer.prompt_completion(task.prompt or task.messages, completion)
        except DataError as error:
            found[n] = Verdict(0.0, False, f"verifier: {str(error).splitlines()[0]}", failed=True)
            continue
        if longest is not None and len(text) > longest:
            found[n] = Verdict(0.0, False, f"verifier: longer than {longest:,} ids", failed=True)
        else:
            texts[n] = text
    for n, r in zip(texts, model.score_examples(list(texts.values())).tolist(), strict=True):
        found[n] = Verdict(float(torch.sigmoid(torch.tensor(r))), r > 0, f"reward {r:.3f}")
    return found


def load_reward_verifier(
    folder: Path, dtype: str, device: str = "cpu"
) -> Callable[[Sequence[VerifiableTask], Sequence[str]], list[Verdict]]:
    """A reward model as a judge: `reward_all` of the one in `folder`, computing in `dtype` on `device`.

    It reads words, in its own tokenizer; so it may judge a policy that has another.

    Raises:
        CheckpointError: there is no reward model.
    """
    model, _ = load_reward_model(folder, getattr(torch, dtype), device)
    scribe = load_example_tokenizer(folder)
    return lambda tasks, completions: score_completions(model, scribe, tasks, completions)


def save_reward_model(
    model: RewardModel,
    folder: Path,
    *,
    config: RewardConfig,
    trained_on: Mapping[str, Any],
    metrics: Mapping[str, Any] | None = None,
    base: Path | None = None,
) -> None:
    """Writes a reward model into an empty folder.

    Args:
        base: folder of the model that its trunk began as, whose tokenizer and chat template come along.
        trained_on: what its pairs were, as JSON: their source, how many, what was left out.
        figures: of `reward_report.py`.
    """
    save_model(model.eval_copy(), folder)
    if base is not None:
        for name in COPIED_FILES:
            if (base / name).is_file() and not (folder / name).exists():
                shutil.copyfile(base / name, folder / name)
    save_file({"value.weight": model.value.weight.detach().cpu().clone()}, folder / WEIGHTS_FILE)
    record = {
        "kind": "reward",
        "trained_on": dict(trained_on),
        "config": config.model_dump(mode="json"),
        "figures": dict(metrics or {}),
    }
    (folder / METADATA_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def load_reward_model(
    folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[RewardModel, dict[str, Any]]:
    """(the reward model of `folder`, to be asked, on `device`; its record).

    Raises:
        CheckpointError: a file is missing or damaged, or the read-out does not fit the trunk.
    """
    try:
        record = json.loads((folder / METADATA_FILE).read_text(encoding="utf-8"))
        weights = load_file(folder / WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"no reward model could be read from {folder}: {error}",
            expected=f"a model's files, {METADATA_FILE} and {WEIGHTS_FILE}",
            do="name a folder that `save_reward` wrote",
        ) from error
    model = RewardModel(load_model(folder, dtype, device))
    given = weights.get("value.weight")
    if given is None or given.shape != model.value.weight.shape:
        raise CheckpointError(
            f"{folder / WEIGHTS_FILE}: tensor 'value.weight' is {None if given is None else list(given.shape)}",
            expected=f"{list(model.value.weight.shape)}, as wide as the model",
        )
    with torch.no_grad():
        model.value.weight.copy_(given)
    model.requires_grad_(False)
    return model.eval(), record
