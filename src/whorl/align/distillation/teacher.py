"""A teacher: what it says of every id that a student is to learn, from a model that stands beside or from what was kept.

    Beside(model)      asked in every step, whole vocabulary: whatever the student has just written can be scored
    Told.load(folder)  its K likeliest ids after every place of given texts, from one pass: many students learn from it

A folder of the second kind has two files: `told.safetensors`,

    ids, mask [n]      the texts end to end            first [texts + 1]   where each begins
    tops [M, K] int32  likeliest ids, best first       log_probs [M, K]    fp32, of the M ids that are learnt

and `told.json`, its manifest: form, sizes, temperature, who taught, the tokenizer and the tensors' hashes.

Log-probabilities are kept in single precision, because the objective takes the others' share, 1 - sum p, as one outcome
more: where a teacher is sure that is 1e-4 or less, and half precision would leave nothing of it but rounding.

The subtle part is that ids are numbers. Two tokenizers of one size agree in no id, and a divergence between their models
is a number like any other, that falls like any other. So who teaches and who learns are compared token by token
(`same_words`) before anything is scored, and a folder says which vocabulary its numbers mean.
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
from whorl.align.model.example import ExampleTokenizer, TokenizedExample, concat
from whorl.align.model.sampling import policy_sampling, rollout_engine, sample_completions
from whorl.errors import ConfigError, DataError
from whorl.models import LanguageModel
from whorl.objectives.distil import distil_full_vocab, distil_top_k
from whorl.objectives.next_token import Loss
from whorl.store.address import file_sha256
from whorl.tokens.hf_tokenizer import HFTokenizer
from whorl.tokens.tokenizer import Tokenizer
from whorl.train.learner.update import MicroBatch

FORMAT_VERSION, TENSORS, MANIFEST = 1, "teacher_logits.safetensors", "teacher_logits.json"
FORWARD_POSITIONS = 1 << 13  # positions of a forward
MAX_LOGITS = 1 << 22  # numbers of logits at once


class Teacher(Protocol):
    """Who can be learnt from."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def vocab_fingerprint(self) -> str: ...

    def loss(
        self, batch: MicroBatch, hidden: Tensor, head: Tensor, softcap: float | None, config: DistilConfig
    ) -> Loss:
        """hidden: [N, d_model] of the student at the N targets of `part` that count; head: its own."""
        ...

    def identity(self) -> str:
        """Of what it says: a run goes on with no other."""
        ...


def tokenizer_fingerprint(tokenizer: Tokenizer | HFTokenizer) -> str:
    """Of the bytes of every id and of what ends a text: the same for two tokenizers whose ids mean the same."""
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
    """The fingerprint of the vocabulary that both have.

    Raises:
        ConfigError: they have two; both are named, with the first id that they tell apart.
    """
    found = tokenizer_fingerprint(teacher)
    if found == tokenizer_fingerprint(student):
        return found
    a, b = teacher.token_bytes, student.token_bytes
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    def said(of: Sequence[bytes]) -> str:
        return repr(of[first]) if first < len(of) else "no id"

    where = f"id {first:,} is {said(a)} to the one and {said(b)} to the other"
    if a == b:
        where = f"texts end with {list(teacher.end_ids)} and {list(student.end_ids)}"
    raise ConfigError(
        f"{names[0]} has a vocabulary of {len(a):,} ids and {names[1]} another of {len(b):,}: {where}",
        expected="one tokenizer for both",
        do="choose a teacher of the student's tokenizer, or fine-tune on the teacher's texts instead",
    )


