"""Answers requests by a system: guard, retrieval, model with tools, guard.

    backend = SystemBackend(EndpointBackend.open(url, name), read_system(Path("support.toml")))

A prompt that the guard blocks gets the guard's answer, and the model receives no request. The documents that match the last
message of the user are put before it. With tools, the model acts in a folder until it finishes (`episodes/folder.py`), and
the text of `finish` is the answer. An answer that the guard blocks is replaced.

With `trace`, each answer appends a JSON line to a file: the prompt with its documents, messages and calls, what the guard
blocked, and the answer. Answers from the cache append none.

The address covers the model, the configuration and the documents, but not the code of a guard's function: give it another
name when it changes.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from whorl.errors import DataError
from whorl.evals.episodes.folder import FolderEnv, run_agents
from whorl.evals.episodes.runner import Episode
from whorl.evals.episodes.samplers import BackendSampler
from whorl.evals.episodes.system_config import SystemConfig
from whorl.evals.grading.task import VerifiableTask
from whorl.evals.model.model_folder import extend_address
from whorl.evals.model.requests import (
    Completion,
    GenerateRequest,
    Message,
    Missing,
    ModelBackend,
    Request,
    Response,
    responses_of,
)
from whorl.evals.tasks.records import read_records
from whorl.evals.tasks.template import Template
from whorl.registry import Registry
from whorl.search.analysis import LANGUAGE
from whorl.search.documents import Passage, SearchDocument, SearchQuery
from whorl.search.index import Index, open_index

GUARDS = Registry("guard", {})
NOT_IN_ADDRESS = {
    "name",
    "model",
    "model_name",
    "trace",
    "timeout",
    "concurrency",
}  # no answer depends on them
Guard = Callable[[str], str]


class SystemBackend:
    """A `ModelBackend`. See the top of this file.

    Attributes:
        n_blocked: prompts and answers that the guard blocked.

    Raises:
        ConfigError: no such guard. DataError: a record of the documents has no text.
    """

    def __init__(self, model: ModelBackend, config: SystemConfig) -> None:
        self.model, self.config = model, config
        self.name, self.max_length = config.name, model.max_length
        self._index: Index | None = None
        settings = config.model_dump(mode="json", exclude=NOT_IN_ADDRESS)
        if config.retrieval is not None:
            documents = _documents(config)
            self._index = self._build_index(documents)
            self._prompt = Template(config.retrieval.template, "retrieval.template")
            settings["retrieval"]["analysis"] = LANGUAGE
            settings["retrieval"]["documents"] = hashlib.sha256(
                "\0".join(documents).encode("utf-8", "replace")
            ).hexdigest()
        self._check: Guard | None = None
        if config.guard and config.guard.check:
            self._check = GUARDS.get(config.guard.check, named_by=f"system {config.name}: guard.check")
        self.address = extend_address(model.address, {"system": settings})
        self.n_blocked = 0

    def _build_index(self, documents: Sequence[str]) -> Index:
        """Return an index of the documents, in a folder that is removed with this object."""
        self._folder = tempfile.TemporaryDirectory(prefix="whorl-system-")
        with closing(open_index(self._folder.name, writable=True)) as index:
            index.write([SearchDocument(str(n), n, [Passage(0, text)]) for n, text in enumerate(documents)])
        return open_index(self._folder.name)

    def respond(self, requests: Sequence[Request], on_response: Callable[[int, Response], None]) -> None:
        """See `ModelBackend`. A system has no log-probabilities: such requests are missing."""
        asked: dict[int, GenerateRequest] = {}
        for number, request in enumerate(requests):
            if not isinstance(request, GenerateRequest):
                on_response(
                    number, Missing("a system gives no log-probabilities; evaluate its model for this task")
                )
                continue
            messages: list[Message] = (
                [{"role": "user", "content": request.prompt}] if isinstance(request.prompt, str) else list(request.prompt)
            )  # fmt: skip
            if self._blocks("prompt", messages[-1]["content"]):
                self._trace(messages, "prompt", self._refusal())
                on_response(number, Completion(self._refusal()))
            else:
                asked[number] = replace(request, prompt=tuple(self._with_documents(messages)))
        if not asked:
            return
        if self.config.tools is None:
            self._answer_once(asked, on_response)
        else:
            self._answer_with_tools(asked, on_response)

    def _with_documents(self, messages: list[Message]) -> list[Message]:
        """Return the messages of a request, with the system message and the documents before the question."""
        config = self.config
        if self._index is not None and config.retrieval is not None:
            question = str(messages[-1]["content"])
            query = SearchQuery(question, config.retrieval.k, "text", marks=False)
            found = [hit.text for hit in self._index.search(query).hits]
            if found:
                shown = "\n\n".join(text[: config.retrieval.max_characters] for text in found)
                prompt = self._prompt({"documents": shown, "question": question}, self.name)
                messages = [*messages[:-1], {**messages[-1], "content": prompt}]
        system = [config.system, *(m["content"] for m in messages if m["role"] == "system")]
        text = "\n\n".join(part for part in system if part)
        given = [m for m in messages if m["role"] != "system"]
        return [{"role": "system", "content": text}, *given] if text else given

    def _answer_once(
        self, asked: dict[int, GenerateRequest], on_response: Callable[[int, Response], None]
    ) -> None:
        numbers = list(asked)

        def receive(place: int, response: Response) -> None:
            prompt, steps = asked[numbers[place]].prompt, []
            if isinstance(response, Completion):
                steps = [{"role": "model", "content": response.text}]
            on_response(numbers[place], self._guarded(prompt, steps, response))

        self.model.respond(list(asked.values()), receive)

    def _answer_with_tools(
        self, asked: dict[int, GenerateRequest], on_response: Callable[[int, Response], None]
    ) -> None:
        """Run the episodes of all requests together."""
        numbers, requests = list(asked), list(asked.values())
        assert self.config.tools is not None

        def receive(place: int, episode: Episode) -> None:
            env: Any = episode.env
            response = _response(env, episode)
            on_response(numbers[place], self._guarded(requests[place].prompt, env.steps, response))

        tasks = [VerifiableTask(str(n), messages=tuple(r.prompt)) for n, r in asked.items()]  # type: ignore[arg-type]
        run_agents(
            tasks, self.config.tools, BackendSampler(partial(responses_of, self.model), requests), receive
        )

    # -- guard ---------------------------------------------------------------------------------------------------------

    def _guarded(self, prompt: Any, steps: Sequence[object], response: Response) -> Response:
        """Return the response, or the guard's answer in its place. steps: of the trace."""
        blocked = isinstance(response, Completion) and self._blocks("answer", response.text)
        shown = Completion(self._refusal()) if blocked else response
        text = shown.text if isinstance(shown, Completion) else None
        self._trace(prompt, "answer" if blocked else "", text, steps)
        return shown

    def _trace(
        self, messages: Sequence[Message], blocked: str, answer: str | None, steps: Sequence[object] = ()
    ) -> None:
        """Append a line to the file of traces."""
        if not self.config.trace:
            return
        line = {
            "prompt": [dict(m) for m in messages],
            "steps": list(steps),
            "blocked": blocked,
            "answer": answer,
        }
        with Path(self.config.trace).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _blocks(self, side: str, text: str) -> bool:
        guard = self.config.guard
        if guard is None or side not in guard.on:
            return False
        blocked = any(re.search(pattern, text) for pattern in guard.patterns)
        blocked = blocked or (self._check is not None and bool(self._check(text)))
        self.n_blocked += blocked
        return blocked

    def _refusal(self) -> str:
        return self.config.guard.answer if self.config.guard else ""


def _response(env: FolderEnv, episode: Episode) -> Response:
    """Return the answer of a run with tools; one that used up a budget is cut."""
    if episode.failed:
        return Missing(episode.reason)
    return Completion(env.answer, finish="stop" if env.ended == "finished" else "length")


def _documents(config: SystemConfig) -> list[str]:
    retrieval = config.retrieval
    assert retrieval is not None
    found = []
    for number, record in enumerate(read_records(retrieval.documents, f"system {config.name}"), 1):
        text = record.get(retrieval.text)
        if not isinstance(text, str):
            raise DataError(
                f"system {config.name}: document {number} has no text in the field {retrieval.text!r}",
                expected=f"one of the fields {', '.join(list(record)[:10])}", do="correct retrieval.text",
            )  # fmt: skip
        found.append(text)
    return found
