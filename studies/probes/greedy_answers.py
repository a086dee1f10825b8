"""Greedy answers of a network during training, sampled by an engine with a copy of its weights.

The engine packs weights in its own format and caches prefixes while the network keeps learning. Weights are copied by
name with the adapter merged (`PolicyModel.merged_weights`), and cached prefixes are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from whorl.align.model.policy_model import PolicyModel
from whorl.engine.sampling_params import SamplingParams
from whorl.evals.model.sampling import open_engine, sample_completions
from whorl.tokens.token_encoder import Message, TokenEncoder


class GreedyAnswers:
    """Answers the same questions with the current weights.

    Args:
        questions: conversations, or texts to continue.
        max_tokens: of an answer.
    """

    def __init__(
        self,
        network: PolicyModel,
        encoder: TokenEncoder,
        questions: Sequence[str | Sequence[Message]],
        *,
        max_tokens: int = 16,
        sequences: int = 64,
    ) -> None:
        self.encoder, self.max_tokens = encoder, max_tokens
        self._prompts = [encoder.prompt(question) for question in questions]
        longest = max(map(len, self._prompts), default=1) + max_tokens + 1
        self._engine = open_engine(network.eval_copy(), (sequences, longest), encoder, with_text=False)

    def __call__(self, network: PolicyModel) -> list[str]:
        """Return the network's answers with its current weights."""
        self._engine.update_weights(network.merged_weights(), self._engine.version + 1)
        completions = sample_completions(
            self._engine, self._prompts, SamplingParams(temperature=0), max_tokens=self.max_tokens,
            stop_ids=self.encoder.stop_ids, seed=0,
        )  # fmt: skip
        return [self.encoder.decode(completion.ids) for completion in completions]
