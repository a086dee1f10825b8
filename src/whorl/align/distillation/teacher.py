"""Teachers: a live model, or its cached top-k log-probabilities.

    LiveTeacher(model)             scored at every step over the whole vocabulary; works on completions of the student
    CachedTeacher.load(folder)     top-k ids at every target of fixed texts, from one pass; shared by many students

The subtle point: ids are numbers. Two tokenizers of equal size may share no id, and the divergence between their models
still looks like a normal loss. So the vocabularies of teacher and student are compared token by token
(`check_same_vocabulary`) before anything is scored, and a folder stores the fingerprint of its vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from whorl.align.config import DistilConfig
from whorl.errors import ConfigError
from whorl.evals.model.sampling import open_engine, policy_sampling, sample_completions
from whorl.models import LanguageModel
from whorl.objectives.distil import distil_full_vocab
from whorl.objectives.next_token import Loss
from whorl.tokens.hf_tokenizer import HFTokenizer
from whorl.tokens.token_encoder import TokenEncoder, TokenizedExample, concat
from whorl.tokens.tokenizer import Tokenizer
from whorl.train.learner.update import MicroBatch


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
        return hash_tensors(p.detach() for p in self.model.parameters())


def hash_tensors(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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
