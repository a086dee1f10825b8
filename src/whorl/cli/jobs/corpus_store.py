"""The artifacts of a corpus in the store, and the run of one of its steps with changed settings.

A corpus NAME is the artifacts NAME/ingest, NAME/curate and others, as a recipe of that name makes them. A verb that makes
one takes the settings of the artifact that has the name now, changes some, and runs that step of the recipe.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from whorl.errors import StoreError

if TYPE_CHECKING:
    from whorl.store import Artifact, Store

STEPS = """
[steps.ingest]
[steps.rewrite]
parents = ["ingest"]
[steps.curate]
parents = ["ingest"]
[steps.mix]
parents = ["ingest", "curate"]
"""


def run_step(
    store: Store, corpus: str, step: str, settings: Mapping[str, Any], sets: Iterable[str] = ()
) -> Artifact:
    """Make the artifact CORPUS/STEP and log its figures; its parents are those in the store.

    Args:
        settings: fields to change; those of the artifact that has the name now remain.
        sets: further changes as "field=value", as in `whorl run --set`.

    Raises:
        ConfigError: an impossible setting. StoreError: a parent is missing.
    """
    from whorl.recipes import parse_recipe, run_recipe
    from whorl.tracking.progress import Progress

    current = find(store, corpus, step)
    kept = dict(current.config) if current is not None else {}
    kept.pop("fingerprint", None)
    given = {name: value for name, value in {**kept, **settings}.items() if value is not None}
    changes = [f"{step}.{name}={to_toml(value)}" for name, value in given.items()]
    changes += [f"{step}.{change}" for change in sets]
    whole = parse_recipe(f'name = "{corpus}"\n{STEPS}', f"whorl corpus {step}", sets=changes)
    existing = {name: require(store, corpus, name) for name in whole.steps[step].parents.values()}
    if "ingest" in existing and step != "rewrite":
        existing["ingest"] = rewritten(store, corpus, existing["ingest"])
    one = replace(whole, steps={step: whole.steps[step]})
    return run_recipe(one, store, Progress(), existing=existing).artifacts[step]


def find(store: Store, corpus: str, step: str) -> Artifact | None:
    """Return the artifact CORPUS/STEP, or None."""
    address = store.names().get(f"{corpus}/{step}")
    return None if address is None else store.find(address)


def require(store: Store, corpus: str, step: str) -> Artifact:
    """Return the artifact CORPUS/STEP. Raises StoreError with the verb that makes it."""
    found = find(store, corpus, step)
    if found is None:
        verb = {"ingest": "ingest SOURCE...", "curate": "filter"}.get(step, step)
        known = sorted({name.split("/")[0] for name in store.names() if name.endswith(f"/{step}")})
        raise StoreError(
            f"the store {store.location} has no {corpus}/{step}",
            expected=f"one of the corpora {', '.join(known)} with --corpus" if known else "",
            do=f"make it: whorl corpus {verb}" + ("" if corpus == DEFAULT else f" --corpus {corpus}"),
        )
    return found


def rewritten(store: Store, corpus: str, documents: Artifact) -> Artifact:
    """Return the documents as `rewrite` changed them, if it read these."""
    found = find(store, corpus, "rewrite")
    return found if found is not None and found.parents.get("documents") == documents.address else documents


DEFAULT = "corpus"


def latest(store: Store, corpus: str | None) -> tuple[Artifact, Artifact | None]:
    """Return the documents and the selection of a corpus; None: the corpus with the youngest documents or selection.

    Raises:
        StoreError: no corpus, or an incomplete one.
    """
    if corpus is None:
        made = [
            (found.created, name.split("/")[0])
            for name, address in store.names().items()
            if (found := store.find(address)) is not None and found.kind in ("documents", "selection")
        ]
        corpus = max(made)[1] if made else DEFAULT
    documents = rewritten(store, corpus, require(store, corpus, "ingest"))
    selection = find(store, corpus, "curate")
    if selection is not None and selection.parents.get("documents") != documents.address:
        selection = None  # of earlier documents
    return documents, selection


def selection_query(selection: Artifact) -> str:
    """Return the SQL of a selection, with its filters."""
    from whorl.corpus.config import CurateConfig

    return CurateConfig.model_validate(selection.config).selection_query


def to_toml(value: Any) -> str:
    """Return a setting as the right side of `--set field=value`."""
    if isinstance(value, Mapping):
        pairs = [f"{json.dumps(k)} = {to_toml(v)}" for k, v in value.items() if v is not None]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    return json.dumps(value)
