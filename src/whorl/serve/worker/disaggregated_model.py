"""Loads a model for disaggregated serving: every process loads the weights, the server only the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from whorl.align.distillation.teacher import check_same_vocabulary
from whorl.engine.config import EngineConfig
from whorl.engine.disaggregation.workers import Role
from whorl.engine.engine import Engine
from whorl.engine.speculation.load import NO_SPECULATION, Speculation
from whorl.errors import ConfigError
from whorl.machine.device_probe import Machine
from whorl.serve.worker.disaggregated import DisaggregatedEngine
from whorl.serve.worker.model_entry import ServedModel
from whorl.serve.worker.model_loading import (
    CACHE_MEMORY_FRACTION,
    AdapterLocation,
    ModelLocation,
    load_generation_model,
    with_adapters,
)
from whorl.tokens.chat import load_chat_template
from whorl.tokens.hf_tokenizer import load_tokenizer


@dataclass(frozen=True)
class ModelEngineFactory:
    """Builds the engine of one process; picklable. Fields as in `load_generation_model`.

    speculation: of the decode processes; a prefill process samples nothing.
    """

    location: ModelLocation
    machine: Machine
    config: EngineConfig
    max_model_len: int | None = None
    cache_bytes: int | None = None
    adapters: tuple[AdapterLocation, ...] = ()
    chat_template: Path | None = None
    speculation: Speculation = NO_SPECULATION

    def load(self, role: Role | None = None) -> tuple[list[ServedModel], Engine]:
        """Return the entries of the model, and an engine: of one role, or for both.

        Raises:
            ConfigError: the draft model has another vocabulary; or as `load_generation_model`.
        """
        draft = self.speculation.draft
        if draft is not None:
            names = self.location.names[0], f"the draft model {draft}"
            check_same_vocabulary(load_tokenizer(self.location.folder), load_tokenizer(draft), names=names)
        return load_generation_model(
            self.location,
            self.machine,
            self.config,
            max_model_len=self.max_model_len,
            cache_bytes=self.cache_bytes,
            adapters=self.adapters,
            chat_template=self.chat_template,
            speculation=self.speculation if role != "prefill" else NO_SPECULATION,
            masked=role is None,
        )

    def __call__(self, role: Role) -> Engine:
        """Return the engine of a process."""
        return self.load(role)[1]


def load_disaggregated_model(
    factory: ModelEngineFactory, n_prefill: int = 1, n_decode: int = 1, *, min_prefill_tokens: int = 128
) -> tuple[list[ServedModel], DisaggregatedEngine]:
    """Start the processes and wait until each has loaded the model; the caller closes the engine.

    Returns one entry for the model and one per adapter, without embeddings, and the engine that runs all of them.

    Args:
        factory: `cache_bytes` is the KV cache of one process; None divides the default among the processes.

    Raises:
        ConfigError: the artifact is no language model, or the model keeps state outside of KV pages.
        CheckpointError, DataError: a file is missing or damaged.
    """
    location, n_prefill, n_decode = factory.location, max(1, n_prefill), max(1, n_decode)
    if location.kind != "model":
        raise ConfigError(
            f"{location.names[0]} is not a language model but an {location.kind}",
            expected="a language model, with --prefill or --decode",
            do="serve it without these options",
        )
    if factory.cache_bytes is None:
        share = CACHE_MEMORY_FRACTION / (n_prefill + n_decode)
        factory = replace(factory, cache_bytes=int(psutil.virtual_memory().available * share))
    tokenizer = load_tokenizer(location.folder)
    engine = DisaggregatedEngine(
        factory, n_prefill, n_decode, min_prefill_tokens=min_prefill_tokens, seed=factory.config.seed
    )
    try:
        engine.wait_until_ready()
    except BaseException:
        engine.close()
        raise
    base = ServedModel(
        name=location.names[0],
        aliases=frozenset(location.names[1:]),
        tokenizer=tokenizer,
        chat_template=load_chat_template(location.folder, tokenizer, factory.chat_template),
        vocab_size=engine.vocab_size,
        max_model_len=engine.max_positions,
    )
    return [base, *with_adapters(base, factory.adapters)], engine
