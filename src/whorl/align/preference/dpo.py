"""Preference optimization as a stage: DPO, IPO, KTO, SimPO and ORPO, selected by an argument.

Differences from SFT (`stage/sft.py`): the examples are completions with a preference (`pairs.py`), the loss is one of
`objectives/preference.py`, and it weights texts, not tokens:

    log pi(y|x)  = sum over the targets of a text in the loss of log p(target | all ids before it)
    count        = pairs of the step (KTO: completions), so every pair has the same weight at any length

The reference of DPO, IPO and KTO is the network before the first step, or another one. It scores every text once before
training. The scores are stored with the texts and in every checkpoint.

KTO's reference point z needs prompts with completions of other prompts. These mismatched examples are drawn once. The
reference scores all of them, and the policy scores those of a step before its micro-batches. So the split of a step
does not change z.

The subtle point: these losses increase a margin, which also grows if both completions become less likely (Pal et al.
2024, arXiv:2402.13228, section 3; Razin et al. 2024, arXiv:2410.08847). So the metrics logps/chosen and
logps/rejected report nats per token, in addition to rewards, margin and accuracy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl.align.config import PREFERENCE_OBJECTIVES, PreferenceConfig
from whorl.align.model.policy_model import PolicyModel
from whorl.align.preference.pairs import PairBatches, PreferencePair, UnpairedExample, sequence_log_probs
from whorl.align.stage.task import (
    DatasetTask,
    Log,
    StepCallback,
    dataset_fingerprint,
    run_stage,
)
from whorl.errors import ConfigError, DataError
from whorl.objectives.next_token import Loss
from whorl.objectives.preference import PairLogProbs, PreferenceObjective, kto, kto_kl
from whorl.parallel.process_group import ProcessGroup
from whorl.tokens.token_encoder import TokenizedExample
from whorl.tracking.seeds import numpy_rng
from whorl.train.learner.loop import Stopwatch
from whorl.train.learner.update import MicroBatch


def train_preferences(
    network: PolicyModel,
    items: Sequence[PreferencePair] | Sequence[UnpairedExample],
    config: PreferenceConfig,
    *,
    pad_id: int,
    reference: PolicyModel | None = None,
    callback: StepCallback = lambda step, metrics: None,
    checkpoint_dir: Path | None = None,
    log: Log = lambda text: None,
    heartbeat_dir: Path | None = None,
) -> PolicyModel:
    """Train `network` on preferences and return it; resumes from the newest checkpoint.

    Args:
        items: pairs. For KTO labelled completions, or pairs, which count as one desirable and one undesirable
            completion. None longer than `config.data.seq_len` ids (`tokenize_pairs` ensures it).
        reference: default, the initial network.
        callback: called after each step with loss, rewards/chosen, rewards/rejected, rewards/margin, rewards/accuracy,
            logps/chosen, logps/rejected, loss_tokens, grad_norm and time/*; KTO adds kl.
        checkpoint_dir, heartbeat_dir: folders of checkpoints and of the heartbeat; None for neither.

    Raises:
        DataError: there are no items, or single completions where pairs are needed.
    """
    data = _PreferenceBatches(items, config, pad_id)
    task = PreferenceTask(network, data, reference)
    run_stage(
        task, callback, checkpoint_dir, log, heartbeat_dir,
        max_replicas=task.rows,
    )  # fmt: skip
    return network


class PreferenceTask(DatasetTask):
    """Preference optimization. The reference scores all texts before the first step."""

    name = "preference"
    config: PreferenceConfig

    def __init__(
        self, network: PolicyModel, data: _PreferenceBatches, reference: PolicyModel | None = None
    ) -> None:
        batches = data.pair_batches
        super().__init__(
            network,
            data.config,
            steps=batches.steps,
            positions=batches.positions,
            rows=batches.batch_size,
            row_length=data.config.data.seq_len,
        )
        self.data, self.reference = data, reference

    @property
    def identity(self) -> dict[str, Any]:
        return {**self.data.identity, "config": self.settings()}

    def precompute(self) -> dict[str, Tensor]:
        reference, self.reference = self.reference or self.network, None  # no replica needs it
        return self.data.reference_log_probs(reference)

    def objective(self, batch: MicroBatch) -> Loss:
        return preference_loss(self.config, self.network, batch)

    def batches_from(self, first: int) -> Iterator[list[dict[str, Tensor]]]:
        for step in range(first, self.steps):
            units = self.data.pair_batches.step_units(step)
            yield self.data.step_batches(units, self.network, self.precomputed, self.group)

    def report(self, steps_done: int, metrics: dict[str, float], clock: Stopwatch) -> dict[str, float] | None:
        return super().report(steps_done, normalize_metrics(metrics), clock)


@torch.no_grad()
def evaluate_preferences(
    network: PolicyModel,
    items: Sequence[PreferencePair] | Sequence[UnpairedExample],
    config: PreferenceConfig,
    *,
    pad_id: int,
    reference: PolicyModel,
) -> dict[str, float]:
    """Return the metrics of `train_preferences` for all items without training, for held-out pairs.

    Raises:
        DataError: as `train_preferences`.
    """
    data = _PreferenceBatches(items, config, pad_id)
    losses = [
        preference_loss(config, network, network.to_device(part))
        for part in data.step_batches(
            list(range(data.pair_batches.n_units)),
            network,
            data.reference_log_probs(reference),
            ProcessGroup(),
        )
    ]
    count = sum(float(loss.count) for loss in losses)
    names = losses[0].metrics
    means = {name: sum(float(loss.metrics[name]) for loss in losses) / count for name in names}
    return normalize_metrics(
        {"loss": sum(float(loss.total) for loss in losses) / count, **means, "loss_tokens": count}
    )


def get_objective(config: PreferenceConfig) -> PreferenceObjective:
    """Return the objective of a configuration.

    Raises:
        ConfigError: it cannot be imported, or is of another kind.
    """
    found = PREFERENCE_OBJECTIVES.get(config.objective)
    if not isinstance(found, PreferenceObjective):
        raise ConfigError(
            f"{config.objective!r} is no preference objective", expected="a PreferenceObjective"
        )
    return found


def preference_loss(config: PreferenceConfig, network: PolicyModel, batch: MicroBatch) -> Loss:
    """Return the loss of a micro-batch with the fields of `_PreferenceBatches.step_batches`."""
    objective = get_objective(config)
    beta = objective.beta if config.beta is None else config.beta
    output = network.log_probs(batch)
    length = batch["length"]
    log_prob = output.log_prob.new_zeros(len(length)).index_add(0, output.sequence, output.log_prob)  # [S]
    mean_log_prob = log_prob.detach() / length
    if objective.pair_loss is None:
        desirable = batch["label"]
        loss = kto(
            log_prob, batch["reference_log_prob"], desirable, batch["kl"],
            beta=beta, desirable_weight=config.desirable_weight, undesirable_weight=config.undesirable_weight,
        )  # fmt: skip
        logps = {
            "logps/chosen": mean_log_prob[desirable].sum(),
            "logps/rejected": mean_log_prob[~desirable].sum(),
        }
        return Loss(loss.total, loss.count, {**loss.metrics, **logps})
    reference = batch.get("reference_log_prob")
    pairs = PairLogProbs(
        log_prob[0::2],
        log_prob[1::2],
        None if reference is None else reference[0::2],
        None if reference is None else reference[1::2],
        length[0::2],
        length[1::2],
    )
    loss = objective.pair_loss(pairs, beta, config)
    logps = {"logps/chosen": mean_log_prob[0::2].sum(), "logps/rejected": mean_log_prob[1::2].sum()}
    return Loss(loss.total, loss.count, {**loss.metrics, **logps})


def normalize_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Return metrics with the same names for all objectives.

    KTO's rewards become means over the completions of their class.
    """
    if "rewards/desirable" not in metrics:
        return metrics
    found = {
        name: value
        for name, value in metrics.items()
        if name not in ("rewards/desirable", "rewards/undesirable")
    }
    for kind, name in (("desirable", "chosen"), ("undesirable", "rejected")):
        share = max(metrics[kind], 1e-9)
        found[f"rewards/{name}"] = metrics[f"rewards/{kind}"] / share
        found[f"logps/{name}"] = metrics[f"logps/{name}"] / share
    found["rewards/margin"] = found["rewards/chosen"] - found["rewards/rejected"]
    return found


class _PreferenceBatches:
    """Examples, their reference log-probabilities, and the micro-batches of each step."""

    def __init__(
        self,
        items: Sequence[PreferencePair] | Sequence[UnpairedExample],
        config: PreferenceConfig,
        pad_id: int,
    ) -> None:
        if not items:
            raise DataError(
                "there are no preferences",
                expected="at least one",
                do="check the rejected items and their reasons",
            )
        self.config, self.pad_id = config, pad_id
        self.texts: list[TokenizedExample] = []
        good: list[bool] = []
        for item in items:
            if isinstance(item, PreferencePair):
                self.texts += [item.chosen, item.rejected]
                good += [True, False]
            elif config.objective == "kto":
                self.texts.append(item.example)
                good.append(item.label)
            else:
                raise DataError(
                    f"{config.objective} needs pairs, and there are single completions",
                    expected="chosen and rejected", do="use kto, or pair the completions",
                )  # fmt: skip
        self.labels = torch.tensor(good)
        self.mismatched = mismatched_examples(self.texts, config) if config.objective == "kto" else []
        each = 1 if config.objective == "kto" else 2
        self.pair_batches = PairBatches(self.texts, each, config, pad_id, "prefer")
        self.identity = {
            "stage": "prefer",
            "texts": dataset_fingerprint(self.texts),
            "good": hashlib.blake2b(self.labels.numpy().tobytes(), digest_size=16).hexdigest(),
        }

    def reference_log_probs(self, reference: PolicyModel) -> dict[str, Tensor]:
        """Return the reference log-probabilities of every text, and for KTO of every mismatched text.

        Empty without a reference.
        """
        if not get_objective(self.config).needs_reference:
            return {}
        found = {"reference_log_prob": sequence_log_probs(reference, self.texts, self.pad_id)}
        if self.mismatched:
            found["mismatched_log_prob"] = sequence_log_probs(reference, self.mismatched, self.pad_id)
        return found

    def step_batches(
        self, units: Sequence[int], network: PolicyModel, kept: Mapping[str, Tensor], world: ProcessGroup
    ) -> list[dict[str, Tensor]]:
        """Return this replica's micro-batches of some units, with reference_log_prob [S].

        For KTO also label [S], and kl [] of all units under the current weights.
        """
        own_units = self.pair_batches.shard(units, world)
        streams = {name: kept[name] for name in ("reference_log_prob",) if name in kept}
        if self.config.objective != "kto":
            return list(self.pair_batches.micro_batches(own_units, streams))
        parts = list(self.pair_batches.micro_batches(own_units, {**streams, "label": self.labels}))
        divergence = torch.zeros(())
        if self.mismatched:
            own_scores = sequence_log_probs(
                network, [self.mismatched[unit] for unit in own_units], self.pad_id
            )
            scores = [x for each in world.all_gather_scalars(*own_scores.tolist()) for x in each]
            all_units = [
                u
                for rank in range(world.size)
                for u in self.pair_batches.shard(units, ProcessGroup(rank, world.size))
            ]
            divergence = kto_kl(torch.tensor(scores), kept["mismatched_log_prob"][torch.tensor(all_units)])
        return [{**part, "kl": divergence} for part in parts]


def mismatched_examples(
    texts: Sequence[TokenizedExample], config: PreferenceConfig
) -> list[TokenizedExample]:
    """Return each prompt with the completion of another prompt, cut to the length limit.

    The result is empty if all prompts are equal.
    The texts are arranged in a random circle. Each one takes the completion of the next text with another prompt.
    """
    order = numpy_rng(config.seed, "prefer", "crossed").permutation(len(texts)).tolist()
    prompts = [text.ids[: text.prompt_length].tobytes() for text in texts]
    if len(set(prompts)) < 2:
        return []
    found = dict[int, TokenizedExample]()
    successor = other = order[
        0
    ]  # the next text in the circle, and the next one with another prompt than that
    for n in [
        *reversed(order),
        *reversed(order),
    ]:  # two passes: in the first one the last texts have no successor
        source = texts[other if prompts[n] == prompts[successor] else successor]
        own, start = texts[n].prompt_length, source.prompt_length
        stop = start + max(1, config.data.seq_len - own)
        ids = np.concatenate([texts[n].ids[:own], source.ids[start:stop]])
        found[n] = TokenizedExample(
            ids, np.concatenate([np.zeros(own, np.bool_), source.loss_mask[start:stop]])
        )
        if prompts[n] != prompts[successor]:
            other = successor
        successor = n
    return [found[n] for n in range(len(texts))]
