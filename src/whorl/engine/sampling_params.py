"""Sampling settings of one sequence. `sampler.py` defines what they do.

They apply in this order:

    logit_bias, grammar mask                   added to logits; -inf
    repetition, frequency, presence penalty    `penalties.py`
    temperature                                logits are divided by it
    top_k, then top_p, then min_p              each applies to the ids that remain

(min-p: arXiv:2407.01082; top-p: arXiv:1904.09751.)
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from whorl.errors import ConfigError

Id = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class SamplingParams(BaseModel):
    """Settings for the next token. The defaults sample the model's distribution, slightly sharpened."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: Finite = Field(default=0.8, ge=0, description="0 is greedy")
    top_k: int = Field(default=0, ge=0, description="keep the k most likely ids; 0 keeps all")
    top_p: float = Field(
        default=0.95, gt=0, le=1, description="keep the most likely ids that together reach p"
    )
    min_p: float = Field(
        default=0, ge=0, le=1, description="keep ids with at least this fraction of the highest probability"
    )
    repetition_penalty: Finite = Field(
        default=1, gt=0, description="above 1 makes ids of prompt and output less likely; 1 is off"
    )
    presence_penalty: float = Field(
        default=0, ge=-2, le=2, description="subtracted once from the logit of each id in the output"
    )
    frequency_penalty: float = Field(
        default=0, ge=-2, le=2, description="subtracted from the logit for each occurrence in the output"
    )
    logit_bias: dict[Id, Finite] = Field(default_factory=dict, description="added to the logits of these ids")
    steps: int | None = Field(
        default=None, ge=1, description="masked diffusion: passes of a block or gap; default: one per token"
    )
    reveal: Literal["confidence", "entropy"] = Field(
        default="confidence", description="order in which passes reveal"
    )
    seed: int | None = Field(default=None, description="the same seed gives the same tokens; None picks one")

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    def check_ids(self, vocab_size: int) -> None:
        """Check that every biased id is in the vocabulary.

        Raises:
            ConfigError: an id of `logit_bias` is not.
        """
        for token_id in self.logit_bias:
            if token_id >= vocab_size:
                raise ConfigError(
                    f"logit_bias has the id {token_id}",
                    expected=f"0 to {vocab_size - 1}, the ids of this model",
                )
