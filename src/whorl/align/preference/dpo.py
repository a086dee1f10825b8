"""Preference optimisation as a stage: DPO, IPO, KTO, SimPO and ORPO, by an argument.

It is told as the difference from SFT (`sft.py`): the texts are answers of which one was preferred (`choices.py`), the
loss is one of `objectives/preference.py`, and what it weighs is not a token but a text:

    log pi(y|x)  = sum over the targets of a text that are learnt of log p(target | all before it)
    count        = pairs of the step (KTO: answers), so every pair weighs the same, however long

The reference of DPO, IPO and KTO is the network as it was before the first step, or another that is given. It says its
word on every text once, before training; the words lie beside the texts, and in every checkpoint.

KTO's z, the divergence that good and bad are measured from, needs prompts with answers to other prompts. Which prompt
gets which answer is drawn once; the reference scores these too, and the policy scores those of a step before its
micro-batches, so that how a step is cut does not change z.

The subtle part is what is *not* raised. These losses ask for a gap, and a gap also grows where the chosen answer becomes
less likely, the rejected one still less (Pal et al. 2024, arXiv:2402.13228, section 3; Razin et al. 2024,
arXiv:2410.08847). So besides rewards, margin and accuracy the metrics chosen_log_prob and rejected_log_prob are told,
nats a token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from whorl.align.config import PreferenceConfig
from whorl.align.model.example import TokenizedExample
from whorl.align.model.policy_model import PolicyModel
from whorl.align.preference.pairs import PairBatches, PreferencePair, UnpairedExample, sequence_log_probs
from whorl.align.stage.trainer import (
    Precomputed,
    StepCallback,
    choose_replicas,
    dataset_fingerprint,
    run_stage,
    train_replica,
)
from whorl.errors import DataError
from whorl.objectives.next_token import Loss
from whorl.objectives.preference import PairLogProbs, dpo, ipo, kto, kto_kl, orpo, simpo
from whorl.parallel.process_group import ProcessGroup
from whorl.tracking.seeds import numpy_rng
from whorl.train.learner.learner import SharedState
from whorl.train.learner.update import MicroBatch

DEFAULT_BETA = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "simpo": 2.0, "orpo": 0.1}
NEEDS_REFERENCE = frozenset({"dpo", "ipo", "kto"})


def train_preferences(
    network: PolicyModel,
    items: Sequence[PreferencePair] | Sequence[UnpairedExample],
    config: PreferenceConfig,
    *,
    pad_id: int,
    reference: PolicyModel | None = None,
    callback: StepCallback = lambda step, metrics: None,
    checkpoint_dir: Path | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> PolicyModel:
    """Trains `network` on preferences, from the newest checkpoint if there is one.

    Args:
        items: pairs; for KTO answers with a label, or pairs, of which each is one good answer and one bad. None longer
            than `config.length` ids (`choices` sees to that).
        reference: by default the network as it is given.
        observe: told after each step: loss, chosen_reward, rejected_reward, margin, accuracy (implicit rewards; KTO: of good
            and bad answers, and divergence), chosen_log_prob, rejected_log_prob, count, gradient_norm, seconds_*.
        scratch: folder for checkpoints; None keeps none.

    Raises:
        DataError: nothing to learn from, or answers without a partner where pairs are needed.
    """
    data, world = _PreferenceBatches(items, config, pad_id), ProcessGroup()

    def tell(step: int, metrics: dict[str, float]) -> None:
        callback(step, normalize_metrics(metrics))

    run_stage(
        network,
        config,
        preference_objective(config, network),
        lambda first, kept: data.batches_from(first, network, kept, world),
        identity=data.identity,
        steps=data.pair_batches.steps,
        positions=data.pair_batches.positions,
        precompute=lambda: data.reference_log_probs(reference or network),
        callback=tell,
        checkpoint_dir=checkpoint_dir,
        log=log,
        replicas=choose_replicas(
            network, config.replicas, positions=data.pair_batches.steps * data.pair_batches.positions,
            length=config.seq_len, max_replicas=data.pair_batches.batch_size,
        ),
        replica=partial(_replica_main, network, data),
        world=world,
    )  # fmt: skip
    return network


def _replica_main(
    network: PolicyModel,
    data: _PreferenceBatches,
    world: ProcessGroup,
    first: int,
    shared: SharedState,
    kept: Precomputed,
) -> None:
    """What the replicas beside the first do: the same, and nobody watches."""
    train_replica(
        world, network, data.config, preference_objective(data.config, network), data.batches_from(first, network, kept, world),
        shared, positions=data.pair_batches.positions, first=first, steps=data.pair_batches.steps,
    )  # fmt: skip


@torch.no_grad()
def evaluate_preferences(
    network: PolicyModel,
    items: Sequence[PreferencePair] | Sequence[UnpairedExample],
    config: PreferenceConfig,
    *,
    pad_id: int,
    reference: PolicyModel,
) -> dict[str, float]:
    """What `prefer` would tell of these items, all at once, without learning: for pairs that are held out.

    Raises:
        DataError: as `prefer`.
    """
    data = _PreferenceBatches(items, config, pad_id)
    objective = preference_objective(config, network)
    losses = [
        objective(network.to_device(part))
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


def preference_objective(config: PreferenceConfig, network: PolicyModel) -> Callable[[MicroBatch], Loss]:
    """The loss of a micro-batch; see `Units.parts` for its fields, and `_Data.step` for those of its texts."""
    name = config.objective
    beta = DEFAULT_BETA[name] if config.beta is None else config.beta

    def objective(part: MicroBatch) -> Loss:
        judged = network.log_probs(part)
        length = part["length"]
        log_prob = judged.log_prob.new_zeros(len(length)).index_add(
            0, judged.sequence, judged.log_prob
        )  # [S]
        each = log_prob.detach() / length
        if name == "kto":
            good = part["label"]
            loss = kto(
                log_prob, part["reference_log_prob"], good, part["kl"],
                beta=beta, desirable_weight=config.desirable_weight, undesirable_weight=config.undesirable_weight,
            )  # fmt: skip
            seen = {"logps/chosen": each[good].sum(), "logps/rejected": each[~good].sum()}
            return Loss(loss.total, loss.count, {**loss.metrics, **seen})
        reference = part.get("reference_log_prob")
        pairs = PairLogProbs(
            log_prob[0::2],
            log_prob[1::2],
            None if reference is None else reference[0::2],
            None if reference is None else reference[1::2],
            length[0::2],
            length[1::2],
        )
        if name == "dpo":
            loss = dpo(pairs, beta=beta, label_smoothing=config.label_smoothing)
        elif name == "ipo":
            loss = ipo(pairs, beta=beta, length_normalized=config.length_normalized)
        elif name == "simpo":
            loss = simpo(pairs, beta=beta, gamma=config.gamma)
        else:
            loss = orpo(pairs, weight=beta)
        seen = {"logps/chosen": each[0::2].sum(), "logps/rejected": each[1::2].sum()}
        return Loss(loss.total, loss.count, {**loss.metrics, **seen})

    return objective


def normalize_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics under the same names for all objectives: KTO's rewards are means over the answers of their own kind."""
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
    """Texts, what a reference says of them, and the micro-batches of each step."""

    def __init__(
        self,
        items: Sequence[PreferencePair] | Sequence[UnpairedExample],
        config: PreferenceConfig,
        pad_id: int,
    ) -> None:
        if not items:
            raise DataError(
                "there is no preference to learn from",
                expected="one at least",
                do="see what was left out, and why",
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
                    f"{config.objective} learns from pairs, and there are single answers",
                    expected="chosen and rejected", do="take kto, or pair the answers",
                )  # fmt: skip
        self.labels = torch.tensor(good)
        self.mismatched = mismatched_examples(self.texts, config) if config.objective == "kto" else []
        each = 1 if config.objective == "kto" else 2
        self.pair_batches = PairBatches(self.texts, each, config, pad_id, "prefer")
        self.identity = {
            "stage": "prefer",
            "config": config.model_dump(mode="json", exclude={"checkpoint_seconds", "replicas"}),
            "texts": dataset_fingerprint(self.texts),
            "good": hashlib.blake2b(self.labels.numpy().tobytes(), digest_size=16).hexdigest(),
        }

    def reference_log_probs(self, reference: PolicyModel) -> dict[str, Tensor]:
        """What the reference says, if one is asked: of every text, and for KTO of every prompt with a stranger's answer."""
        if self.config.objective not in NEEDS_REFERENCE:
            return {}
        found = {"reference_log_prob": sequence_log_probs(reference, self.texts, self.pad_id)}
        if self.mismatched:
            found["mismatched_log_prob"] = sequence_log_probs(reference, self.mismatched, self.pad_id)
        return found

    def batches_from(
        self, first: int, network: PolicyModel, kept: Precomputed, world: ProcessGroup
    ) -> Iterator[list[dict[str, Tensor]]]:
        """The micro-batches of step `first` and of all after it."""
        for number in range(first, self.pair_batches.steps):
            yield self.step_batches(self.pair_batches.step_units(number), network, kept, world)

    def step_batches(
        self, units: Sequence[int], network: PolicyModel, kept: Precomputed, world: ProcessGroup
    ) -> list[dict[str, Tensor]]:
        """Those of some units that fall to this replica, with reference_log_prob [S]; for KTO also good [S] and divergence
        [] of all units, by the weights as they are now."""
        mine = self.pair_batches.shard(units, world)
        streams = {name: kept[name] for name in ("reference_log_prob",) if name in kept}
        if self.config.objective != "kto":
            return list(self.pair_batches.micro_batches(mine, streams))
        parts = list(self.pair_batches.micro_batches(mine, {**streams, "label": self.labels}))
        divergence = torch.zeros(())
        if self.mismatched:
            own = sequence_log_probs(network, [self.mismatched[unit] for unit in mine], self.pad_id)
            now = [x for each in world.all_gather_scalars(*own.tolist()) for x in each]
            all_units = [
                u
                for rank in range(world.size)
                for u in self.pair_batches.shard(units, ProcessGroup(rank, world.size))
            ]
            divergence = kto_kl(torch.tensor(now), kept["mismatched_log_prob"][torch.tensor(all_units)])
        return [{**part, "kl": divergence} for part in parts]


