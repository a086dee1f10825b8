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
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
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
K1, B = 1.2, 0.75
_WORD = re.compile(r"\w+")


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
        self._index: Bm25Index | None = None
        settings = config.model_dump(mode="json", exclude=NOT_IN_ADDRESS)
        if config.retrieval is not None:
            documents = _documents(config)
            self._index = Bm25Index(documents)
            self._prompt = Template(config.retrieval.template, "retrieval.template")
            settings["retrieval"]["documents"] = hashlib.sha256(
                "\0".join(documents).encode("utf-8", "replace")
            ).hexdigest()
        self._check: Guard | None = None
        if config.guard and config.guard.check:
            self._check = GUARDS.get(config.guard.check, named_by=f"system {config.name}: guard.check")
        self.address = extend_address(model.address, {"system": settings})
        self.n_blocked = 0

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
            found = [self._index.documents[n] for n, _ in self._index.search(question, config.retrieval.k)]
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


class Bm25Index:
    """An index of documents in memory, by BM25 over words. documents: texts.

        score(d) = sum over words w of the question of  idf(w) f / (f + k1 (1 - b + b |d| / mean |d|))
        idf(w)   = ln(1 + (N - n_w + 1/2) / (n_w + 1/2)),   n_w = documents with w, f = count of w in d

    k1 = 1.2 and b = 0.75, after Robertson and Zaragoza 2009, doi:10.1561/1500000019, section 3. Documents of equal score
    keep their order.
    """

    def __init__(self, documents: Sequence[str]) -> None:
        self.documents = list(documents)
        self._postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
        lengths = []
        for number, text in enumerate(self.documents):
            words = _words(text)
            lengths.append(len(words))
            for word, n in Counter(words).items():
                self._postings[word].append((number, n))
        mean = sum(lengths) / max(1, len(lengths)) or 1.0
        self._norms = [K1 * (1 - B + B * n / mean) for n in lengths]

    def search(self, question: str, k: int) -> list[tuple[int, float]]:
        """Return (number, score) of the k best documents that share a word with the question, the best first."""
        scores: dict[int, float] = defaultdict(float)
        n_documents = len(self.documents)
        for word in dict.fromkeys(_words(question)):
            postings = self._postings.get(word, [])
            idf = math.log(1 + (n_documents - len(postings) + 0.5) / (len(postings) + 0.5))
            for number, n in postings:
                scores[number] += idf * n / (n + self._norms[number])
        return sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))[:k]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
