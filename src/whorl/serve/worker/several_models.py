"""The models of one server: language models under one memory budget, and embedders.

Each language model has its own engine and an equal share of the memory of KV caches; one thread steps all engines
(`engine_group.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psutil

from whorl.align.distillation.teacher import check_same_vocabulary
from whorl.errors import ConfigError
from whorl.serve.worker.disaggregated_model import ModelEngineFactory, load_disaggregated_model
from whorl.serve.worker.engine_group import EngineGroup
from whorl.serve.worker.model_entry import ServedEmbedder, ServedModel
from whorl.serve.worker.model_loading import CACHE_MEMORY_FRACTION, SERVED, ModelLocation, load_embedder
from whorl.store import Store, user_path
from whorl.tokens.hf_tokenizer import load_tokenizer


def find_models(
    refs: Sequence[str], store: str | None, name: str | None = None, single: Sequence[str] = ()
) -> list[ModelLocation]:
    """Return the places of models, language models first.

    Args:
        name: of the first one. single: given options that apply to one language model.

    Raises:
        ConfigError: two models have one name, or there are several language models and an option for one.
        StoreError: no such model.
    """
    places = sorted((ModelLocation(ref, store) for ref in refs), key=lambda place: place.kind != "model")
    n = sum(place.kind == "model" for place in places)
    if n > 1 and single:
        raise ConfigError(
            f"{single[0]} is given with {n} models", expected="one language model", do="start a server for it alone"
        )  # fmt: skip
    if name:
        places[0].names.insert(0, name)
    names = [place.names[0] for place in places]
    if twice := next((each for each in names if names.count(each) > 1), None):
        raise ConfigError(f"two models have the name {twice!r}", expected="models with different names")
    return places


def promoted_name(ref: str, store: str | None) -> str:
    """Return `served/REF` if a model was promoted as REF, else REF."""
    is_artifact = not ref.startswith(SERVED) and not (user_path(ref) / "config.json").is_file()
    return SERVED + ref if is_artifact and SERVED + ref in Store(store).names() else ref


def find_challenger(ref: str, store: str | None, champion: ModelLocation) -> ModelLocation:
    """Return the place of a model that is compared with `champion`; its name is not shown.

    Raises:
        ConfigError: it has another tokenizer, or one of both is no language model. StoreError: no such model.
    """
    place = ModelLocation(ref, store)
    if {place.kind, champion.kind} != {"model"}:
        raise ConfigError(f"--challenger {ref}", expected="two language models")
    names = f"the challenger {place.names[0]}", champion.names[0]
    check_same_vocabulary(load_tokenizer(place.folder), load_tokenizer(champion.folder), names=names)
    place.names = [f"challenger {place.names[0]}"]
    return place


def load_models(
    places: Sequence[ModelLocation], make: ModelEngineFactory, n_prefill: int = 0, n_decode: int = 0
) -> tuple[list[ServedModel | ServedEmbedder], Any]:
    """Return the entries of the models, and the engine that runs all of them; None with embedders alone.

    Args:
        places: as `find_models` returns them.
        make: of the first one. Its `cache_bytes` are those of all models together.
        n_prefill, n_decode: processes of one language model; 0 and 0: none.

    Raises:
        ConfigError, CheckpointError, DataError: as `load_generation_model`.
    """
    entries, engines = list[ServedModel | ServedEmbedder](), dict[str, Any]()
    language = [place for place in places if place.kind == "model"]
    embedders = [place for place in places if place.kind != "model"]
    if n_prefill or n_decode:
        found, disaggregated = load_disaggregated_model(make, n_prefill, n_decode)
        return [*found, *(load_embedder(place, make.machine) for place in embedders)], disaggregated
    memory = make.cache_bytes
    if len(language) > 1:
        memory = memory or int(psutil.virtual_memory().available * CACHE_MEMORY_FRACTION)
        memory //= len(language)
    for place in language:
        found, engines[place.names[0]] = replace(make, location=place, cache_bytes=memory).load()
        entries += [replace(each, engine=place.names[0]) for each in found]
    entries += [load_embedder(place, make.machine) for place in embedders]
    return entries, EngineGroup(engines) if len(engines) > 1 else next(iter(engines.values()), None)
