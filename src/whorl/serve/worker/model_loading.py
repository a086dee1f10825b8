"""Loads a model for serving: weights, tokenizer, chat template, engine.

A model is an artifact of the store or a folder in the format of `transformers`. The KV cache gets the requested memory, or
a quarter of the free memory, and never more than all sequences at full length can use.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from whorl.embedding.embedder import Embedder, embedding_pieces
from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.load import load_for_sampling
from whorl.engine.speculation.load import NO_SPECULATION, Speculation, make_proposer
from whorl.errors import ConfigError
from whorl.evals.model.sampling import open_engine
from whorl.machine.device_probe import Machine
from whorl.models.exchange.safetensors_io import read_json
from whorl.models.lora import ADAPTER, CONFIG_FILE, load_lora
from whorl.serve.worker.model_entry import ServedEmbedder, ServedModel, ServedWeights, mean_pooled_embedding
from whorl.store import Store, user_path
from whorl.tokens.token_encoder import TokenEncoder
from whorl.tokens.tokenizer import TOKENIZER_FILE, Tokenizer

SERVED = "served/"  # names of the store that promotion moves
CACHE_MEMORY_FRACTION = 0.25  # of the free memory


class AdapterLocation(NamedTuple):
    """A LoRA adapter: its names, the displayed one first, its folder, and the address of its artifact."""

    names: tuple[str, ...]
    folder: Path
    address: str = ""


class ModelLocation:
    """The folder of a model, its kind ("model" or "embedder") and its names, the displayed name first.

    address: of an artifact, else "".

    Raises:
        ConfigError: the artifact is neither a model nor an embedder.
    """

    def __init__(self, ref: str, store: str | None, name: str | None = None) -> None:
        folder, self.store, self.address = user_path(ref), store, ""
        if (folder / "config.json").is_file():
            self.folder, self.kind = folder, "model"
            names = [folder.resolve().name, ref]
        else:
            artifact = Store(store).open(ref)
            if artifact.kind not in ("model", "embedder"):
                raise ConfigError(
                    f"{artifact.name} is of the kind {artifact.kind}",
                    expected="a model or an embedder",
                    do="list artifacts with `whorl ls`",
                )
            artifact.check()
            self.folder, self.kind, self.address = artifact.path, artifact.kind, artifact.address
            names = [artifact.name, artifact.name.rpartition("/")[2], ref]
            if ref.startswith(SERVED):  # the artifact behind it changes
                name_of_api = ref.removeprefix(SERVED)
                names = [name_of_api, name_of_api.rpartition("/")[2], ref]
        self.names = list(dict.fromkeys(([name] if name else []) + names))

    def adapter(self, text: str) -> AdapterLocation:
        """Return the adapter of an option: NAME=FOLDER, NAME=ARTIFACT or ARTIFACT.

        Raises:
            ConfigError: no name, one that is taken, or an artifact without an adapter, of another base model or vocabulary.
            StoreError: no such artifact.
        """
        name, equals, ref = text.rpartition("=")
        folder, names, address = user_path(ref or " "), [name], ""
        if ref and not folder.is_dir():
            artifact = Store(self.store).open(ref)
            artifact.check()
            address = artifact.address
            folder, names = artifact.path / ADAPTER, [artifact.name, artifact.name.rpartition("/")[2], ref]
            if not folder.is_dir():
                raise ConfigError(
                    f"--adapter {text}: {artifact.name} has no adapter", expected="a step with model.lora.merge = false",
                    do=f"serve the model itself: whorl serve {artifact.name}",
                )  # fmt: skip
            base, own = read_json(folder / CONFIG_FILE).get("base_model_name_or_path"), self.folder.resolve()
            if own != artifact.path and ((own / ADAPTER).is_dir() or own.name != base):
                raise ConfigError(
                    f"--adapter {text}: it was trained on {base}, and {self.names[0]} is another model",
                    expected="its base model", do=f"serve that, or the copy that lies next to the adapter: {artifact.path}",
                )  # fmt: skip
            if _added_tokens(own) != _added_tokens(artifact.path):
                raise ConfigError(
                    f"--adapter {text}: its chat format has tokens that {self.names[0]} lacks",
                    expected="a base model whose vocabulary has them",
                    do=f"serve {artifact.name}, whose folder has the tokens and the base model",
                )  # fmt: skip
        names = [name] if equals else names
        if not ref or not names[0] or names[0] in self.names:
            raise ConfigError(
                f"--adapter {text}", expected="NAME=FOLDER, or NAME=ARTIFACT; the name must be unique"
            )
        return AdapterLocation(tuple(dict.fromkeys(names)), folder, address)


def _added_tokens(folder: Path) -> Any:
    return read_json(folder / TOKENIZER_FILE).get("added_tokens")


def load_generation_model(
    location: ModelLocation,
    machine: Machine,
    config: EngineConfig,
    *,
    max_model_len: int | None = None,
    cache_bytes: int | None = None,
    adapters: Sequence[AdapterLocation] = (),
    chat_template: Path | None = None,
    speculation: Speculation = NO_SPECULATION,
    masked: bool = True,
    **engine_kwargs: Any,
) -> tuple[list[ServedModel], Engine]:
    """Load a language model. Returns one entry for it and one per adapter, and the engine that runs all of them.

    Args:
        max_model_len: positions per sequence; by default the length that the model declares. More gives a warning.
        cache_bytes: size of the KV cache; by default a share of the free memory.
        chat_template: a file that replaces the model's template.
        speculation: what drafts tokens.
        masked: as of `load_model`.
        engine_kwargs: further arguments of `Engine`.

    Raises:
        CheckpointError, DataError: a file is missing or damaged. ConfigError: a size is impossible.
    """
    encoder = TokenEncoder.load(location.folder, chat_template=chat_template)  # a wrong file is found first
    rows = min(8, config.max_num_seqs)
    whole = not any(adapter.folder == location.folder / ADAPTER for adapter in adapters)
    model = load_for_sampling(location.folder, machine, rows, masked=masked, with_adapter=whole)
    draft = speculation.load_draft(model, machine, rows)
    gc.collect()
    bound = model.declared_length
    if max_model_len is not None:
        if model.max_positions is not None and max_model_len > model.max_positions:
            raise ConfigError(
                f"--max-model-len is {max_model_len:,}",
                expected=f"at most {model.max_positions:,}, the model's limit",
            )
        bound = max_model_len
    each = (model.kv_bytes_per_token() or 1) + (draft.kv_bytes_per_token() if draft is not None else 0)
    memory = cache_bytes or int(psutil.virtual_memory().available * CACHE_MEMORY_FRACTION)
    tokens = min(config.max_num_seqs * bound, memory // each)
    if tokens < config.block_size:
        raise ConfigError(
            f"the KV cache would hold {tokens:,} positions of {each:,} bytes",
            expected=f"at least one page of {config.block_size}",
            do="increase --kv-cache-memory",
        )
    sizes = config.model_copy(update={"max_model_len": bound, "kv_cache_tokens": tokens})
    banned = encoder.banned_ids(model.config.vocab_size)
    proposer = make_proposer(speculation, location.folder, model, draft, sizes, banned)
    engine = open_engine(
        model, sizes, encoder, grammar_ends=encoder.stop_ids, proposer=proposer, **engine_kwargs
    )

    base = replace(served_model(location.names, encoder, engine), weights=ServedWeights(location.address))
    for adapter in adapters:
        engine.adapters.add(adapter.names[0], load_lora(adapter.folder, model))
    return [base, *with_adapters(base, adapters)], engine


def with_adapters(base: ServedModel, adapters: Sequence[AdapterLocation]) -> list[ServedModel]:
    """Return the API's entry for each adapter of a model."""
    return [
        replace(
            base, name=name, aliases=frozenset(more), adapter=name, embed=None, weights=ServedWeights(address)
        )
        for (name, *more), _, address in adapters
    ]


