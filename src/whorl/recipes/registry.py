"""The step decorator and the registry of steps.

A step is a function of its parents and its configuration; it writes files into a folder:

    @step("tokens", config=TokensConfig, parents={"documents": "documents", "tokenizer": "tokenizer"})
    def tokens(ctx: StepContext, config: TokensConfig) -> None:
        '''Encode every split into memory-mapped shards.'''
        tokenizer = Tokenizer.load(ctx.parents["tokenizer"].path)
        ...

The function name is the name in recipes (`uses = "tokens"`). A new step is one such function in a module below
`recipes/steps/`; it is found without registration elsewhere. Every `whorl run` imports these modules, so import torch
inside the function.

Raise `version` when the same parents and configuration give another result. Old artifacts then have another address.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from whorl.report.blocks import StepReport
from whorl.store import Artifact, Store
from whorl.tracking.progress import Progress
from whorl.tracking.run import Run

if TYPE_CHECKING:
    from whorl.machine.device_probe import Machine

Config = TypeVar("Config", bound=BaseModel)
ANY_ROLE = "*"
ANY_PARENTS = {ANY_ROLE: "*"}  # parents of a step that takes artifacts of any kind, under any roles


@dataclass
class StepContext:
    """The inputs and outputs of a running step.

    Attributes:
        name: name of the step in the recipe.
        out: empty folder that becomes the artifact.
        scratch: folder that survives a crash, for checkpoints.
        parents: role -> artifact; an optional role may be absent.
        summary: figures for the manifest; `summary["headline"]` is shown in the log line of the step.
        report: blocks and headline figures for the page of the run; written as `report.json` when the step ends.
        deterministic: the step's setting of this name: no measurement decides a bit (`train/determinism.py`).
    """

    name: str
    out: Path
    scratch: Path
    parents: Mapping[str, Artifact]
    run: Run
    progress: Progress
    store: Store
    summary: dict[str, Any] = field(default_factory=dict)
    report: StepReport = field(default_factory=StepReport)
    deterministic: bool = False

    def parent_folder(self, role: str) -> Path:
        """Return the folder of a parent, with its files checked."""
        self.parents[role].check()
        return self.parents[role].path

    @property
    def heartbeat_dir(self) -> Path:
        """Where a training step writes its heartbeat, and stack traces after a stall."""
        return self.run.dir / "watch" / self.name

    @cached_property
    def machine(self) -> Machine:
        """The device properties, measured or from the cache; in a continued step, those with which it began."""
        from whorl.machine.device_probe import Machine, probe
        from whorl.machine.kernel_choice import choose_once
        from whorl.machine.native_build import finish_builds

        finish_builds()
        now = probe()
        if self.deterministic:
            now = now.without_measured_choices()
        begun = Machine(**choose_once("machine", now.to_json))
        if begun.choice == now.choice:
            return now
        if begun.device != now.device:
            self.progress.log(
                f"    began on {begun.device}, continues on {now.device}: other bits than of one run"
            )
            return now
        self.progress.log(f"    continues with {begun.dtype} and {begun.threads} threads, as it began")
        return begun


@dataclass(frozen=True)
class StepKind:
    """A registered step.

    Attributes:
        output_kind: kind of the artifact.
        parents: role -> kind of artifact; a role that ends in "?" is optional. {"*": "*"} takes any roles of any kinds.
        complete_config: completes a configuration before the address is computed; gets the store, too.
        not_hashed: fields that do not affect the result and are not part of the address, so that an interrupted step can
            continue with other values.
        find_parents: returns further parents that the store has, from those of the recipe.
    """

    name: str
    output_kind: str
    config: type[BaseModel]
    parents: Mapping[str, str]
    version: int
    about: str
    function: Callable[[StepContext, Any], None]
    complete_config: Callable[[Any, Store], BaseModel] | None
    not_hashed: frozenset[str] = frozenset()
    find_parents: Callable[[Mapping[str, Artifact], Store], dict[str, Artifact]] | None = None

    def parent_roles(self) -> dict[str, tuple[str, bool]]:
        """Return role -> (kind, whether it is optional)."""
        return {role.rstrip("?"): (kind, role.endswith("?")) for role, kind in self.parents.items()}


_registered: dict[str, StepKind] = {}


def step(
    output_kind: str,
    *,
    config: type[Config],
    parents: Mapping[str, str] | None = None,
    version: int = 1,
    complete_config: Callable[[Config, Store], Config] | None = None,
    not_hashed: Collection[str] = (),
    find_parents: Callable[[Mapping[str, Artifact], Store], dict[str, Artifact]] | None = None,
) -> Callable[[Callable[[StepContext, Config], None]], Callable[[StepContext, Config], None]]:
    """Register the decorated function as a step; the first line of its docstring is its help text."""

    def register(function: Callable[[StepContext, Config], None]) -> Callable[[StepContext, Config], None]:
        name = function.__name__
        about = (function.__doc__ or "").strip().splitlines()[0]
        other = _registered.get(name)
        if other is not None and other.function.__module__ != function.__module__:
            raise ValueError(f"two steps have the name {name!r}")
        _registered[name] = StepKind(
            name, output_kind, config, dict(parents or {}), version, about, function, complete_config,
            frozenset(not_hashed), find_parents,
        )  # fmt: skip
        return function

    return register


def is_deterministic(config: BaseModel) -> bool:
    """Return the setting `deterministic` of a step, or of its `train`; False without one."""
    train = getattr(config, "train", None)
    return bool(getattr(config, "deterministic", False) or getattr(train, "deterministic", False))


def deterministic_replicas(config: BaseModel) -> int | str:
    """Return the replicas of a deterministic step; by default they follow from the usable cores, or a launcher's ranks."""
    from whorl.machine.device_probe import usable_cores

    given = getattr(config, "layout", None) or getattr(getattr(config, "run", None), "replicas", None)
    groups = sys.modules.get("whorl.parallel.process_group")  # imports torch; a launcher's ranks have it
    return (
        given
        or f"at most one for each of {groups.cores_for_replicas(True) if groups else usable_cores()} cores"
    )


def step_kinds() -> Mapping[str, StepKind]:
    """Return name -> step for every step of the package."""
    from whorl.recipes import steps

    for module in pkgutil.walk_packages(steps.__path__, f"{steps.__name__}."):
        importlib.import_module(module.name)
    return _registered


def start_native_builds(first: str, steps: Mapping[str, BaseModel]) -> None:
    """Compile native code for training and sampling during the steps before them, which leave cores idle.

    Args:
        first: kind of the step that begins. steps: kind -> configuration of all steps.
    """
    if first not in ("ingest", "curate", "tasks") or not {"plan", "pretrain"} & steps.keys():
        return
    import torch  # as the later steps do

    from whorl.engine.cpu.build import SOURCE
    from whorl.machine.device_probe import usable_cores
    from whorl.machine.identity import cpu_identity
    from whorl.machine.native_build import start_builds
    from whorl.nn.cpu.library import sources

    usual = "bfloat16" if any("bf16" in flag for flag in cpu_identity().flags) else "float32"
    dtype = os.environ.get("WHORL_DTYPE") or usual
    is_torch = torch.cuda.is_available() or any(map(is_deterministic, steps.values()))
    training = [] if is_torch or dtype not in ("bfloat16", "float32") else sources(getattr(torch, dtype))
    # The engine's takes longer than all others together, and is needed after training.
    engine = [(SOURCE, ())] if "pretrain" in steps else []
    if usable_cores() < usable_cores(quota=False):  # an idle core outside of a container's quota is not free
        start_builds([*engine, *training])
    else:
        start_builds(training, later=engine)
