"""Models that a recipe is given: `from = "quickstart/pretrain"` of a step, and `whorl run --from MODEL`.

    [steps.sft]
    from = "quickstart/pretrain"    # in the role `model`: an artifact, or a folder in the format of transformers
    from = ""                       # a run needs --from MODEL
    from = "logged"                 # the model that made the newest completion of the event log
    from = { reward = "rl/lake" }   # in another role of the step

`--from` puts a model in the place of the first step that makes one from no other model. That step is left out, with those
before it that nothing else needs. A folder is imported by a step of the recipe. An artifact keeps its lineage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from whorl.errors import ConfigError, NotApplicableError
from whorl.recipes.registry import ANY_ROLE, StepKind
from whorl.store.address import user_path

if TYPE_CHECKING:
    from whorl.recipes.recipe import RecipeStep
    from whorl.store import Artifact, Store

FROM, LOGGED = "from", "logged"
GIVEN_KINDS = ("model", "demonstrations", "agents")
A_MODEL = "an artifact such as quickstart/pretrain, or a folder in the format of transformers"


def model_role(kind: StepKind) -> str:
    """Return the role that `from` fills, "" if a step has none."""
    roles = [role for role, (made, _) in kind.parent_roles().items() if made in GIVEN_KINDS]
    return "model" if "model" in roles else next(iter(roles), "")


def give_model(tables: dict[str, Any], kinds: Mapping[str, StepKind], ref: str) -> None:
    """Put a model in the place of `from`, or of the step that makes the first model; changes `tables`.

    Raises:
        ConfigError: no step takes a model.
    """
    takers = [step for step, table in tables.items() if FROM in table]
    for step in takers:
        tables[step][FROM] = ref
    if takers:
        return
    first = next(
        (s for s, kind in kinds.items() if kind.output_kind == "model" and not model_role(kind)), None
    )
    if first is None:
        raise ConfigError(f"--from {ref}: no step of this recipe makes or takes a first model")
    removed = {first}
    parents = {step: _parent_names(table) for step, table in tables.items()}
    pending = [*parents[first]]
    while pending:
        step = pending.pop()
        users = [
            s for s in tables if step in parents[s] and s not in removed and ANY_ROLE not in kinds[s].parents
        ]
        if step in tables and not users:
            removed.add(step)
            pending += parents[step]
    for step in removed:
        del tables[step]
    for step, table in tables.items():
        given = table.get("parents", [])
        if isinstance(given, dict):
            table["parents"] = {role: name for role, name in given.items() if name not in removed}
        elif isinstance(given, list):
            table["parents"] = [name for name in given if name not in removed]
        if first in parents[step] and model_role(kinds[step]):
            table[FROM] = ref


def given_artifacts(steps: Mapping[str, RecipeStep]) -> dict[str, str]:
    """Return the parents that no step makes: reference -> kind of artifact that is needed."""
    needed = [
        (ref, step.kind.parent_roles().get(role))
        for step in steps.values()
        for role, ref in step.parents.items()
    ]
    return {ref: role[0] for ref, role in needed if ref not in steps and role is not None}


def logged_model(steps: Mapping[str, RecipeStep], store: Store) -> Artifact:
    """Return the model that made the newest completion of the log that the recipe reads.

    Raises:
        NotApplicableError: the log has no completion. StoreError: the store does not have it.
    """
    from whorl.log import default_log, open_log
    from whorl.loop.frozen_events import NO_LOG, latest_completion

    configs: list[Any] = [step.config for step in steps.values() if step.kind.name == "events"]
    url = next((config.log for config in configs if config.log), default_log(store.root))
    with open_log(url) as log:
        if not (address := str(latest_completion(log).get("digest", ""))):
            raise NotApplicableError(f"the log {url} has no completion of a model in a store", do=NO_LOG)
    return store.open(address)


def import_folders(tables: dict[str, Any]) -> dict[str, Any]:
    """Return the tables with a step that imports each folder that a `from` names."""
    imports: dict[str, str] = {}
    for table in tables.values():
        ref = table.get(FROM) if isinstance(table, dict) else None
        if isinstance(ref, str) and ref and (user_path(ref) / "config.json").is_file():
            table[FROM] = imports.setdefault(ref, f"imported{len(imports) or ''}")
    made = {name: {"uses": "import_model", "folder": str(user_path(ref))} for ref, name in imports.items()}
    return {**made, **tables}


def _parent_names(table: Mapping[str, Any]) -> list[str]:
    given = table.get("parents", [])
    return [*given.values()] if isinstance(given, dict) else [*given] if isinstance(given, list) else []


def check_given(ref: Any, location: str, kind: StepKind) -> dict[str, str]:
    """Return what a step's `from` names, by role. Raises ConfigError: it is no model, or the step takes none."""
    if isinstance(ref, dict):
        roles, given = kind.parent_roles(), ref.items()
        if wrong := [f"from.{r} is {n!r}" for r, n in given if r not in roles or not isinstance(n, str)]:
            raise ConfigError(f"{location}: {wrong[0]}", expected=f"roles of {kind.name}: {', '.join(roles)}")
        return ref
    if not model_role(kind):
        raise ConfigError(f"{location}: {kind.name} starts from no model", do="leave out from")
    if not isinstance(ref, str):
        raise ConfigError(f"{location}: from is {ref!r}", expected=A_MODEL)
    if ref and user_path(ref).is_dir() and not (user_path(ref) / "config.json").is_file():
        raise ConfigError(f"{location}: {ref} is a folder without config.json", expected=A_MODEL)
    return {model_role(kind): ref}
