"""Ancestors of artifacts, the best sample and the next commands, for the page and the last lines of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable

from whorl.store import Artifact, Store

MAX_PROMPT_CHARS = 60  # longest prompt that is shown in a command to type
MAX_SAMPLE_CHARS = 600


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


def next_commands(artifacts: Iterable[Artifact]) -> list[str]:
    """Return commands that try the models of a run: none without models.

    The model that was evaluated continues text. Stages after it are trained on tasks, and may continue text worse, so the
    last of them gets a prompt of its tasks.
    """
    found = [*artifacts]
    models = [artifact for artifact in found if artifact.kind == "model"]
    if not models:
        return []
    evaluated = {artifact.parents.get("model") for artifact in found if artifact.kind == "evaluation"}
    last = models[-1]
    writer = next((model for model in models if model.address in evaluated), last)
    sampled = dict.fromkeys(
        f"whorl sample {m.name} {_shell_quote(_prompt(m, found))}{' --chat' * ('chat_template.jinja' in m.files)}"
        for m in (writer, last)
    )
    return [*sampled, f"whorl serve {writer.name}"]


def _prompt(model: Artifact, found: Iterable[Artifact]) -> str:
    """Return a short prompt of the tasks that the model was trained on, else one of its corpus, else "..."."""
    parents = [a for a in found if a.address in model.parents.values()]
    parents.sort(key=lambda parent: parent.kind == "model")  # the data come first
    prompts = [str(a.summary.get("sample_prompt", "")) for a in (model, *parents)]
    prompt = next((text for text in prompts if 0 < len(text) <= MAX_PROMPT_CHARS), "...")
    if "samples.json" in model.files:
        samples = json.loads(model.file("samples.json").read_text())
        asked = [sample["prompt"] for sample in samples.get("before", [])]
        prompt = next((text for text in asked if len(text) <= MAX_PROMPT_CHARS), prompt)
    return prompt


def best_sample(evaluation: Artifact) -> list[str]:
    """Return lines with the best text that a model wrote in its evaluation, with what it is; none without samples."""
    done = evaluation.summary.get("completions") or {}
    if text := done.get("nearest"):
        heading = f"of {done['prompts']} completed held-out functions, the one nearest to the real code:"
    else:
        samples = json.loads(evaluation.file("evaluation.json").read_text())["samples"]
        if not samples:
            return []
        written = b"".join(bytes.fromhex(token["hex"]) for token in samples[0]["tokens"])
        text, heading = samples[0]["prompt"] + written.decode("utf-8", "replace"), "a sample:"
    shown = text if len(text) <= MAX_SAMPLE_CHARS else f"{text[:MAX_SAMPLE_CHARS]} ..."
    return [heading, *(f"    {line}" for line in shown.strip("\n").split("\n"))]


def _shell_quote(text: str) -> str:
    """Quote a text for a POSIX shell; line ends become $'...' escapes."""
    inside = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\t", "\\t")
    return f'"{text}"' if text == inside and not set('"$`!') & set(text) else f"$'{inside}'"