class LiveTeacher:
    """A model that is asked in every step; it learns nothing.  words: fingerprint of its vocabulary, "" if unknown."""

    def __init__(self, model: LanguageModel, vocab_fingerprint: str = "") -> None:
        self.model, self.vocab_fingerprint = model.eval().requires_grad_(False), vocab_fingerprint
        self.vocab_size = int(model.config.vocab_size)

    def loss(
        self, batch: MicroBatch, hidden: Tensor, head: Tensor, softcap: float | None, config: DistilConfig
    ) -> Loss:
        """Over the whole vocabulary."""
        segments = batch.get("segment_ids")
        with torch.no_grad():
            said = self.model(batch["tokens"], None if segments is None else batch["positions"], segments)
        return distil_full_vocab(
            hidden, head, said[batch["loss_mask"]], self.model.head_weight, hidden.new_ones(len(hidden)),
            softcap=softcap, teacher_softcap=self.model.logit_softcap,
            kind=config.divergence, beta=config.beta, temperature=config.temperature,
        )  # fmt: skip

    def identity(self) -> str:
        """A hash of its weights."""
        return _hash_tensors(p.detach() for p in self.model.parameters())


@dataclass(frozen=True)
class CachedTeacher:
    """What a teacher said of given texts (see the top of this file).  start: [texts + 1], of each text's rows of M."""

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
        """Over the K ids and one outcome for all others.  `part` carries `told`: which row of M, for each target."""
        rows = batch["teacher_row"][
            batch["loss_mask"]
        ].cpu()  # all that was said stays on the host; these N go over
        log_probs, tops = self.log_probs[rows].to(hidden.device), self.top_ids[rows].to(hidden.device).long()
        return distil_top_k(
            hidden, head, log_probs, tops, hidden.new_ones(len(hidden)), softcap,
            kind=config.divergence, beta=config.beta, temperature=config.temperature,
        )  # fmt: skip

    def identity(self) -> str:
        """A hash of what it said."""
        return _hash_tensors((self.top_ids, self.log_probs))

    def target_rows(self, batch: MicroBatch, numbers: Tensor) -> Tensor:
        """[B, T], which row of M says something of each target that counts, of a part of texts numbered `numbers`."""
        mask = batch["loss_mask"]
        which = batch["sequence"][mask]  # row by row, a text's targets stand side by side
        new = torch.ones(len(which), dtype=torch.bool)
        new[1:] = which[1:] != which[:-1]
        places = torch.arange(len(which))
        nth = places - torch.where(new, places, 0).cummax(0).values
        found = torch.full(mask.shape, -1)
        found[mask] = self.row_offsets[numbers[which]] + nth
        return found

    def save(self, folder: Path) -> Path:
        """Writes both files into `folder`, each aside and renamed, the manifest last."""
        folder.mkdir(parents=True, exist_ok=True)
        lengths = [len(text) for text in self.examples]
        tensors = {
            "ids": torch.from_numpy(np.concatenate([text.ids for text in self.examples])),
            "mask": torch.from_numpy(np.concatenate([text.loss_mask for text in self.examples])),
            "first": torch.tensor([0, *np.cumsum(lengths).tolist()]),
            "top_ids": self.top_ids.int().contiguous(),
            "log_probs": self.log_probs.float().contiguous(),
        }
        aside = folder / f".{TENSORS}"
        save_file(tensors, aside)
        aside.rename(folder / TENSORS)
        manifest = {
            "format": FORMAT_VERSION, "texts": len(self.examples), "targets": len(self.top_ids), "top": int(self.top_ids.shape[1]),
            "temperature": self.temperature, "vocab_size": self.vocab_size, "vocab_fingerprint": self.vocab_fingerprint,
            "teacher_name": self.teacher_name, "sha256": file_sha256(folder / TENSORS),
        }  # fmt: skip
        aside = folder / f".{MANIFEST}"
        aside.write_text(json.dumps(manifest, indent=2) + "\n")
        aside.rename(folder / MANIFEST)
        return folder

    @classmethod
    def load(cls, folder: Path) -> CachedTeacher:
        """What `save` wrote.

        Raises:
            DataError: a file is missing, damaged, or not what the manifest says; file and field are named.
        """
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            if manifest["format"] != FORMAT_VERSION:
                raise _unreadable(folder / MANIFEST, f"form is {manifest['format']!r}", f"{FORMAT_VERSION}")
            if file_sha256(folder / TENSORS) != manifest["sha256"]:
                raise _unreadable(folder / TENSORS, "it is not the file that the manifest was made of", "")
            found = load_file(folder / TENSORS)
            ids, mask, first = (found[name].numpy() for name in ("ids", "mask", "first"))
            tops, log_probs = found["top_ids"], found["log_probs"]
            shape = (manifest["targets"], manifest["top"])
            if tuple(tops.shape) != shape or tuple(log_probs.shape) != shape:
                raise _unreadable(folder / TENSORS, f"tops is {list(tops.shape)}", f"{list(shape)}")
            texts = tuple(
                TokenizedExample(ids[a:b], mask[a:b])
                for a, b in zip(first[:-1].tolist(), first[1:].tolist(), strict=True)
            )
            rest = {
                name: manifest[name]
                for name in ("vocab_size", "vocab_fingerprint", "temperature", "teacher_name")
            }
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise _unreadable(folder, f"{type(error).__name__}: {error}", "what `Told.save` wrote") from error
        return cls(texts, tops, log_probs, _row_offsets(texts), **rest)