def served_model(names: Sequence[str], encoder: TokenEncoder, engine: Engine) -> ServedModel:
    """Return the API's entry for an engine's model."""
    return ServedModel(
        name=names[0],
        aliases=frozenset(names[1:]),
        tokenizer=encoder.tokenizer,
        chat_template=encoder.chat,
        vocab_size=engine.model.config.vocab_size,
        max_model_len=engine.max_positions,
        heals=engine.model.config.masked is None,
        embed=lambda ids: mean_pooled_embedding(engine.model, ids),
    )


def load_embedder(location: ModelLocation, machine: Machine) -> ServedEmbedder:
    """Load a Whorl sentence embedder.

    Raises:
        CheckpointError, DataError: a file is missing or damaged.
    """
    embedder = Embedder.load(location.folder, Tokenizer.load(location.folder), machine.device)
    tokenizer = embedder.tokenizer

    def embed(ids: Sequence[int]) -> Generator[None, None, list[float]]:
        pieces = embedding_pieces(embedder.encoder, [np.asarray(ids, tokenizer.dtype)], batch_size=1)
        found: list[float] = (yield from pieces)[0].tolist()
        return found

    return ServedEmbedder(
        location.names[0], tokenizer, embedder.max_seq_length, embed, frozenset(location.names[1:])
    )
