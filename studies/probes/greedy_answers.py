"""Asking a network that is being trained: greedy answers by an engine with a copy of its weights.

The copy is the point: an engine packs weights in its own way and keeps what it has computed, while the network goes on
learning. Weights are handed over by name, an adapter merged in (`Network.policy`), and the cache forgets.
"""

from __future__ import annotations

from collections.abc import Sequence

from whorl.align.model.example import Message, Scribe
from whorl.align.model.policy_model import Network
from whorl.align.model.sampling import answer, rollout_engine
from whorl.engine.sampling_params import Sampling


class Asker:
    """Answers the same questions again and again, with ever newer weights.

    Args:
        questions: conversations, or texts to be continued.
        max_tokens: of an answer.
    """

    def __init__(
        self,
        network: Network,
        scribe: Scribe,
        questions: Sequence[str | Sequence[Message]],
        *,
        max_tokens: int = 16,
        sequences: int = 64,
    ) -> None:
        self.scribe, self.max_tokens = scribe, max_tokens
        self._prompts = [scribe.prompt(question) for question in questions]
        longest = max(map(len, self._prompts), default=1) + max_tokens + 1
        self._engine = rollout_engine(network.copied(), scribe, sequences=sequences, max_length=longest)

    def __call__(self, network: Network) -> list[str]:
        """What the network says to each as it is now."""
        self._engine.update_weights(network.policy(), self._engine.version + 1)
        found = answer(
            self._engine, self._prompts, Sampling(temperature=0), max_tokens=self.max_tokens,
            ends=self.scribe.ends, seed=0,
        )  # fmt: skip
        return [self.scribe.words(one.ids) for one in found]
