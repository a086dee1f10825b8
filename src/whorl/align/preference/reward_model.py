"""Reward model: the trunk of a language model with a linear reward head on the last token of a text.

    r(x, y) = w . h(last token of x y)                                    h [d_model], w [d_model]
    trained on pairs: - log sigma(r(chosen) - r(rejected))                `objectives/reward.py`

Source: Stiennon et al. 2020, arXiv:2009.01325, section 3.4; w is drawn with deviation 1 / sqrt(d_model + 1), appendix
B.1. Differences from other stages (`model/policy_model.py`): the vocabulary head is neither used nor trained, and the
value head is read once per text. It has no bias, because pairs determine only differences. `center_rewards_coef`
holds the level at 0, so rewards of two models are comparable.

The subtle point is the position. Rows for next-token prediction omit a text's last id, but this id ends the answer and
matters to the reward. So each text gets one extra id that is never read (`append_read_token`). The mask marks the
position of the text's own last id. Document masks and padding work as usual.

On disk it is the folder of a language model (`models/serialization.py`), with an adapter merged, and two more files:

    reward.safetensors   value.weight [1, d_model]
    reward.json          training data, configuration, and metrics on held-out pairs
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from whorl.align.config import LoRAConfig, RewardConfig
from whorl.align.model.batch import micro_batches, pad, sort_by_length
from whorl.align.model.policy_model import SCORE_POSITIONS, PolicyModel
from whorl.align.preference.pairs import PairBatches, PreferencePair
from whorl.align.stage.io import COPIED_FILES
from whorl.align.stage.task import (
    DatasetTask,
    Log,
    StepCallback,
    dataset_fingerprint,
    run_stage,
)
from whorl.errors import CheckpointError, DataError
from whorl.evals.grading import Completion, Grade, VerifiableTask
from whorl.models import LanguageModel, load_model, save_model
from whorl.objectives.next_token import Loss
from whorl.objectives.reward import bradley_terry
from whorl.tokens.token_encoder import TokenEncoder, TokenizedExample
from whorl.tracking.seeds import generator
from whorl.train.config import OptimConfig
from whorl.train.learner.update import MicroBatch, ParamOptim

METADATA_FILE, WEIGHTS_FILE = "reward.json", "reward.safetensors"
MAX_SCORED_EXAMPLES = 4096


class RewardModel(PolicyModel):
    """See the top of this file.

    Args:
        model: trunk to be trained. lora: train an adapter of it. seed: of the reward head.
    """

    value: nn.Linear

    def __init__(self, model: LanguageModel, *, lora: LoRAConfig | None = None, seed: int = 0) -> None:
        super().__init__(model, lora=lora, seed=seed)
        width = model.config.d_model
        self.value = nn.Linear(width, 1, bias=False)
        with torch.no_grad():  # drawn on the CPU: the same numbers on every device
            self.value.weight.normal_(0.0, (width + 1) ** -0.5, generator=generator(seed, "reward"))
        self.value.to(self.device)
        if model.head is not None:
            model.head.requires_grad_(False)

    def param_optims(self, optim: OptimConfig) -> dict[str, ParamOptim]:
        """Return the optimizers of all parameters except the vocabulary head."""
        return {name: t for name, t in super().param_optims(optim).items() if name != "model.head"}

    def rewards(self, batch: MicroBatch) -> Tensor:
        """Return [S] rewards in fp32 with gradients, of S texts from `append_read_token`."""
        mask = batch["loss_mask"]
        read = self.value(self.hidden(batch)[mask].float()).squeeze(-1)
        rewards: Tensor = torch.zeros_like(read).index_add(0, batch["sequence"][mask], read)
        return rewards

    @torch.no_grad()
    def score_examples(self, examples: Sequence[TokenizedExample]) -> Tensor:
        """Return [S] rewards of S texts on the CPU.

        Their loss masks are ignored. For best of n, reports and rollouts.
        """
        found = torch.zeros(len(examples))
        for i in range(0, len(examples), MAX_SCORED_EXAMPLES):
            some = examples[i : i + MAX_SCORED_EXAMPLES]
            part = sort_by_length(pad([append_read_token(text) for text in some], 0))
            for piece in micro_batches(part, max(1, SCORE_POSITIONS // part["tokens"].shape[1])):
                number = piece["sequence"][:, 0]
                own = {**piece, "sequence": torch.arange(len(number))[:, None].expand_as(piece["sequence"])}
                found[i + number] = self.rewards(self.to_device(own)).cpu()
        return found


def append_read_token(example: TokenizedExample) -> TokenizedExample:
    """Return the text with one extra id as its only target, at the position of its last id."""
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
    log: Log = lambda text: None,
    heartbeat_dir: Path | None = None,
) -> RewardModel:
    """Train on pairs and return the model; resumes from the newest checkpoint.

    Args:
        pairs: none longer than `config.data.seq_len` ids (`tokenize_pairs` ensures it).
        callback: called after each step with loss, rewards/chosen, rewards/rejected, rewards/margin, rewards/accuracy,
            loss_tokens, grad_norm and time/*.
        checkpoint_dir, heartbeat_dir: folders of checkpoints and of the heartbeat; None for neither.

    Raises:
        DataError: there are no pairs.
    """
    if not pairs:
        raise DataError(
            "there are no pairs", expected="at least one", do="check the rejected pairs and their reasons"
        )
    texts = [text for pair in pairs for text in (pair.chosen, pair.rejected)]
    pair_batches = PairBatches([append_read_token(text) for text in texts], 2, config, pad_id, "reward")
    task = RewardTask(model, config, pair_batches, dataset_fingerprint(texts))
    run_stage(
        task, callback, checkpoint_dir, log, heartbeat_dir,
        max_replicas=task.rows,
    )  # fmt: skip
    return model


class RewardTask(DatasetTask):
    """Training of a reward model on pairs."""

    name = "reward_model"
    network: RewardModel
    config: RewardConfig

    def __init__(
        self, model: RewardModel, config: RewardConfig, pair_batches: PairBatches, fingerprint: str
    ) -> None:
        self.pair_batches, self.fingerprint = pair_batches, fingerprint
        super().__init__(
            model,
            config,
            steps=pair_batches.steps,
            positions=pair_batches.positions,
            rows=pair_batches.batch_size,
            row_length=config.data.seq_len,
        )

    @property
    def identity(self) -> dict[str, Any]:
        return {"stage": "reward", "config": self.settings(), "texts": self.fingerprint}

    def objective(self, batch: MicroBatch) -> Loss:
        rewards = self.network.rewards(batch)
        return bradley_terry(
            rewards[0::2], rewards[1::2], center_rewards_coef=self.config.center_rewards_coef
        )

    def batches_from(self, first: int) -> Iterator[list[dict[str, Tensor]]]:
        for step in range(first, self.steps):
            units = self.pair_batches.shard(self.pair_batches.step_units(step), self.group)
            yield list(self.pair_batches.micro_batches(units, {}))


def score_completions(
    model: RewardModel,
    encoder: TokenEncoder,
    tasks: Sequence[VerifiableTask],
    completions: Sequence[Completion],
) -> list[Grade]:
    """Return a grade for each completion, as `grade_tasks`.

    The reward is sigma(r), from 0 to 1: the probability of being preferred to a completion of reward 0. It is
    bounded, so one completion cannot dominate a batch. A completion that cannot be scored (too long, not renderable)
    gets 0 and failed=True. passed: r > 0.
    """
    if len(tasks) != len(completions):
        raise DataError(
            f"there are {len(completions):,} completions and {len(tasks):,} tasks", expected="equal numbers"
        )
    texts: dict[int, TokenizedExample] = {}
    found = [Grade(0.0, False, "")] * len(tasks)
    longest = model.model.max_positions
    for n, (task, completion) in enumerate(zip(tasks, completions, strict=True)):
        try:
            text = encoder.prompt_completion(
                task.prompt or task.messages, completion.text, task.tools, task.chat_template_kwargs
            )
        except DataError as error:
            found[n] = Grade.error(f"verifier: {str(error).splitlines()[0]}")
            continue
        if longest is not None and len(text) > longest:
            found[n] = Grade.error(f"verifier: longer than {longest:,} ids")
        else:
            texts[n] = text
    for n, r in zip(texts, model.score_examples(list(texts.values())).tolist(), strict=True):
        found[n] = Grade(float(torch.sigmoid(torch.tensor(r))), r > 0, f"reward {r:.3f}")
    return found


def load_reward_verifier(
    folder: Path, dtype: str, device: str = "cpu"
) -> Callable[[Sequence[VerifiableTask], Sequence[Completion]], list[Grade]]:
    """Return a verifier that uses the reward model in `folder`, computing in `dtype` on `device`.

    It reads text with its own tokenizer, so the policy may have another one.

    Raises:
        CheckpointError: the folder has no reward model.
    """
    model, _ = load_reward_model(folder, getattr(torch, dtype), device)
    encoder = TokenEncoder.load(folder)
    return lambda tasks, completions: score_completions(model, encoder, tasks, completions)


def save_reward_model(
    model: RewardModel,
    folder: Path,
    *,
    config: RewardConfig,
    trained_on: Mapping[str, Any],
    metrics: Mapping[str, Any] | None = None,
    base: Path | None = None,
) -> None:
    """Write a reward model into an empty folder.

    Args:
        base: folder of the model its trunk started from; its tokenizer and chat template are copied.
        trained_on: description of the pairs as JSON: source, number, rejected.
        metrics: of `reward_report.py`.
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
    """Return (the frozen reward model of `folder` on `device`, its record).

    Raises:
        CheckpointError: a file is missing or damaged, or the reward head does not fit the trunk.
    """
    try:
        record = json.loads((folder / METADATA_FILE).read_text(encoding="utf-8"))
        weights = load_file(folder / WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read a reward model from {folder}: {error}",
            expected=f"a model's files, {METADATA_FILE} and {WEIGHTS_FILE}",
            do="pass a folder of `save_reward_model`",
        ) from error
    model = RewardModel(load_model(folder, dtype, device))
    weight = weights.get("value.weight")
    if weight is None or weight.shape != model.value.weight.shape:
        raise CheckpointError(
            f"{folder / WEIGHTS_FILE}: tensor 'value.weight' is {None if weight is None else list(weight.shape)}",
            expected=f"{list(model.value.weight.shape)}, the width of the model",
        )
    with torch.no_grad():
        model.value.weight.copy_(weight)
    model.requires_grad_(False)
    return model.eval(), record
