"""A stage that goes through a data set: what fine-tuning, preferences and reward models share beside their objectives.

    batches   the micro-batches of each step, by its number alone
    once      what is computed before the first step and kept: a reference's word on every text
    resume    from the newest checkpoint, to the bits of a run that was not killed

Replicas, where a stage can start them, take every step's batch together, each its rows of it: a small model's operations are
too short to be split over cores (`parallel/process_group.py`). What is in a batch follows from the step's number, so all make the same
one, and nobody sends rows.

`once` is the subtle part. A reference is the network as it was before its first step, so after a kill nobody could ask it
again without loading it anew; and what a checkpoint was trained against must be what goes on to be used, bit for bit. So
what `once` made is part of every checkpoint, and is made only where there is none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl.align.config import StageConfig
from whorl.align.model.example import Text
from whorl.align.model.policy_model import Network
from whorl.objectives import Loss
from whorl.parallel.process_group import World, start_replicas
from whorl.train.checkpoint.format import restore
from whorl.train.checkpoint.manager import Keeper
from whorl.train.learner.learner import Learner, Shared
from whorl.train.learner.loop import Clock, learn
from whorl.train.learner.loss_scaler import LossScaling
from whorl.train.learner.update import Part, Update
from whorl.train.lm.precision import orthogonalisation
from whorl.train.optim.lr_schedule import factor

Observer = Callable[[int, dict[str, float]], None]
ONCE = "once/"
Once = Mapping[str, Tensor]
WORTH = 1e13  # operations of a whole stage, about half a minute: below, starting processes does not pay
SMALL = 5e7  # parameters: above, operations are long enough to be split, and engines of their own cost memory


def replicas_for(network: Network, asked: int | None, *, positions: float, length: int, most: int) -> int:
    """How many replicas a stage takes: what is asked for, or by default one a thread where that pays; `most` at most.

    positions: that the whole stage learns from, in rows of `length`. Always one where the model is not on the CPU.
    """
    if network.device.type != "cpu":
        return 1
    if asked is not None:
        return min(asked, most)
    small = sum(p.numel() for p in network.model.parameters()) <= SMALL
    if not small or network.model.flops_per_token(length) * positions < WORTH:
        return 1
    return max(1, min(torch.get_num_threads(), most))


def learner_of(
    network: Network,
    objective: Callable[[Part], Loss],
    config: StageConfig,
    *,
    positions: int,
    steps_done: int = 0,
    shared: Shared | None = None,
    world: World | None = None,
) -> Learner:
    """One update of all that `network` trains, by pretraining's optimisers at a share of their rates.

    objective: of a micro-batch that lies where the network does; here it is brought there (`Network.here`).
    positions: of a step, at most: how often a table may be looked into; shared, world: of replicas.
    """
    optim = config.optim()
    treatments = network.treatments(optim)
    update = Update(
        lambda part: objective(network.here(part)),
        treatments,
        clip_norm=optim.clip_norm,
        momentum=optim.momentum,
        matrix_every=optim.matrix_every,
        betas=(0.8, 0.95),
        eps=1e-10,
        scaling=LossScaling() if network.model.dtype == torch.float16 else None,
    )
    kind = orthogonalisation(network.model.dtype)
    shared = shared or memory_of(network, config, positions=positions)
    return Learner(network, [update], shared, world, dtype=kind, steps_done=steps_done)


def memory_of(network: Network, config: StageConfig, *, positions: int, replicas: int = 1) -> Shared:
    """Weights, gradients and moments of a stage's learner, of any number of replicas."""
    treatments = network.treatments(config.optim())
    return Shared.of(network, treatments, replicas, rows=positions, together=replicas == 1)


