"""How the next token is chosen: the settings of one sequence. What they mean is told in `sampler.py`, in a few lines.

They apply in this order, whatever the order of the fields:

    logit_bias, and what a grammar forbids     added to logits; -inf
    repetition, frequency, presence penalty    `penalties.py`
    temperature                                logits are divided by it
    top_k, then top_p, then min_p              the likeliest are kept; each looks at what the one before has left

(min-p: arXiv:2407.01082; top-p: arXiv:1904.09751.)
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from whorl.errors import ConfigError

Id = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class SamplingParams(BaseModel):
    """How to choose the next token. The defaults sample the model's own distribution, slightly sharpened."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: Finite = Field(default=0.8, ge=0, description="0 takes the likeliest token")
    top_k: int = Field(default=0, ge=0, description="keep the k likeliest; 0 keeps all")
    top_p: float = Field(default=0.95, gt=0, le=1, description="keep the likeliest that together reach p")
    min_p: float = Field(
        default=0, ge=0, le=1, description="keep those at least this share of the likeliest's probability"
    )
    repetition_penalty: Finite = Field(
        default=1, gt=0, description="above 1 makes what prompt or output holds less likely; 1 is none"
    )
    presence_penalty: float = Field(
        default=0, ge=-2, le=2, description="taken off the logit of what was put out"
    )
    frequency_penalty: float = Field(
        default=0, ge=-2, le=2, description="taken off the logit for each time that it was put out"
    )
    logit_bias: dict[Id, Finite] = Field(default_factory=dict, description="added to the logits of these ids")
    seed: int | None = Field(
        default=None, description="the same seed draws the same tokens; without, a fresh one"
    )

    @property
    def has_penalties(self) -> bool:
        """Whether what came before changes what is likely now."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    def check_ids(self, vocab_size: int) -> None:
        """That every biased id is one of the vocabulary.

        Raises:
            ConfigError: the first that is not.
        """
        for number in self.logit_bias:
            if number >= vocab_size:
                raise ConfigError(
                    f"logit_bias names the id {number}",
                    expected=f"0 to {vocab_size - 1}, the ids of this model",
                )
