"""Memory of a step: buffers are reused and temporaries freed."""

from __future__ import annotations

from pathlib import Path

from tests.support.train.tiny import job

from whorl.models.activation_checkpointing import LiveTensorTracker
from whorl.parallel.process_group import ProcessGroup
from whorl.train.lm.pretrain import allocate_shared, build_learner, build_model
from whorl.train.profiling.step_timer import random_batch


def test_step_reuses_memory(tokens: Path) -> None:
    wanted = job(tokens)
    model = build_model(wanted)
    (update,) = build_learner(model, wanted, allocate_shared(model, wanted), ProcessGroup()).updates
    part = random_batch(wanted, wanted.batch_size)
    places, left, peaks = set(), [], []
    for number in range(8):
        update.accumulate(update.objective(part))
        if number < 2:  # one step per Muon group
            update.step(1e-3)
            continue
        with LiveTensorTracker() as alive:
            update.step(1e-3)
        places.add(tuple(t.data_ptr() for t in update.reduced_gradients.values()))
        left.append(alive.bytes)
        peaks.append(alive.peak)
    assert len(places) == 1 and left == [0] * 6, "what a step makes does not outlive it"
    assert peaks[0] == peaks[2] == peaks[4] and peaks[1] == peaks[3] == peaks[5], (
        "and every second step is alike"
    )
