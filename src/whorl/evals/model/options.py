"""Options of `whorl eval`: how a model runs, and how items are sent to it. Importable without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

DEFAULT_TIMEOUT = 60.0  # seconds
Dtype = Literal["float32", "bfloat16"]


class ModelOptions(BaseModel):
    """Options of an endpoint, and of a local engine (`EngineBackend.open`).

    store: of artifacts. name_option: the option of the command line that gives `model_name`, for messages.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_name: str = Field(default="", description="with a URL: the model that requests state")
    tokenizer: str = Field(
        default="", description="with a URL: the model's tokenizer, to score by ids",
        json_schema_extra={"metavar": "FOLDER"},
    )  # fmt: skip
    timeout: float = Field(
        default=DEFAULT_TIMEOUT, gt=0, allow_inf_nan=False,
        description="with a URL: seconds without a byte before an attempt is given up. It is retried 4 times",
    )  # fmt: skip
    concurrency: int = Field(
        default=16, ge=1,
        description="with a URL: requests at once. More load a server better, until they time out",
    )  # fmt: skip
    dtype: Dtype = Field(default="float32", description="type of the weights")
    batch_size: int = Field(default=64, ge=1, description="requests that run at once")
    batch_invariant: bool = Field(default=False, description="scores equal to the bit for any batch")
    max_length: int | None = Field(default=None, ge=2, description="positions of a request at most")
    store: str | None = None
    name_option: str = "--model-name"


class SampleSettings(BaseModel):
    """How items are sent, and samples of an answer. None or empty keeps the setting of the task."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_fewshot: int | None = Field(
        default=None, ge=0, description="few-shot examples of each item, drawn from --train or the task's own records"
    )  # fmt: skip
    apply_chat_template: bool = Field(
        default=False,
        description="send prompt, few-shot examples and answers as messages, with the model's chat template",
    )
    gen_kwargs: str = Field(
        default="", description="settings of generated answers: temperature=0.7,top_p=0.9; also top_k, max_gen_toks, until, "
        "do_sample, seed", json_schema_extra={"metavar": "NAME=VALUE,..."},
    )  # fmt: skip
    samples: str = Field(
        default="", description="samples per item, and curves of votes and best of N over them",
        json_schema_extra={"metavar": "N,N,..."},
    )  # fmt: skip
    budgets: str = Field(
        default="", description="thinking is cut at, and continued to, so many tokens",
        json_schema_extra={"metavar": "N,N,..."},
    )  # fmt: skip
    reward: str = Field(
        default="", description="a reward model, for best of N of --samples", json_schema_extra={"metavar": "ARTIFACT"}
    )  # fmt: skip
    answer_marker: str = Field(default="#### ", description="with --budgets: text before an answer")
    continuation_text: str = Field(
        default="Wait, ", description="with --budgets: text that replaces an early end of thinking"
    )
    seed: int = Field(default=0, ge=0, description="seed of generated items and of samples")
