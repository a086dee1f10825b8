"""The suite `own`: items from the held-out documents of the model's own corpus. It needs no network.

    own-last-words       kind likelihood    the last word of a line that occurs in the text before (as LAMBADA demands,
                                            arXiv:1606.06031): predictable from the passage, not from its end
    own-continuation     kind choice        the line that follows, among four lines of the same document
    own-functions        kind generate      the body of a Python function: does Python parse it?
    own-doctests         kind generate      the body of a function with examples: does it compute them?

Items are spread over the documents, in an order by a hash of seed and position, and clustered by document: intervals account
for texts that share one. A task without items in these documents is left out, with a message.

The subtle point is the indentation of a line of code, by which the right choice could be found: it is part of the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from whorl.errors import DataError, WhorlError
from whorl.evals.grading import grade_tasks
from whorl.evals.grading.parse_rate import sample_function_prompts
from whorl.evals.grading.programs import parse_or_none
from whorl.evals.kinds.kind import EvalTask
from whorl.evals.suites.code_tasks import doctest_tasks, filter_solvable
from whorl.evals.suites.python_functions import stable_hash
from whorl.evals.suites.suite import SuiteInputs
from whorl.evals.tasks.config import TaskConfig
from whorl.evals.tasks.task import make_task
from whorl.sandbox import Sandbox
from whorl.tracking.seeds import derive

N_ITEMS = 200
CONTEXT = (200, 800)  # characters before a last word or a continuation: at least, at most
FUNCTION_CONTEXT = 1500  # characters before the body of a function
LINE = (20, 100)  # characters of a continuation
SAMPLED_LINES = 24  # of which the distractors are those of nearest length
COMPLETION_TOKENS = 160
_LAST_WORD = re.compile(r"(?<=\w) ([^\W\d]\w{2,})(?=[^\w\s]{0,3}\n)")

Documents = Sequence[tuple[str, str]]
Record = dict[str, Any]


def own_suite(inputs: SuiteInputs) -> list[EvalTask]:
    """Return the tasks that have items in the held-out documents."""
    documents = [(path, text.replace("\r\n", "\n")) for path, text in inputs.documents()]
    documents.sort(key=lambda document: derive(inputs.seed, "documents", document[0]))
    limit = inputs.limit or N_ITEMS
    makers: Mapping[str, Callable[[Documents, int, SuiteInputs], list[Record]]] = {
        "own-last-words": _last_words, "own-continuation": _continuations, "own-functions": _functions,
        "own-doctests": _doctests,
    }  # fmt: skip
    made = []
    for name, maker in makers.items():
        records = maker(documents, limit, inputs)
        if records:
            made.append(make_task(TaskConfig(name=name, **_TASKS[name]), records))
        else:
            inputs.log(f"suite own: the held-out documents have no items for {name}")
    return made


_GENERATION = {"max_tokens": COMPLETION_TOKENS, "heal": True}
_DATA = {"cluster": "path"}
_TASKS: Mapping[str, dict[str, Any]] = {
    "own-last-words": {
        "kind": "likelihood", "about": "the last word of a line, which occurs before", "template": "{{ context }}",
        "data": _DATA, "options": {"continuation": " {{ word }}"},
        "metrics": ("acc", "item_perplexity"),
    },
    "own-continuation": {
        "kind": "choice", "about": "the next line, among four of the document", "template": "{{ context }}",
        "choices": "choices", "gold": "0", "data": _DATA, "options": {"delimiter": "", "shuffle": True},
        "metrics": ("acc", "acc_norm", "acc_prior"),
    },
    "own-functions": {
        "kind": "generate", "about": "bodies of functions that Python parses", "template": "{{ prompt }}",
        "gold": "header", "data": _DATA, "generation": _GENERATION, "options": {"metric": "parses"},
    },
    "own-doctests": {
        "kind": "generate", "about": "bodies of functions that compute their examples", "template": "{{ prompt }}",
        "gold": "answer", "data": _DATA, "generation": _GENERATION, "options": {"verifier": "doctest", "trim": True},
        "metrics": ("passed",),
    },
}  # fmt: skip


def _last_words(documents: Documents, limit: int, inputs: SuiteInputs) -> list[Record]:
    def candidates(text: str) -> Iterator[tuple[int, Record]]:
        for match in _LAST_WORD.finditer(text):
            context, word = _before(text, match.start()), match[1]
            if len(context) >= CONTEXT[0] and re.search(rf"\b{re.escape(word)}\b", context):
                yield match.start(), {"context": context, "word": word}

    return spread_items(documents, candidates, limit, inputs.seed)


def _continuations(documents: Documents, limit: int, inputs: SuiteInputs) -> list[Record]:
    def candidates(text: str) -> Iterator[tuple[int, Record]]:
        lines = {}
        for match in re.finditer(r"^([ \t]*)(\S.*?)[ \t]*$", text, re.MULTILINE):
            if LINE[0] <= len(match[2]) <= LINE[1] and re.search(r"[^\W\d_]{3}", match[2]):
                lines[match.start(2)] = match[2]
        shuffled = sorted(set(lines.values()), key=lambda line: stable_hash(inputs.seed, "lines", line))
        places, ring = {line: n for n, line in enumerate(shuffled)}, shuffled * 2
        for at, line in lines.items():
            context, first = _before(text, at), places[line] + 1
            some = ring[first : first + min(SAMPLED_LINES, len(shuffled) - 1)]
            if len(context) < CONTEXT[0] or len(some) < 3:
                continue
            nearest = sorted(some, key=lambda other: abs(len(other) - len(line)))[:3]
            yield at, {"context": context, "choices": [line, *nearest]}

    return spread_items(documents, candidates, limit, inputs.seed)


def _functions(documents: Documents, limit: int, inputs: SuiteInputs) -> list[Record]:
    texts = {path: text for path, text in documents if _is_python(path, text)}
    try:
        prompts = sample_function_prompts(
            ((path, text.encode()) for path, text in texts.items()), limit, inputs.seed
        )
    except DataError:
        return []  # no function of a fitting size
    found = []
    for prompt in prompts:
        before = prompt.prefix.decode()[-FUNCTION_CONTEXT:]
        whole = before if len(before) < FUNCTION_CONTEXT else before.partition("\n")[2]
        header, n = prompt.header.decode(), len(prompt.prefix)
        found.append(
            {"id": f"{prompt.document}:{n}:{prompt.name}", "path": prompt.document, "prompt": whole or before,
             "header": header, "body": prompt.body.decode()}
        )  # fmt: skip
    return found


def _doctests(documents: Documents, limit: int, inputs: SuiteInputs) -> list[Record]:
    files = [(path, text) for path, text in documents if ">>>" in text and _is_python(path, text)]
    candidates = [
        c for c in doctest_tasks(files, seed=inputs.seed) if len(c.task.prompt) <= 2 * FUNCTION_CONTEXT
    ]
    if not candidates:
        return []
    kept = candidates[: 2 * limit]
    if inputs.run_programs:
        try:
            with Sandbox() as sandbox:
                kept, _ = filter_solvable(kept, lambda t, texts: grade_tasks(t, texts, sandbox))
        except WhorlError as error:  # a protection is missing on this machine
            inputs.log(f"suite own: own-doctests is left out: {error.what}")
            return []
    return [
        {"id": one.task.id, "path": one.file, "prompt": one.task.prompt, "answer": one.task.answer, "body": one.solution}
        for one in kept[:limit]
    ]  # fmt: skip


def spread_items(
    documents: Documents, candidates: Callable[[str], Iterator[tuple[int, Record]]], limit: int, seed: int
) -> list[Record]:
    """Return candidates of the documents in turn, in hashed order, with an id and the document's path."""
    rows: list[list[Record]] = []
    for path, text in documents:
        own = sorted(candidates(text), key=lambda found: stable_hash(seed, path, found[0]))
        rows.append([{"id": f"{path}:{at}", "path": path, **record} for at, record in own[:limit]])
    found: list[Record] = []
    turn = 0
    while len(found) < limit and any(turn < len(row) for row in rows):
        found += [row[turn] for row in rows if turn < len(row)][: limit - len(found)]
        turn += 1
    return found


def _before(text: str, at: int) -> str:
    """Return the text before a position, from the start of a line where it is long."""
    context = text[max(0, at - CONTEXT[1]) : at]
    if at > CONTEXT[1]:
        context = context.partition("\n")[2]
    return context


def _is_python(path: str, text: str) -> bool:
    if path.endswith(".py"):
        return True
    return "#" in path and "def " in text and parse_or_none(text) is not None  # a record of a file of records
