"""What is served: a model under a name, with its words, its chat template and its bounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from whorl.models import LanguageModel
from whorl.tokens.chat import ChatTemplate
from whorl.tokens.healing import heal
from whorl.tokens.hf_tokenizer import ForeignTokenizer
from whorl.tokens.tokenizer import Tokenizer

Words = Tokenizer | ForeignTokenizer


@dataclass(frozen=True)
class Served:
    """A language model as the API knows it.

    name: told to clients; aliases: other names that mean it. context: positions of prompt and answer together at most.
    adapter: LoRA adapter that its requests name.
    vector: ids -> a unit vector [d], called in the engine's thread; None where there are no embeddings.
    """

    name: str
    tokenizer: Words
    chat: ChatTemplate
    vocab_size: int
    context: int
    aliases: frozenset[str] = frozenset()
    adapter: str | None = None
    vector: Callable[[Sequence[int]], list[float]] | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str) -> list[int]:
        """Ids of a prompt, with what the model saw before every text."""
        if isinstance(self.tokenizer, ForeignTokenizer):
            return self.tokenizer.whole(text)
        return [self.tokenizer.bos_id, *self.tokenizer.encode(text).tolist()]

    def healed(self, text: str) -> tuple[list[int], bytes]:
        """(ids, what the output begins with): the prompt's last piece is the model's to write anew."""
        words = self.tokenizer
        found = words.prompt(text) if isinstance(words, ForeignTokenizer) else heal(words, text)
        return found.ids, found.required

    def plain(self, text: str) -> list[int]:
        """Ids of a text and nothing else."""
        return [int(i) for i in self.tokenizer.encode(text)]

    @property
    def card(self) -> dict[str, Any]:
        """The entry of /v1/models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "whorl",
            "context_length": self.context,
            "vocab_size": self.vocab_size,
            "whorl": {"chat": self.chat.trained, "template": self.chat.kind},
            "capabilities": ["completion", "chat", *(["embedding"] if self.vector else [])],
        }


@dataclass(frozen=True)
class ServedEmbedder:
    """The house's sentence embedder beside a language model, or alone. vector: text or ids -> unit vector [d]."""

    name: str
    tokenizer: Tokenizer
    context: int
    vector: Callable[[Sequence[int]], list[float]]
    aliases: frozenset[str] = frozenset()
    created: int = field(default_factory=lambda: int(time.time()))

    def plain(self, text: str) -> list[int]:
        return [int(i) for i in self.tokenizer.encode(text)]

    @property
    def card(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "whorl",
            "context_length": self.context,
            "capabilities": ["embedding"],
        }


@torch.inference_mode()
def mean_pooled(model: LanguageModel, ids: Sequence[int]) -> list[float]:
    """The mean of a language model's last hidden states over a text, as a unit vector [d_model].

    A model that was trained to write, not to compare: texts lie in a narrow cone, and cosines are high throughout. Train an
    embedder (`embedding/train.py`) where search is the purpose.
    """
    hidden = model(torch.tensor([list(ids)], device=model.embedding.device))[0].float().mean(dim=0)
    found: list[float] = torch.nn.functional.normalize(hidden, dim=0).tolist()
    return found
