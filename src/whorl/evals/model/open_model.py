"""Open what is evaluated: an artifact, a folder, an endpoint, or a system of a model with retrieval, tools and a guard."""

from __future__ import annotations

from pathlib import Path

from whorl.errors import ConfigError
from whorl.evals.episodes.system_config import SystemConfig, read_system
from whorl.evals.model.model_folder import find_model
from whorl.evals.model.options import ModelOptions
from whorl.evals.model.requests import ModelBackend
from whorl.registry import Registry
from whorl.store import user_path

BACKENDS = Registry(
    "back end",
    {
        "endpoint": "whorl.evals.model.endpoint_backend:EndpointBackend",
        "engine": "whorl.evals.model.engine_backend:EngineBackend",
        "system": "whorl.evals.episodes.system:SystemBackend",
    },
)


def is_url(ref: str) -> bool:
    """Return whether a model is an endpoint."""
    return ref.startswith(("http://", "https://"))


def check_model(ref: str, options: ModelOptions) -> None:
    """Check that a model exists, without loading it: before the work on another one. Raises: as `open_backend`."""
    if ref.endswith(".toml"):
        system = read_system(Path(ref))
        check_model(system.model, _of_system(options, system))
    elif is_url(ref):
        _check_named(ref, options)
    elif not (user_path(ref) / "config.json").is_file():
        find_model(ref, options.store)


def _of_system(options: ModelOptions, system: SystemConfig) -> ModelOptions:
    """Return the options of a system's model: what its file states goes before the command line."""
    stated = system.model_dump(include={"model_name", "timeout", "concurrency"})
    return options.model_copy(update={name: value for name, value in stated.items() if value})


def _check_named(ref: str, options: ModelOptions) -> None:
    if not options.model_name:
        raise ConfigError(
            f"{ref} is an endpoint", expected="the name of its model",
            do=f"give {options.name_option}; GET /models lists them",
        )  # fmt: skip


def open_backend(ref: str, options: ModelOptions) -> ModelBackend:
    """Return the back end of a model.

    Args:
        ref: name or address of an artifact, path of a folder with config.json, URL of an OpenAI-compatible API, or the
            TOML file of a system (`evals/episodes/system_config.py`).

    Raises:
        StoreError, ConfigError: no such model. CheckpointError, DataError: damaged files.
    """
    if ref.endswith(".toml"):
        system = read_system(Path(ref))
        inner = open_backend(system.model, _of_system(options, system))
        found: ModelBackend = BACKENDS.get("system")(inner, system)
        return found
    if is_url(ref):
        _check_named(ref, options)
        made: ModelBackend = BACKENDS.get("endpoint").open(
            ref, options.model_name, tokenizer=options.tokenizer or None, max_length=options.max_length,
            concurrency=options.concurrency, timeout=options.timeout,
        )  # fmt: skip
        return made
    local: ModelBackend = BACKENDS.get("engine").open(
        ref, store=options.store, dtype=options.dtype, batch_size=options.batch_size, max_length=options.max_length,
        batch_invariant=options.batch_invariant,
    )  # fmt: skip
    return local
