"""Validation during training, on a fixed set of rows.

held_out_nll is the loss on validation text. Its rows are packed as those of training are (`tokens/packing.py`). Texts
that are shorter than a row count too, and none attends to another.

induction_nll is the loss on the second half of rows that repeat shuffled ids. Token statistics do not help there; only
induction heads do (Olsson et al. 2022, In-context Learning and Induction Heads, the repeated-sequence test). The step at
which it drops is the induction onset.

`BestWeights` keeps the weights with the lowest held-out loss, for runs that read their text several times.
A model with look-up tables memorizes a small corpus: its held-out loss rises from the second epoch on. So after the first
epoch the state of every evaluation with a new lowest loss is saved, in the format of checkpoints. A run that ends more
than `MARGIN` above it continues with that state, which the last evaluation measures and the step saves. Evaluations are at
fixed steps, so a resumed run keeps the same weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from whorl.models import LanguageModel
from whorl.nn.gpu.dispatch import logits_step
from whorl.objectives.generative import masked
from whorl.objectives.next_token import next_token
from whorl.parallel.process_group import ProcessGroup
from whorl.slots import Spec
from whorl.tokens.loader import TokenBatch
from whorl.tokens.packing import pack
from whorl.tokens.shards import TokenSet
from whorl.tracking.seeds import generator
from whorl.train.checkpoint.pieces import restore_named

if TYPE_CHECKING:
    from whorl.train.job import Job

HELD_OUT_ROWS = 16
MASKINGS = 4  # of each row, for masked diffusion; their seed is fixed
INDUCTION_ROWS = 8
MARGIN = 0.01  # of the lowest held-out loss; below it, the weights at the end of the schedule are preferred


def held_out_rows(job: Job) -> dict[str, Tensor] | None:
    """Return fixed rows of the validation split: tokens, targets, loss_mask, each [n, T]; None if it has no target.

    They are at most HELD_OUT_ROWS packed rows, spread over the split. If one of them has several documents, segments and
    positions are there too.
    """
    tokens = TokenSet(Path(job.tokens))
    if "validation" not in tokens.splits:
        return None
    split = tokens.split("validation")
    packed = pack(split.starts, split.lengths, job.seq_len)
    if not len(packed):
        return None
    chosen = np.arange(0, len(packed), max(1, len(packed) // HELD_OUT_ROWS))[:HELD_OUT_ROWS]
    batch = Spec.from_dataclass(TokenBatch, B=len(chosen), T=job.seq_len).allocate()
    packed.write(split, chosen, batch, tokens.pad_id)
    rows = {"tokens": batch.tokens, "targets": batch.targets, "loss_mask": batch.loss_mask}
    if not packed.single_segment[chosen].all():
        rows |= {"segments": batch.segment_ids, "positions": batch.positions}
    return {name: torch.from_numpy(np.array(array)) for name, array in rows.items()}


def held_out_bytes_per_target(job: Job, token_bytes: Sequence[bytes]) -> float:
    """Return the mean bytes of a target of the validation rows (the end of a text has none); 0 without rows."""
    rows = held_out_rows(job)
    if rows is None:
        return 0.0
    targets = rows["targets"][rows["loss_mask"]].tolist()
    return sum(len(token_bytes[i]) for i in targets) / len(targets)


class Validator:
    """Loss on fixed validation rows and on rows that repeat shuffled ids; the replicas share the rows."""

    def __init__(self, job: Job, process_group: ProcessGroup) -> None:
        rows = held_out_rows(job)
        shape = (INDUCTION_ROWS, job.seq_len // 2)
        # ids with the text's frequencies, in random order
        stream = torch.arange(job.model.vocab_size) if rows is None else rows["tokens"][rows["loss_mask"]]
        half = stream[torch.randint(len(stream), shape, generator=generator(job.seed, "copy"))]
        own = slice(process_group.rank, None, process_group.size)
        if rows is not None and job.model.masked is not None:
            rows = {name: t.repeat(MASKINGS, 1) for name, t in rows.items()}
            predicted = masked.targets(rows.pop("loss_mask"))
            drawn = masked.draws(len(predicted), job.seq_len, generator(0, "held-out masks"))
            packed = rows.get("segments"), rows.get("positions")
            weights = masked.weights(predicted, drawn, job.model.masked.block, *packed)
            rows |= {"targets": rows["tokens"], "loss_mask": predicted, "weights": weights}
        self.rows = None if rows is None else {name: t[own].to(job.device) for name, t in rows.items()}
        self.induction_rows = torch.cat([half, half], dim=1)[own].to(job.device)

    def fixed_ids(self) -> Tensor:
        """Return fixed ids [n, T] of this replica: validation text, or the induction rows without any. n may be 0."""
        return self.induction_rows if self.rows is None else self.rows["tokens"]

    @torch.no_grad()
    def __call__(self, model: LanguageModel, process_group: ProcessGroup) -> dict[str, float]:
        """Return held_out_nll and induction_nll in nats per token; of masked diffusion the bound alone."""
        nll, count = (0.0, 0.0) if self.rows is None else self._nll(model, **self.rows)
        if model.config.masked is not None:
            nll, count = process_group.all_reduce_scalars(nll, count)
            return {"held_out_nll": nll / count} if count else {}
        ids = self.induction_rows
        mask = (torch.arange(1, ids.shape[1]) >= ids.shape[1] // 2 + 1).expand(len(ids), -1).to(ids.device)
        copy_nll, copy_count = self._nll(model, ids[:, :-1], ids[:, 1:], mask)
        sums = process_group.all_reduce_scalars(nll, count, copy_nll, copy_count)
        metrics = {"induction_nll": sums[2] / max(1.0, sums[3])}
        if sums[1]:
            metrics["held_out_nll"] = sums[0] / sums[1]
        return metrics

    def _nll(
        self,
        model: LanguageModel,
        tokens: Tensor,
        targets: Tensor,
        loss_mask: Tensor,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> tuple[float, float]:
        """Return the summed loss in nats and the number of targets of rows [n, T]. weights: of masked diffusion."""
        if not len(tokens):  # fewer rows than replicas
            return 0.0, 0.0
        if weights is not None:
            tokens, positions, segments = masked.inputs(
                tokens, weights, model.config.masked, segments, positions
            )
        loss = next_token(
            model(tokens, positions, segments)[:, : targets.shape[1]].flatten(0, 1),
            model.head_weight,
            targets.flatten(),
            (loss_mask if weights is None else weights).flatten(),
            softcap=model.logit_softcap,
            select_step=logits_step,
        )
        return float(loss.metrics["nll"]), float(loss_mask.sum())


class BestWeights:
    """Follows the held-out loss of a run, whose `Trainer` is an argument of `follow`. state: `state` of a checkpoint."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self.state: dict[str, Any] = dict(state or {})  # step, loss, warned

    def follow(self, trainer: Any, done: int, loss: float) -> bool:
        """Save a new lowest loss, or report a higher one; return whether the saved state was restored at the end.

        Every rank calls this after an evaluation, with the same loss.
        """
        lowest = self.state.get("loss")
        if lowest is None or loss < lowest:
            self.state = {"step": done, "loss": loss, "warned": False}
            self._save(trainer, done)
            return False
        if loss <= (1 + MARGIN) * lowest:
            return False
        what = (
            f"held-out loss {loss:.3f}, but {lowest:.3f} at step {self.state['step']:,}: the model overfits"
        )
        if not self.state["warned"]:
            self.state["warned"] = True
            action = "these weights are kept unless it falls again; more text or a smaller budget helps"
            trainer.report_event(done, {"kind": "overfitting", "message": what, "action": action})
        return done == trainer.task.steps and self._restore(trainer, done, what)

    def _save(self, trainer: Any, done: int) -> None:
        if trainer.checkpoints is None:
            return
        older = sorted(_folder(trainer).glob("best-*"))
        trainer.checkpoints.save_named(_path(trainer, done), done, trainer.shared.tensors())
        for path in older[:-1] if not trainer.group.rank else ():  # the last one may be the only complete one
            shutil.rmtree(path, ignore_errors=True)

    def _restore(self, trainer: Any, done: int, what: str) -> bool:
        step, saved, checkpoints = self.state["step"], False, trainer.checkpoints
        if checkpoints is not None:
            checkpoints.finish()
            saved = any(_path(trainer, step).glob("step-*"))  # absent if the run continued on another machine
        saved = bool(trainer.group.all_gather_scalars(float(saved))[0][0])
        if saved:
            path = Path() if checkpoints is None else _path(trainer, step)
            restore_named(checkpoints, path, trainer.shared.tensors(), trainer.group)
        if checkpoints is not None:
            action = f"the weights of step {step:,} are saved" if saved else "the last weights are saved"
            trainer.report_event(done, {"kind": "overfitting", "message": what, "action": action})
        return saved


def _folder(trainer: Any) -> Path:
    assert trainer.checkpoints is not None
    folder: Path = trainer.checkpoints.folder / "best"
    return folder


def _path(trainer: Any, step: int) -> Path:
    return _folder(trainer) / f"best-{step:08d}"
