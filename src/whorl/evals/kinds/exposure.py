"""The kind `exposure`: does a model continue its own text as it continues real text?

    data_nats    - mean log p(x_t  | x_<t )        x:  the real continuation of the prompt
    self_nats    - mean log p(x^_t | x^_<t)        x^: the model's sample after the same prompt, at temperature 1
    gap          self_nats - data_nats
    drift        the gap at the last EDGE positions - the gap at the first

A model that were the source of its data would have a gap of 0 at every position. A gap below 0 means that samples are more
predictable than text, as in repetition; above 0, that they are less. A gap that grows with the position comes from the
model's own earlier tokens: exposure bias (Ranzato et al. 2016, arXiv:1511.06732; whether it accumulates is disputed: He et
al. 2021, arXiv:1905.10617).

The subtle point is the tokenization. A sampled text may have other ids than it was sampled with, so both texts are scored
as texts. Both are cut to `generation.max_tokens` positions. A sample that ends early has no drift.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from whorl.evals.kinds.kind import Answered, Kind, Metric, Round, Steps
from whorl.evals.model.requests import Completion, Score, ScoreRequest
from whorl.evals.results import ItemResult

EDGE = 16  # positions
METRICS = {
    "gap": Metric("nats per token of own samples, minus those of real text", "nats", None, None, None),
    "drift": Metric("growth of the gap with the position", "nats", None, None, None),
    "data_nats": Metric("nats per token of real text", "nats", False, 0.0, None),
    "self_nats": Metric("nats per token of own samples", "nats", None, 0.0, None),
}


class ExposureOptions(BaseModel):
    """Settings of the kind `exposure`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    continuation: str = Field(description="template of the real text after the prompt")


class Exposure(Kind):
    """See the top of this file."""

    Options = ExposureOptions
    metrics = METRICS

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        self._continuation = self.add_template("options.continuation", self.options.continuation)

    def steps(self, item: Any) -> Steps:
        """See `Kind`: one round samples, the next scores both texts."""
        prompt = self.prompt(item)
        sampled = yield Round([self.generate_request(item, prompt, temperature=1.0)])
        if not isinstance(sampled[0], Completion) or not sampled[0].text:
            return Answered(item, tuple(sampled))
        texts = (self._continuation(item.variables, item.id), sampled[0].text)
        scores = yield Round([ScoreRequest(prompt, text) for text in texts])
        return Answered(item, (*sampled, *scores))

    def score_item(self, answered: Answered) -> ItemResult:
        """See `Kind`."""
        if answered.missing is not None:
            return self.missing(answered, answered.missing.reason)
        n = self.config.generation.max_tokens
        sample = answered.responses[0]
        texts = [
            [-p for p in score.log_probs[:n]] for score in answered.responses if isinstance(score, Score)
        ]
        if not isinstance(sample, Completion) or len(texts) < 2 or not all(texts):
            return self.result(answered, {}, "not_found", "the sample is empty")
        data, own = texts
        means = {"data_nats": sum(data) / len(data), "self_nats": sum(own) / len(own)}
        found = {"gap": means["self_nats"] - means["data_nats"], **means}
        if min(len(data), len(own)) == n >= 2 * EDGE:
            gaps = [b - a for a, b in zip(data, own, strict=True)]
            found["drift"] = (sum(gaps[-EDGE:]) - sum(gaps[:EDGE])) / EDGE
        real = self._continuation(answered.item.variables, answered.item.id)
        return self.result(answered, found, "scored", answers=(sample.text,), gold=real)
