"""The kind `likelihood`: how probable is a text, or the rest of a text?

Without `continuation` the rendered template is the text. It is scored in windows with a stride, each token once
(`model/windows.py`). With nats = - sum of log p(token | tokens before):

    bits_per_byte        nats / ln 2 / bytes of UTF-8              independent of the tokenizer
    bits_per_character   nats / ln 2 / characters
    perplexity           exp(nats / tokens)                        compares models of one tokenizer
    word_perplexity      exp(nats / words)                         words: parts between white space
    byte_perplexity      exp(nats / bytes)

Each is a ratio of sums over items: an item counts by its bytes, characters, tokens or words.

With `continuation`, a template, that text is scored after the prompt, as in LAMBADA (arXiv:1606.06031):

    acc                  every token of the continuation is the most likely one
    item_perplexity      exp(mean over items of the continuation's nats)
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from whorl.errors import ConfigError, DataError
from whorl.evals.kinds.kind import Answered, Kind, Metric
from whorl.evals.model.requests import Request, Score, ScoreRequest, TextRequest
from whorl.evals.results import ItemResult

TEXT_METRICS = {
    "bits_per_byte": Metric("bits per byte of UTF-8", "bits", False, 0.0, None),
    "bits_per_character": Metric("bits per character", "bits", False, 0.0, None),
    "perplexity": Metric("per token", "", False, 0.0, None, "exp"),
    "word_perplexity": Metric("per word", "", False, 0.0, None, "exp"),
    "byte_perplexity": Metric("per byte", "", False, 0.0, None, "exp"),
}


class LikelihoodOptions(BaseModel):
    """Settings of the kind `likelihood`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    continuation: str = Field(
        default="",
        description="template of the text that is scored after the prompt; default: the whole text",
    )
    window: int = Field(default=0, ge=0, description="tokens of context at most; 0: that of the model")
    stride: int = Field(default=0, ge=0, description="tokens between windows; 0: half of the window")
    score_bos: bool = Field(
        default=False,
        description="score a bos that the tokenizer adds, after another one, as lm-evaluation-harness",
    )


class TextLikelihood(Kind):
    """See the top of this file."""

    Options = LikelihoodOptions

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        self.metrics = dict(TEXT_METRICS)
        self.default_metrics = ("bits_per_byte", "bits_per_character", "perplexity")
        source = self.options.continuation
        self._continuation = self.add_template("options.continuation", source)
        if source:
            self.metrics = {
                "acc": Metric("share of items whose continuation is the most likely one"),
                "item_perplexity": Metric("per item", "", False, 0.0, None, "exp"),
                **self.metrics,
            }
            self.default_metrics = ("acc", "item_perplexity", "bits_per_byte")
        elif self.config.chat or self.config.num_fewshot:
            raise ConfigError(
                f"task {self.config.name} scores whole texts", expected="no few-shot examples and no chat template",
                do="leave out --num-fewshot and --apply-chat-template for it",
            )  # fmt: skip

    def target(self, item: Any) -> str:
        """Return the scored text."""
        template = self.template if self._continuation is None else self._continuation
        text: str = template(item.variables, item.id)
        return text

    def example_answer(self, item: Any) -> str:
        """See `Kind`: by default the continuation."""
        if self._example_answer is None and self._continuation is not None:
            return self.target(item)
        return super().example_answer(item)

    def check(self, item: Any) -> None:
        """Raises DataError: the scored text is empty."""
        if not self.target(item):
            raise DataError(
                f"task {self.config.name}, item {item.id!r}: the scored text is empty",
                expected="at least one character", do="remove the record, or keep others with data.where",
            )  # fmt: skip

    def requests(self, item: Any) -> Sequence[Request]:
        """See `Kind`."""
        if self._continuation is None:
            return [
                TextRequest(
                    self.target(item), self.options.window, self.options.stride, self.options.score_bos
                )
            ]
        return [ScoreRequest(self.prompt(item), self.target(item))]

    def score_item(self, answered: Answered) -> ItemResult:
        """See `Kind`."""
        score = answered.responses[0]
        text = self.target(answered.item)
        if not isinstance(score, Score):
            return self.missing(answered, answered.missing.reason if answered.missing else "no score")
        nats = -score.total
        sizes = {
            "bits_per_byte": len(text.encode("utf-8", "replace")),
            "bits_per_character": len(text),
            "perplexity": len(score.ids),
            "word_perplexity": len(re.split(r"\s+", text)),
            "byte_perplexity": len(text.encode("utf-8", "replace")),
        }
        unit = {"bits_per_byte": math.log(2), "bits_per_character": math.log(2)}
        scores = {name: nats / size / unit.get(name, 1.0) for name, size in sizes.items()}
        weights = {name: float(size) for name, size in sizes.items()}
        details = {
            "token_ids": list(score.ids), "log_probs": [round(p, 4) for p in score.log_probs], "n_cut": score.n_cut,
        }  # fmt: skip
        if tokens := self.tokens(score):
            details["tokens"] = tokens
        if self._continuation is None:
            return self.result(answered, scores, "scored", weights=weights, details=details)
        scores = {"acc": float(score.greedy), "item_perplexity": nats, **scores}
        reason = "" if score.greedy else f"probability {math.exp(-nats):.3g}, and another text is more likely"
        return self.result(
            answered, scores, "right" if score.greedy else "wrong", reason, gold=text, weights=weights, details=details
        )  # fmt: skip
