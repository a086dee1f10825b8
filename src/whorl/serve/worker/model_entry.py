"""Entries of the model list: a model with its name, tokenizer, chat template and limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal

import torch

from whorl.models import LanguageModel
from whorl.tokens.chat import ChatTemplate
from whorl.tokens.hf_tokenizer import AnyTokenizer, HFTokenizer
from whorl.tokens.tokenizer import Tokenizer

Embed = Callable[[Sequence[int]], Generator[None, None, list[float]]]  # ids -> unit vector [d], in pieces
PIECE_TOKENS = 256  # of a long text, which is embedded in pieces


@dataclass
class ServedWeights:
    """The weights of an engine now. digest: address of their artifact; "" for a folder."""

    digest: str = ""


@dataclass(frozen=True)
class ServedModel:
    """A language model in the API.

    name: shown to clients; aliases: other accepted names. max_model_len: positions of prompt and output together.
    adapter: LoRA adapter of its requests. engine: name of its engine, where there are several.
    embed: runs in the engine thread; None without embeddings.
    heals: whether it can complete the last token of a prompt; not by masked diffusion.
    """

    name: str
    tokenizer: AnyTokenizer
    chat_template: ChatTemplate
    vocab_size: int
    max_model_len: int
    aliases: frozenset[str] = frozenset()
    adapter: str | None = None
    engine: str = ""
    embed: Embed | None = None
    heals: bool = True
    weights: ServedWeights = field(default_factory=ServedWeights)
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token; 0 if unknown, as with a tokenizer that normalizes its text."""
        return 0 if isinstance(self.tokenizer, HFTokenizer) else max(map(len, self.tokenizer.token_bytes))

    @property
    def card(self) -> dict[str, Any]:
        """The entry of /v1/models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "whorl",
            "context_length": self.max_model_len,
            "vocab_size": self.vocab_size,
            "whorl": {"chat": self.chat_template.is_trained, "template": self.chat_template.kind},
            "capabilities": ["completion", "chat", *(["embedding"] if self.embed else [])],
        }


@dataclass(frozen=True)
class Challenger:
    """A second model that answers a share of the requests under the name of the first. traffic: the share."""

    model: ServedModel
    traffic: float

    def arm(self, actor: str, pair: str, side: str) -> Literal["champion", "challenger"]:
        """Return the arm that answers: the same one for every request of an actor, one each for the two sides of a pair."""
        chosen = _uniform(self.model.weights.digest, pair or actor)
        first = chosen < (0.5 if pair else self.traffic)
        return "challenger" if first != (side == "right") else "champion"


def _uniform(*texts: str) -> float:
    """Return a number in [0, 1) that depends on the texts."""
    return int.from_bytes(sha256("\n".join(texts).encode()).digest()[:6], "big") / 2**48


@dataclass(frozen=True)
class ServedEmbedder:
    """A Whorl sentence embedder, with or without a language model."""

    name: str
    tokenizer: Tokenizer
    max_model_len: int
    embed: Embed
    aliases: frozenset[str] = frozenset()
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def card(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "whorl",
            "context_length": self.max_model_len,
            "capabilities": ["embedding"],
        }


@torch.inference_mode()
def mean_pooled_embedding(model: LanguageModel, ids: Sequence[int]) -> Generator[None, None, list[float]]:
    """Return the mean of the last hidden states over a text as a unit vector [d_model], as a generator.

    It yields after each `PIECE_TOKENS` of a long text. A model whose positions depend on later ones computes the whole text.
    A model trained for generation places texts in a narrow cone, so all cosines are high. For search, train an embedder
    (`embedding/train.py`).
    """
    row = torch.tensor([list(ids)], device=model.embedding.device)
    size = PIECE_TOKENS if model.batch_independent else len(ids)
    state = model.new_state(1, max(len(ids), model.context_hint or 0)) if len(ids) > size else None
    total = torch.zeros(model.embedding.shape[1], device=row.device)
    for start in range(0, len(ids), size):
        total += model(row[:, start : start + size], state=state)[0].float().sum(dim=0)
        yield
    vector: list[float] = torch.nn.functional.normalize(total, dim=0).tolist()
    return vector