def micro_rows(config: StageConfig, part: Part) -> int:
    """Rows of a forward with gradients."""
    return max(1, config.micro_tokens // part["tokens"].shape[1])


def fingerprint(texts: Sequence[Text]) -> str:
    """Of ids and masks, in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(text.ids.tobytes() + text.mask.tobytes() + b"|")
    return digest.hexdigest()


def run_stage(
    network: Network,
    config: StageConfig,
    objective: Callable[[Part], Loss],
    batches: Callable[[int, Once], Iterator[Sequence[Part]]],
    *,
    identity: Mapping[str, Any],
    steps: int,
    positions: int,
    once: Callable[[], dict[str, Tensor]] = dict,
    observe: Observer = lambda step, metrics: None,
    may_save: Callable[[int], bool] = lambda step: True,
    scratch: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    replicas: int = 1,
    replica: Callable[..., None] | None = None,
    world: World | None = None,
) -> None:
    """Trains `network` for `steps` steps, from the newest checkpoint if there is one.

    Args:
        batches: from a step's number and what `once` made to the micro-batches of that step and all after it.
        identity: JSON of what must be the same for a checkpoint to fit.
        positions: of a step, at most.
        once: called before the first step, with the weights as they were given.
        observe: told after each step the means of all metrics, and seconds by what they were spent on.
        may_save: whether a run may go on from behind that many steps.
        scratch: folder for checkpoints; None keeps none.
        replicas: processes that learn, this one among them; each asks its own `batches` for its part of a step.
        replica: what the others do, called as `replica(world, first, shared, kept)`: it ends in `take_part`. Pickled.
        world: this process's place among them, which is filled in here.

    Raises:
        CheckpointError: the checkpoint is of another job. ReplicaError: another replica failed.
    """
    seconds = config.checkpoint_seconds
    keeper = Keeper(scratch, dict(identity), seconds=seconds, say=say) if scratch is not None else None
    found = keeper.resume() if keeper is not None else None
    first = found.step if found is not None else 0
    if found is None:
        network.eval()
        kept = once()
    else:
        kept = {n[len(ONCE) :]: t.clone() for n, t in found.tensors.items() if n.startswith(ONCE)}
    shared = memory_of(network, config, positions=positions, replicas=replicas)
    if found is not None:
        restore(shared.tensors(), {n: t for n, t in found.tensors.items() if not n.startswith(ONCE)})
        say(f"continues at step {first:,} of {steps:,}")

    def after(done: int, metrics: dict[str, float], clock: Clock) -> None:
        spent = {f"seconds_{name}": s for name, s in clock.take().items()}
        observe(done, {**metrics, **spent})
        if keeper is not None and done < steps and may_save(done) and keeper.due():
            keeper.save(done, {**shared.tensors(), **{ONCE + n: t for n, t in kept.items()}})

    threads, world = torch.get_num_threads(), world or World()
    if replicas > 1 and replica is not None:
        each = max(1, threads // replicas)
        say(f"{replicas} replicas learn, {each} {'thread' if each == 1 else 'threads'} each")
        started = start_replicas(replicas, _others, replica, each, first, shared, kept)
        world.size, world.links, world.children = started.size, started.links, started.children
        torch.set_num_threads(each)
    try:
        with keeper or nullcontext():
            take_part(
                world, network, config, objective, batches(first, kept), shared,
                positions=positions, first=first, steps=steps, after=after,
            )  # fmt: skip
    finally:
        world.close()
        torch.set_num_threads(threads)
    network.eval()


def _others(world: World, replica: Callable[..., None], threads: int, *given: Any) -> None:
    torch.set_num_threads(threads)
    replica(world, *given)


def take_part(
    world: World,
    network: Network,
    config: StageConfig,
    objective: Callable[[Part], Loss],
    batches: Iterator[Sequence[Part]],
    shared: Shared,
    *,
    positions: int,
    first: int,
    steps: int,
    after: Callable[[int, dict[str, float], Clock], None] = lambda step, metrics, clock: None,
) -> None:
    """The steps from `first` on, by this replica; alone, all of them. Arguments as in `run_stage`."""
    learner = learner_of(
        network, objective, config, positions=positions, steps_done=first, shared=shared, world=world
    )
    network.train()
    learn(
        learner,
        batches,
        lambda parts: [parts],
        first=first,
        last=steps,
        factor=lambda step: factor(step, steps, config.schedule),
        after=after,
    )
