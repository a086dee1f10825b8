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
from whorl.tokens.hf_tokenizer import HFTokenizer
from whorl.tokens.tokenizer import Tokenizer

AnyTokenizer = Tokenizer | HFTokenizer


@dataclass(frozen=True)
class ServedModel:
    """A language model as the API knows it.

    name: told to clients; aliases: other names that mean it. context: positions of prompt and answer together at most.
    adapter: LoRA adapter that its requests name.
    vector: ids -> a unit vector [d], called in the engine's thread; None where there are no embeddings.
    """

    name: str
    tokenizer: AnyTokenizer
    chat_template: ChatTemplate
    vocab_size: int
    max_model_len: int
    aliases: frozenset[str] = frozenset()
    adapter: str | None = None
    embed: Callable[[Sequence[int]], list[float]] | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a prompt, with what the model saw before every text."""
        if isinstance(self.tokenizer, HFTokenizer):
            return self.tokenizer.encode_prompt(text)
        return [self.tokenizer.bos_id, *self.tokenizer.encode(text).tolist()]

    def encode_healed(self, text: str) -> tuple[list[int], bytes]:
        """(ids, what the output begins with): the prompt's last piece is the model's to write anew."""
        words = self.tokenizer
        found = words.heal_prompt(text) if isinstance(words, HFTokenizer) else heal(words, text)
        return found.ids, found.forced_prefix

    def encode_text(self, text: str) -> list[int]:
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
            "context_length": self.max_model_len,
            "vocab_size": self.vocab_size,
            "whorl": {"chat": self.chat_template.is_trained, "template": self.chat_template.kind},
            "capabilities": ["completion", "chat", *(["embedding"] if self.embed else [])],
        }


@dataclass(frozen=True)
class ServedEmbedder:
    """The house's sentence embedder beside a language model, or alone. vector: text or ids -> unit vector [d]."""

    name: str
    tokenizer: Tokenizer
    max_model_len: int
    embed: Callable[[Sequence[int]], list[float]]
    aliases: frozenset[str] = frozenset()
    created: int = field(default_factory=lambda: int(time.time()))

    def encode_text(self, text: str) -> list[int]:
        return [int(i) for i in self.tokenizer.encode(text)]

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
def mean_pooled_embedding(model: LanguageModel, ids: Sequence[int]) -> list[float]:
    """The mean of a language model's last hidden states over a text, as a unit vector [d_model].

    A model that was trained to write, not to compare: texts lie in a narrow cone, and cosines are high throughout. Train an
    embedder (`embedding/train.py`) where search is the purpose.
    """
    hidden = model(torch.tensor([list(ids)], device=model.embedding.device))[0].float().mean(dim=0)
    found: list[float] = torch.nn.functional.normalize(hidden, dim=0).tolist()
    return found
