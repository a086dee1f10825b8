"""Ancestors of artifacts and the next commands, for the page of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable

from whorl.store import Artifact, Store

MAX_PROMPT_CHARS = 60  # longest prompt that is shown in a command to type


def with_ancestors(artifacts: Iterable[Artifact], store: Store) -> list[Artifact]:
    """Return the artifacts and their ancestors that the store still has, in the order of creation."""
    found = {a.address: a for a in artifacts}
    pending = list(found.values())
    while pending:
        for address in pending.pop().parents.values():
            if address not in found and (parent := store.find(address)) is not None:
                found[address] = parent
                pending.append(parent)
    return sorted(found.values(), key=lambda a: a.created)


def next_commands(stage: Artifact) -> list[str]:
    """Return commands that sample from the model of the last stage and show its lineage."""
    prompt = stage.summary.get("sample_prompt", "def ")
    if "samples.json" in stage.files:
        asked = [sample["prompt"] for sample in json.loads(stage.file("samples.json").read_text())["before"]]
        prompt = next((text for text in asked if len(text) <= MAX_PROMPT_CHARS), prompt)
    return [f"whorl sample {stage.name} {_shell_quote(prompt)}", f"whorl lineage {stage.name}"]


def _shell_quote(text: str) -> str:
    """Quote a text for a POSIX shell; line ends become $'...' escapes."""
    inside = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\t", "\\t")
    return f'"{text}"' if text == inside and not set('"$`!') & set(text) else f"$'{inside}'"
