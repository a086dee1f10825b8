"""Teachers: a live model, or its cached top-k log-probabilities.

    LiveTeacher(model)             scored at every step over the whole vocabulary; works on completions of the student
    CachedTeacher.load(folder)     top-k ids at every target of fixed texts, from one pass; shared by many students

A folder of the second kind has two files. `teacher_logits.safetensors`:

    ids, mask [n]         the texts, concatenated           first [texts + 1]   start of each text
    top_ids [M, K] int32  most likely ids, best first       log_probs [M, K]    fp32, for the M targets in the loss

`teacher_logits.json` is the manifest: format, sizes, temperature, teacher, fingerprint of the tokenizer, hash of the
tensors. Log-probabilities are fp32 because the objective uses the remaining probability 1 - sum p. For a confident
teacher it is 1e-4 or less, and half precision would leave only rounding.

The subtle point: ids are numbers. Two tokenizers of equal size may share no id, and the divergence between their models
still looks like a normal loss. So the vocabularies of teacher and student are compared token by token
(`check_same_vocabulary`) before anything is scored, and a folder stores the fingerprint of its vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from whorl.align.config import DistilConfig
from whorl.align.model.batch import pad
from whorl.errors import ConfigError, DataError
from whorl.evals.model.sampling import open_engine, policy_sampling, sample_completions
from whorl.models import LanguageModel
from whorl.objectives.distil import distil_full_vocab, distil_top_k
from whorl.objectives.next_token import Loss
from whorl.store.address import file_sha256
from whorl.tokens.hf_tokenizer import HFTokenizer
from whorl.tokens.token_encoder import TokenEncoder, TokenizedExample, concat
from whorl.tokens.tokenizer import Tokenizer
from whorl.train.learner.update import MicroBatch

FORMAT_VERSION, TENSORS, MANIFEST = 1, "teacher_logits.safetensors", "teacher_logits.json"
FORWARD_POSITIONS = 1 << 13  # positions of a forward pass
MAX_LOGITS = 1 << 22  # logits held at a time


class Teacher(Protocol):
    """Interface of a source of target distributions."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def vocab_fingerprint(self) -> str: ...

    def loss(
        self, batch: MicroBatch, hidden: Tensor, head: Tensor, softcap: float | None, config: DistilConfig
    ) -> Loss:
        """Return the divergence.

        hidden: [N, d_model] of the student at the N targets in the loss; head: the student's.
        """
        ...

    def identity(self) -> str:
        """Return a hash of the teacher's output; a resumed run needs the same."""
        ...


def tokenizer_fingerprint(tokenizer: Tokenizer | HFTokenizer) -> str:
    """Return a hash of the bytes of all ids and of the end and control ids.

    Equal for tokenizers whose ids mean the same.
    """
    digest = hashlib.blake2b(digest_size=16)
    for token in tokenizer.token_bytes:
        digest.update(len(token).to_bytes(4, "big") + token)
    digest.update(json.dumps([sorted(tokenizer.end_ids), sorted(tokenizer.control_ids)]).encode())
    return digest.hexdigest()


def check_same_vocabulary(
    teacher: Tokenizer | HFTokenizer,
    student: Tokenizer | HFTokenizer,
    *,
    names: tuple[str, str] = ("the teacher", "the student"),
) -> str:
    """Return the fingerprint of the common vocabulary.

    Raises:
        ConfigError: the vocabularies differ; names both, and the first id that differs.
    """
    found = tokenizer_fingerprint(teacher)
    if found == tokenizer_fingerprint(student):
        return found
    a, b = teacher.token_bytes, student.token_bytes
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    def token_at(tokens: Sequence[bytes]) -> str:
        return repr(tokens[first]) if first < len(tokens) else "no id"

    where = f"id {first:,} is {token_at(a)} in the first and {token_at(b)} in the second"
    if a == b:
        where = f"texts end with {list(teacher.end_ids)} and {list(student.end_ids)}"
    raise ConfigError(
        f"{names[0]} has a vocabulary of {len(a):,} ids and {names[1]} one of {len(b):,} ids: {where}",
        expected="one tokenizer for both",
        do="choose a model with the other's tokenizer, or encode the texts again",
    )


class LiveTeacher:
    """A frozen model, scored at every step. vocab_fingerprint: of its vocabulary, "" if unknown."""

    def __init__(self, model: LanguageModel, vocab_fingerprint: str = "") -> None:
        self.model, self.vocab_fingerprint = model.eval().requires_grad_(False), vocab_fingerprint
        self.vocab_size = int(model.config.vocab_size)

    def loss(
        self, batch: MicroBatch, hidden: Tensor, head: Tensor, softcap: float | None, config: DistilConfig
    ) -> Loss:
        """Return the divergence over the whole vocabulary."""
        segments = batch.get("segment_ids")
        with torch.no_grad():
            hidden_states = self.model(
                batch["tokens"], None if segments is None else batch["positions"], segments
            )
        return distil_full_vocab(
            hidden, head, hidden_states[batch["loss_mask"]], self.model.head_weight, hidden.new_ones(len(hidden)),
            softcap=softcap, teacher_softcap=self.model.logit_softcap,
            kind=config.divergence, beta=config.beta, temperature=config.temperature,
        )  # fmt: skip

    def identity(self) -> str:
        """Return a hash of the weights."""
        return _hash_tensors(p.detach() for p in self.model.parameters())


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
        return _hash_tensors((self.top_ids, self.log_probs))

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


def _hash_tensors(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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


def sample_teacher_completions(
    model: LanguageModel,
    encoder: TokenEncoder,
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    max_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> tuple[list[TokenizedExample], int]:
    """Return the teacher's completions of `prompts` as examples, and the number of truncated ones, which are dropped.

    Sequence-level distillation: Kim and Rush 2016, arXiv:1606.07947, with samples in place of the most likely
    completion.
    """
    engine = open_engine(model.eval().requires_grad_(False), (64, length), encoder, with_text=False)
    sampling = policy_sampling(temperature)
    completions = sample_completions(
        engine, prompts, sampling, max_tokens=max_tokens, stop_ids=encoder.stop_ids, seed=seed
    )
    examples = [
        concat(p, completion.ids)
        for p, completion in zip(prompts, completions, strict=True)
        if completion.finished
    ]
    return examples, len(completions) - len(examples)
