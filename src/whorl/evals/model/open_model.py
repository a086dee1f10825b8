"""Open what is evaluated: an artifact, a folder, an endpoint, or a system of a model with retrieval, tools and a guard."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from whorl.errors import ConfigError
from whorl.evals.episodes.system_config import SystemConfig, read_system
from whorl.evals.model.model_folder import find_model
from whorl.evals.model.requests import ModelBackend
from whorl.registry import Registry
from whorl.store import user_path

DEFAULT_TIMEOUT = 60.0  # seconds
DEFAULT_CONCURRENCY = 16
BACKENDS = Registry(
    "back end",
    {
        "endpoint": "whorl.evals.model.endpoint_backend:EndpointBackend",
        "engine": "whorl.evals.model.engine_backend:EngineBackend",
        "system": "whorl.evals.episodes.system:SystemBackend",
    },
)


@dataclass(frozen=True)
class ModelOptions:
    """How a model runs.

    Attributes:
        model_name: that requests to an endpoint state. tokenizer: folder of an endpoint's tokenizer; "" sends text.
        dtype, batch_size, batch_invariant: of a local engine; see `EngineBackend.open`.
        max_length: positions of a request at most; None for the model's own.
        store: of artifacts.
        name_option: the option of the command line that gives model_name, for messages.
        timeout: seconds without a byte of an endpoint's answer before the attempt is given up.
        concurrency: requests to an endpoint at once.

    Raises:
        ConfigError: timeout or concurrency is not above 0.
    """

    model_name: str = ""
    tokenizer: str = ""
    dtype: str = "float32"
    batch_size: int = 64
    batch_invariant: bool = False
    max_length: int | None = None
    store: str | None = None
    name_option: str = "--model-name"
    timeout: float = DEFAULT_TIMEOUT
    concurrency: int = DEFAULT_CONCURRENCY

    def __post_init__(self) -> None:
        if not 0 < self.timeout < math.inf:
            raise ConfigError(f"the timeout is {self.timeout}", expected="seconds above 0, such as 60")
        if self.concurrency < 1:
            raise ConfigError(
                f"the concurrency is {self.concurrency}", expected="requests at once, such as 16"
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
    return replace(
        options, model_name=system.model_name or options.model_name,
        timeout=system.timeout or options.timeout, concurrency=system.concurrency or options.concurrency,
    )  # fmt: skip


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
