"""A teacher as its cached top-k log-probabilities (`teacher.py`).

A folder of it has two files. `teacher_logits.safetensors`:

    ids, mask [n]         the texts, concatenated           first [texts + 1]   start of each text
    top_ids [M, K] int32  most likely ids, best first       log_probs [M, K]    fp32, for the M targets in the loss

`teacher_logits.json` is the manifest: format, sizes, temperature, teacher, fingerprint of the tokenizer, hash of the
tensors. Log-probabilities are fp32 because the objective uses the remaining probability 1 - sum p. For a confident
teacher it is 1e-4 or less, and half precision would leave only rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from whorl.align.config import DistilConfig
from whorl.align.distillation.teacher import hash_tensors
from whorl.align.model.batch import pad
from whorl.align.stage.task import dataset_fingerprint
from whorl.errors import DataError
from whorl.models import LanguageModel
from whorl.objectives.distil import distil_top_k
from whorl.objectives.next_token import Loss
from whorl.store.address import file_sha256
from whorl.tokens.token_encoder import TokenizedExample
from whorl.train.learner.update import MicroBatch

FORMAT_VERSION, TENSORS, MANIFEST = 1, "teacher_logits.safetensors", "teacher_logits.json"
FORWARD_POSITIONS = 1 << 13  # positions of a forward pass
MAX_LOGITS = 1 << 22  # logits held at a time


@dataclass(frozen=True)
class CachedTeacher:
    """Cached top-k log-probabilities (see the top of this file). row_offsets: [texts + 1] of each text's rows of M."""

    examples: tuple[TokenizedExample, ...]
    top_ids: Tensor
    log_probs: Tensor
    row_offsets: Tensor
    vocab_size: int
    vocab_fingerprint: str
    temperature: float
    teacher_name: str

    def loss(
        self, batch: MicroBatch, hidden: Tensor, head: Tensor, softcap: float | None, config: DistilConfig
    ) -> Loss:
        """Return the divergence over K ids and one outcome for the rest.

        `batch["teacher_row"]`: row of M of each target.
        """
        rows = batch["teacher_row"][
            batch["loss_mask"]
        ].cpu()  # the cache stays on the CPU; these N rows are moved
        log_probs, top_ids = (
            self.log_probs[rows].to(hidden.device),
            self.top_ids[rows].to(hidden.device).long(),
        )
        return distil_top_k(
            hidden, head, log_probs, top_ids, hidden.new_ones(len(hidden)), softcap,
            kind=config.divergence, beta=config.beta, temperature=config.temperature,
        )  # fmt: skip

    def identity(self) -> str:
        """Return a hash of the cached values."""
        return hash_tensors((self.top_ids, self.log_probs))

    def target_rows(self, batch: MicroBatch, numbers: Tensor) -> Tensor:
        """Return [B, T] rows of M for each target in the loss, of a batch of the texts with indices `numbers`."""
        mask = batch["loss_mask"]
        text_index = batch["sequence"][mask]  # in row order, the targets of a text are adjacent
        is_first = torch.ones(len(text_index), dtype=torch.bool)
        is_first[1:] = text_index[1:] != text_index[:-1]
        positions = torch.arange(len(text_index))
        target_index = positions - torch.where(is_first, positions, 0).cummax(0).values
        rows = torch.full(mask.shape, -1)
        rows[mask] = self.row_offsets[numbers[text_index]] + target_index
        return rows

    def save(self, folder: Path) -> Path:
        """Write both files into `folder` by write and rename, the manifest last."""
        folder.mkdir(parents=True, exist_ok=True)
        lengths = [len(text) for text in self.examples]
        tensors = {
            "ids": torch.from_numpy(np.concatenate([text.ids for text in self.examples])),
            "mask": torch.from_numpy(np.concatenate([text.loss_mask for text in self.examples])),
            "first": torch.tensor([0, *np.cumsum(lengths).tolist()]),
            "top_ids": self.top_ids.int().contiguous(),
            "log_probs": self.log_probs.float().contiguous(),
        }
        temporary = folder / f".{TENSORS}"
        save_file(tensors, temporary)
        temporary.rename(folder / TENSORS)
        manifest = {
            "format": FORMAT_VERSION,
            "texts": len(self.examples),
            "targets": len(self.top_ids),
            "top": int(self.top_ids.shape[1]),
            "temperature": self.temperature,
            "vocab_size": self.vocab_size,
            "vocab_fingerprint": self.vocab_fingerprint,
            "teacher_name": self.teacher_name,
            "sha256": file_sha256(folder / TENSORS),
        }
        temporary = folder / f".{MANIFEST}"
        temporary.write_text(json.dumps(manifest, indent=2) + "\n")
        temporary.rename(folder / MANIFEST)
        return folder

    @classmethod
    def find(cls, folder: Path, examples: Sequence[TokenizedExample]) -> CachedTeacher | None:
        """Return the folder's teacher if it is one of these texts, else None. Raises DataError: as `load`."""
        found = cls.load(folder) if (folder / MANIFEST).is_file() else None
        same = found is not None and dataset_fingerprint(found.examples) == dataset_fingerprint(examples)
        return found if same else None

    @classmethod
    def load(cls, folder: Path) -> CachedTeacher:
        """Read the files of `save`.

        Raises:
            DataError: a file is missing, damaged or does not match the manifest; names file and field.
        """
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            if manifest["format"] != FORMAT_VERSION:
                raise _unreadable(folder / MANIFEST, f"format is {manifest['format']!r}", f"{FORMAT_VERSION}")
            if file_sha256(folder / TENSORS) != manifest["sha256"]:
                raise _unreadable(folder / TENSORS, "its hash differs from the manifest", "")
            tensors = load_file(folder / TENSORS)
            ids, mask, first = (tensors[name].numpy() for name in ("ids", "mask", "first"))
            top_ids, log_probs = tensors["top_ids"], tensors["log_probs"]
            shape = (manifest["targets"], manifest["top"])
            if tuple(top_ids.shape) != shape or tuple(log_probs.shape) != shape:
                raise _unreadable(folder / TENSORS, f"top_ids is {list(top_ids.shape)}", f"{list(shape)}")
            texts = tuple(
                TokenizedExample(ids[a:b], mask[a:b])
                for a, b in zip(first[:-1].tolist(), first[1:].tolist(), strict=True)
            )
            fields = {
                name: manifest[name]
                for name in ("vocab_size", "vocab_fingerprint", "temperature", "teacher_name")
            }
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise _unreadable(
                folder, f"{type(error).__name__}: {error}", "a folder of `CachedTeacher.save`"
            ) from error
        return cls(texts, top_ids, log_probs, _row_offsets(texts), **fields)


