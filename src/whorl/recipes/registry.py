"""What a step is, and the register of them.

A step is one function of its parents and its configuration, that writes files into a folder:

    @step("tokens", config=TokensConfig, parents={"documents": "documents", "tokenizer": "tokenizer"})
    def tokens(ctx: StepContext, config: TokensConfig) -> None:
        '''Encode every split into memory-mapped shards.'''
        tokenizer = Tokenizer.load(ctx.parents["tokenizer"].path)
        ...

Its name in recipes (`uses = "tokens"`) is the function's name. Adding a step to the house is one such
function in a module of `recipes/steps/`, where it is found by itself. Those modules are imported for every
`whorl run`, also when all is looked up: import torch and the like inside the function.

Raise `version` whenever the same parents and configuration would give another result: then old artifacts
are no longer found, and nothing stale is used.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from whorl.store import Artifact, Store
from whorl.tracking.progress import Progress
from whorl.tracking.run import Run

if TYPE_CHECKING:
    from whorl.machine.device_probe import Machine

Config = TypeVar("Config", bound=BaseModel)


@dataclass
class StepContext:
    """What a step may use.

    Attributes:
        name: the step's name in the recipe.
        out: the empty folder that becomes the artifact.
        scratch: a folder that survives a crash; what a resumed step finds there is its own.
        parents: role -> artifact; an optional role may be absent.
        summary: figures for the manifest; `summary["headline"]` is shown on the step's line.
    """

    name: str
    out: Path
    scratch: Path
    parents: Mapping[str, Artifact]
    run: Run
    progress: Progress
    store: Store
    summary: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def machine(self) -> Machine:
        """The machine, measured (or its cached measurement)."""
        from whorl.machine.device_probe import probe

        return probe()


@dataclass(frozen=True)
class StepKind:
    """A step as registered.

    Attributes:
        makes: the kind of artifact.
        parents: role -> kind of artifact; a role that ends in "?" may be left out.
        resolve: completes a configuration before the address is taken from it.
        unseen: fields that decide nothing of what is made; the address does not cover them, so an interrupted step goes on
            under another value.
    """

    name: str
    output_kind: str
    config: type[BaseModel]
    parents: Mapping[str, str]
    version: int
    about: str
    function: Callable[[StepContext, Any], None]
    complete_config: Callable[[Any], BaseModel] | None
    not_hashed: frozenset[str] = frozenset()

    def parent_roles(self) -> dict[str, tuple[str, bool]]:
        """Role -> (kind, whether it may be left out)."""
        return {role.rstrip("?"): (kind, role.endswith("?")) for role, kind in self.parents.items()}


_registered: dict[str, StepKind] = {}


def step(
    output_kind: str,
    *,
    config: type[Config],
    parents: Mapping[str, str] | None = None,
    version: int = 1,
    complete_config: Callable[[Config], Config] | None = None,
    not_hashed: Collection[str] = (),
) -> Callable[[Callable[[StepContext, Config], None]], Callable[[StepContext, Config], None]]:
    """Register the decorated function as a step; see the file's opening. Its docstring's first line is its
    help.
    """

    def register(function: Callable[[StepContext, Config], None]) -> Callable[[StepContext, Config], None]:
        name = function.__name__
        about = (function.__doc__ or "").strip().splitlines()[0]
        known = _registered.get(name)
        if known is not None and known.function.__module__ != function.__module__:
            raise ValueError(f"two steps are called {name!r}")
        _registered[name] = StepKind(
            name,
            output_kind,
            config,
            dict(parents or {}),
            version,
            about,
            function,
            complete_config,
            frozenset(not_hashed),
        )
        return function

    return register


def step_kinds() -> Mapping[str, StepKind]:
    """Every step of the house, by name."""
    from whorl.recipes import steps

    for module in pkgutil.walk_packages(steps.__path__, f"{steps.__name__}."):
        importlib.import_module(module.name)
    return _registered