def mismatched_examples(
    texts: Sequence[TokenizedExample], config: PreferenceConfig
) -> list[TokenizedExample]:
    """The prompt of each text with the answer of one that has another prompt, cut to the room; none, if all are alike.

    The texts are put into a random circle, and each takes the answer of the next one in it whose prompt is another.
    """
    order = numpy_rng(config.seed, "prefer", "crossed").permutation(len(texts)).tolist()
    prompts = [text.ids[: text.prompt_length].tobytes() for text in texts]
    if len(set(prompts)) < 2:
        return []
    found = dict[int, TokenizedExample]()
    follows = stranger = order[
        0
    ]  # the next one in the circle, and the next one whose prompt is not the next one's
    for n in [
        *reversed(order),
        *reversed(order),
    ]:  # twice around: the first time nothing follows the last ones
        giver = texts[stranger if prompts[n] == prompts[follows] else follows]
        own, start = texts[n].prompt_length, giver.prompt_length
        stop = start + max(1, config.seq_len - own)
        ids = np.concatenate([texts[n].ids[:own], giver.ids[start:stop]])
        found[n] = TokenizedExample(ids, np.concatenate([np.zeros(own, np.bool_), giver.loss_mask[start:stop]]))
        if prompts[n] != prompts[follows]:
            stranger = follows
        follows = n
    return [found[n] for n in range(len(texts))]