def _unreadable(path: Path, what: str, expected: str) -> DataError:
    return DataError(f"{path}: {what}", expected=expected, do="cache the teacher again")


def _row_offsets(texts: Sequence[TokenizedExample]) -> Tensor:
    return torch.tensor([0, *np.cumsum([int(text.loss_mask.sum()) for text in texts]).tolist()])


@torch.no_grad()
def cache_teacher_logits(
    model: LanguageModel,
    examples: Sequence[TokenizedExample],
    *,
    pad_id: int,
    top_k: int = 32,
    temperature: float = 1.0,
    vocab_fingerprint: str = "",
    teacher_name: str = "",
    on_progress: Callable[[int], None] = lambda _: None,
) -> CachedTeacher:
    """Return the `top_k` most likely ids of a teacher at every target in the loss, from one pass over the examples.

    Args:
        vocab_fingerprint: of its vocabulary (`tokenizer_fingerprint`). teacher_name: address or name, for the manifest.
        on_progress: called with the number of texts just processed.

    Raises:
        DataError: no target is in the loss.
    """
    start = _row_offsets(examples)
    if not int(start[-1]):
        raise DataError("no target of the examples is in the loss", expected="at least one")
    vocab = int(model.config.vocab_size)
    top_k = min(top_k, vocab)
    top_ids = torch.zeros(int(start[-1]), top_k, dtype=torch.int32)
    log_probs = torch.zeros(int(start[-1]), top_k)
    cache = CachedTeacher(
        tuple(examples), top_ids, log_probs, start, vocab, vocab_fingerprint, temperature, teacher_name
    )
    order = sorted(range(len(examples)), key=lambda n: len(examples[n]))
    model.eval()
    while order:
        longest = len(examples[order[min(len(order), 64) - 1]])
        batch_indices, order = order[: (n := max(1, min(64, FORWARD_POSITIONS // longest)))], order[n:]
        part = pad([examples[n] for n in batch_indices], pad_id)
        rows = cache.target_rows(part, torch.tensor(batch_indices))[part["loss_mask"]]
        device = model.embedding.device
        hidden = model(part["tokens"].to(device))[part["loss_mask"].to(device)]
        size = max(1, MAX_LOGITS // vocab)
        for row, states in zip(torch.split(rows, size), torch.split(hidden, size), strict=True):
            top = (model.logits(states) / temperature).log_softmax(-1).topk(top_k)
            log_probs[row], top_ids[row] = top.values.cpu(), top.indices.int().cpu()
        on_progress(len(batch_indices))
    return cache
