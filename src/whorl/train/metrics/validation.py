"""Validation during training, on a fixed set of rows.

held_out_nll is the loss on validation text. induction_nll is the loss on the second half of rows that repeat shuffled
ids. Token statistics do not help there; only induction heads do (Olsson et al. 2022, In-context Learning and Induction
Heads, the repeated-sequence test). The step at which it drops is the induction onset.

`BestWeights` keeps the weights with the lowest held-out loss, for runs that read their text several times.
A model with look-up tables memorizes a small corpus: its held-out loss rises from the second epoch on. So after the first
epoch the state of every evaluation with a new lowest loss is saved, in the format of checkpoints. A run that ends more
than `MARGIN` above it continues with that state, which the last evaluation measures and the step saves. Evaluations are at
fixed steps, so a resumed run keeps the same weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whorl.models import LanguageModel
from whorl.nn.kernels.dispatch import logits_step
from whorl.objectives.next_token import next_token
from whorl.parallel.process_group import ProcessGroup
from whorl.tokens.shards import TokenSet
from whorl.tracking.seeds import generator
from whorl.train.checkpoint.format import restore

if TYPE_CHECKING:
    from whorl.train.job import Job

HELD_OUT_ROWS = 16
INDUCTION_ROWS = 8
MARGIN = 0.01  # of the lowest held-out loss; below it, the weights at the end of the schedule are preferred


class Validator:
    """Loss on fixed validation rows and on rows that repeat shuffled ids; the replicas share the rows."""

    def __init__(self, job: Job, process_group: ProcessGroup) -> None:
        tokens = TokenSet(Path(job.tokens))
        rows = []
        for ids in tokens.split("validation").iter_documents() if "validation" in tokens.splits else ():
            for start in range(0, len(ids) - job.seq_len, job.seq_len):
                rows.append(torch.from_numpy(ids[start : start + job.seq_len + 1].astype("int64")))
        step = max(1, len(rows) // HELD_OUT_ROWS)  # spread over the split
        rows = rows[::step][:HELD_OUT_ROWS]
        shape = (INDUCTION_ROWS, job.seq_len // 2)
        # ids with the text's frequencies, in random order
        stream = torch.cat([row.flatten() for row in rows]) if rows else torch.arange(job.model.vocab_size)
        half = stream[torch.randint(len(stream), shape, generator=generator(job.seed, "copy"))]
        own = slice(process_group.rank, None, process_group.size)
        self.rows = torch.stack(rows)[own].to(job.device) if rows else None
        self.induction_rows = torch.cat([half, half], dim=1)[own].to(job.device)

    def fixed_ids(self) -> Tensor:
        """Return fixed ids [n, T + 1] of this replica: validation text, or the induction rows without any. n may be 0."""
        return self.induction_rows if self.rows is None else self.rows

    @torch.no_grad()
    def __call__(self, model: LanguageModel, process_group: ProcessGroup) -> dict[str, float]:
        """Return held_out_nll and induction_nll in nats per token."""
        nll, count = self._nll(model, self.rows, 0) if self.rows is not None else (0.0, 0.0)
        copy_nll, copy_count = self._nll(model, self.induction_rows, self.induction_rows.shape[1] // 2)
        sums = process_group.all_reduce_scalars(nll, count, copy_nll, copy_count)
        metrics = {"induction_nll": sums[2] / max(1.0, sums[3])}
        if sums[1]:
            metrics["held_out_nll"] = sums[0] / sums[1]
        return metrics

    def _nll(self, model: LanguageModel, rows: Tensor, skip: int) -> tuple[float, float]:
        targets = rows[:, 1 + skip :]
        hidden = model(rows[:, :-1])[:, skip:]
        loss = next_token(
            hidden.flatten(0, 1),
            model.head_weight,
            targets.flatten(),
            torch.ones_like(targets).flatten(),
            softcap=model.logit_softcap,
            select_step=logits_step,
        )
        return float(loss.metrics["nll"]), float(loss.count)


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
        for path in older[:-1]:  # the last one may be the only complete one
            shutil.rmtree(path, ignore_errors=True)

    def _restore(self, trainer: Any, done: int, what: str) -> bool:
        step, saved = self.state["step"], False
        if trainer.checkpoints is not None:
            trainer.checkpoints.finish()
            saved = any(_path(trainer, step).glob("step-*"))  # absent if the run continued on another machine
            if saved:
                restore(trainer.shared.tensors(), trainer.checkpoints.load_named(_path(trainer, step)))
            action = f"the weights of step {step:,} are saved" if saved else "the last weights are saved"
            trainer.report_event(done, {"kind": "overfitting", "message": what, "action": action})
        return any(found for (found,) in trainer.group.all_gather_scalars(float(saved)))


def _folder(trainer: Any) -> Path:
    assert trainer.checkpoints is not None
    folder: Path = trainer.checkpoints.folder / "best"
    return folder


def _path(trainer: Any, step: int) -> Path:
    return _folder(trainer) / f"best-{step:08d}"