def _unreadable(path: Path, what: str, expected: str) -> DataError:
    return DataError(f"{path}: {what}", expected=expected, do="let the teacher say it again")


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
    """One pass of a teacher over `texts`: its `top` likeliest ids wherever one is to be learnt.

    Args:
        words: fingerprint of its vocabulary (`fingerprint_of`); teacher: its address or name, for the manifest.
        advance: told how many texts were read.

    Raises:
        DataError: there is nothing to say anything about.
    """
    start = _row_offsets(examples)
    if not int(start[-1]):
        raise DataError("the texts have no id that is to be learnt", expected="one at least")
    vocab = int(model.config.vocab_size)
    top_k = min(top_k, vocab)
    tops = torch.zeros(int(start[-1]), top_k, dtype=torch.int32)
    log_probs = torch.zeros(int(start[-1]), top_k)
    told = CachedTeacher(
        tuple(examples), tops, log_probs, start, vocab, vocab_fingerprint, temperature, teacher_name
    )
    order = sorted(range(len(examples)), key=lambda n: len(examples[n]))
    model.eval()
    while order:
        longest = len(examples[order[min(len(order), 64) - 1]])
        now, order = order[: (n := max(1, min(64, FORWARD_POSITIONS // longest)))], order[n:]
        part = pad([examples[n] for n in now], pad_id)
        rows = told.target_rows(part, torch.tensor(now))[part["loss_mask"]]
        device = model.embedding.device
        hidden = model(part["tokens"].to(device))[part["loss_mask"].to(device)]
        size = max(1, MAX_LOGITS // vocab)
        for at, some in zip(torch.split(rows, size), torch.split(hidden, size), strict=True):
            found = (model.logits(some) / temperature).log_softmax(-1).topk(top_k)
            log_probs[at], tops[at] = found.values.cpu(), found.indices.int().cpu()
        on_progress(len(now))
    return told


def sample_teacher_completions(
    model: LanguageModel,
    example_tokenizer: ExampleTokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    max_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> tuple[list[TokenizedExample], int]:
    """Its own answers to `prompts` as texts to learn from, and how many it did not end: these are left out.

    (Sequence-level distillation: Kim and Rush 2016, arXiv:1606.07947, by samples in place of the likeliest.)
    """
    engine = rollout_engine(
        model.eval().requires_grad_(False), example_tokenizer, sequences=64, max_length=length
    )
    sampling = policy_sampling(temperature)
    found = sample_completions(
        engine, prompts, sampling, max_tokens=max_tokens, stop_ids=example_tokenizer.stop_ids, seed=seed
    )
    kept = [concat(p, one.ids) for p, one in zip(prompts, found, strict=True) if one.finished]
    return kept, len(found) - len(kept)
