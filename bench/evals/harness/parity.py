"""Ids, log-likelihoods, choices and figures against lm-evaluation-harness: same folder, same task files, fp32.

    python bench/evals/harness/parity.py --peer lmeval=PYTHON --save         about 6 minutes
    python bench/evals/harness/parity.py --peer lmeval=PYTHON --quick        a fifth of the items

Five tasks of the documentation in Python's standard library (`_tasks.py`): 500 items of four choices without and
with five fixed examples, last words, whole texts, generated answers. Small trained models with three tokenizers: byte-level
BPE, SentencePiece's unigram model with a template that adds <s>, and this package's.

Four sides: the harness with its `hf` model; `whorl eval`'s runner on the same YAML files; the harness with our adapter; the
harness with `local-completions` against `whorl serve` (without whole texts: its windows are one id shorter).

Bars: all ids equal; every log-likelihood within 1e-4 per token, and the largest difference of all within 5e-4; the same
choice if the best two differ by more than that; equal figures and standard errors. A perplexity's standard error is a
bootstrap in the harness, so it is not compared. Generated texts are compared without white space at their ends: the harness
decodes new tokens alone, which loses the first space of a SentencePiece tokenizer.

The harness runs with `logits_cache=False`. With the cache (its default), two requests with equal ids and different borders
share one row of logits, from whose wrong end the shorter continuation is read (0.4.13: up to 0.15 nats here). The adapter
needs Whorl's dependencies in the peer's interpreter, and the API needs aiohttp and tenacity.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
from bench._peers import environment, interpreters
from bench._run import ROOT, claim, parse, skip
from bench.evals.harness._tasks import CHOICES, TASKS, write_data, write_model, write_tasks

from whorl.evals.model.engine_backend import EngineBackend
from whorl.evals.model.requests import Completion, GenerateRequest, Request, Response, Score, ScoreRequest
from whorl.evals.runner import evaluate
from whorl.evals.suites.suite import TaskSources, load_tasks

KINDS = ("gpt2", "unigram", "whorl")
PER_TOKEN, LARGEST = 1e-4, 5e-4
FIGURES = {  # of the harness -> ours
    "acc": "acc", "acc_norm": "acc_norm", "perplexity": "item_perplexity", "word_perplexity": "word_perplexity",
    "byte_perplexity": "byte_perplexity", "bits_per_byte": "bits_per_byte", "exact_match": "exact_strict",
}  # fmt: skip
BOOTSTRAPPED = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")


@dataclass
class Side:
    """Answers of one side.

    scores: (context, continuation) -> (log-likelihood, tokens, greedy). texts, answers: of whole texts and of prompts.
    figures, errors: (task, metric) -> value, standard error. ids: of each request, if known; windows: of whole texts.
    """

    scores: dict[tuple[str, str], tuple[float, bool]] = field(default_factory=dict)
    texts: dict[str, float] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    figures: dict[tuple[str, str], float] = field(default_factory=dict)
    errors: dict[tuple[str, str], float] = field(default_factory=dict)
    ids: dict[tuple[str, str], tuple[list[int], list[int]]] = field(default_factory=dict)
    windows: list[int] = field(default_factory=list)


class Recorder:
    """A back end that keeps what passes."""

    def __init__(self, backend: EngineBackend) -> None:
        self.backend, self.kept = backend, list[tuple[Request, Response]]()
        self.name, self.address, self.max_length = backend.name, backend.address, backend.max_length

    def respond(self, requests: Any, on_response: Any) -> None:
        """See `ModelBackend`."""

        def keep(n: int, response: Response) -> None:
            self.kept.append((requests[n], response))
            on_response(n, response)

        self.backend.respond(requests, keep)


def run_ours(folder: Path, tasks: Path, add_bos: bool | None) -> Side:
    """Return the answers of our runner on the same files."""
    backend = EngineBackend.open(folder, add_bos=add_bos)
    recorder, side = Recorder(backend), Side()
    loaded = load_tasks([str(tasks / f"{name}.yaml") for name in TASKS], TaskSources())
    for result in evaluate(recorder, loaded):
        for theirs, name in FIGURES.items():
            for measure in result.measures:
                if measure.metric == name:
                    side.figures[result.task, theirs] = measure.value
                    side.errors[result.task, theirs] = measure.standard_error
    windows = {}
    for request, response in recorder.kept:
        if isinstance(request, GenerateRequest):
            assert isinstance(response, Completion) and isinstance(request.prompt, str)
            side.answers[request.prompt] = response.text
        elif isinstance(request, ScoreRequest):
            assert isinstance(response, Score)
            key = (request.context, request.continuation)
            side.scores[key] = (response.total, response.greedy)
            [pair] = backend.encoder.encode_pairs([key])
            side.ids[key] = (pair.context, pair.continuation)
        else:
            assert isinstance(response, Score)
            side.texts[request.text] = response.total
            windows[request.text] = list(response.ids)
    records = [json.loads(line) for line in (tasks / "rolling.jsonl").read_text("utf-8").splitlines()]
    side.windows = [i for record in records for i in windows[record["text"]]]
    return side


def run_harness(
    python: str,
    side: str,
    arguments: dict[str, Any],
    tasks: Path,
    names: tuple[str, ...],
    bootstrap: int = 100,
) -> Side:
    """Return the answers of the harness, in another process."""
    job = {
        "side": side,
        "arguments": arguments,
        "tasks": str(tasks),
        "names": names,
        "rounds": 1,
        "bootstrap": bootstrap,
    }
    path = tasks / f"{side}.json"
    path.write_text(json.dumps(job))
    extra = {
        "HF_DATASETS_CACHE": str(tasks / "cache"),
        "PYTHONPATH": str(ROOT / "src") if side == "whorl" else "",
    }
    command = [python, str(Path(__file__).with_name("_peer.py")), str(path)]
    made = subprocess.run(
        command, env=environment(python, 2) | extra, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    if made.returncode:
        sys.exit(f"{side}: {made.stderr.decode()[-2000:]}")
    out, found = json.loads(path.with_suffix(".out").read_text()), Side()
    for name in names:
        for sample in out["samples"][f"whorl_{name}"]:
            for arguments_, answers in zip(sample["arguments"], sample["answers"], strict=True):
                if name == "rolling":
                    found.texts[arguments_[0]] = float(answers[0])
                elif name == "answer":
                    found.answers[arguments_[0]] = answers[0]
                else:
                    found.scores[arguments_[0], arguments_[1]] = (float(answers[0][0]), bool(answers[0][1]))
        for key, value in out["results"][f"whorl_{name}"].items():
            metric, _, _ = key.partition(",")
            if metric in FIGURES:
                found.figures[f"whorl_{name}", metric] = value
            elif metric.removesuffix("_stderr") in FIGURES and not isinstance(value, str):
                found.errors[f"whorl_{name}", metric.removesuffix("_stderr")] = value
    for texts, context, continuation, _, _ in out["tokens"]:
        if texts is None:
            found.windows += continuation
        else:
            found.ids[texts[0], texts[1]] = (context, continuation)
    return found


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Start `whorl serve`; yields the URL of its completions."""
    from whorl.router.replica_processes import free_port

    port = free_port()
    words = [
        "serve",
        str(folder),
        "--port",
        str(port),
        "--name",
        "tiny",
        "--dtype",
        "float32",
        "--max-queue",
        "4096",
    ]
    process = subprocess.Popen([sys.executable, "-m", "whorl.cli", *words], stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=1)
                break
            except OSError:
                if process.poll() is not None:
                    sys.exit("whorl serve ended at its start")
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1/completions"
    finally:
        process.kill()
        process.wait()


def compare(name: str, ours: Side, peer: Side, own_ids: Side, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the differences. own_ids: has the ids and the tokens of each request."""
    if set(ours.scores) != set(peer.scores) and len(names) == len(TASKS):
        sys.exit(f"{name}: the requests differ: {sorted(set(ours.scores) ^ set(peer.scores))[:2]}")
    differences, per_token = [], []
    for key, (score, _) in peer.scores.items():
        differences.append(abs(score - ours.scores[key][0]))
        per_token.append(differences[-1] / len(own_ids.ids[key][1]))
    for text, score in peer.texts.items():
        difference = abs(score - ours.texts[text])
        per_token.append(difference / max(1, len(own_ids.windows) // len(own_ids.texts)))
    greedy = sum(flag != ours.scores[key][1] for key, (_, flag) in peer.scores.items())
    figures = {
        f"{task}/{metric}": [ours.figures[task, metric], value]
        for (task, metric), value in peer.figures.items()
        if not math.isclose(value, ours.figures[task, metric], rel_tol=1e-5)
    }
    errors = {
        f"{task}/{metric}": [ours.errors[task, metric], value]
        for (task, metric), value in peer.errors.items()
        if metric not in BOOTSTRAPPED and not math.isclose(value, ours.errors[task, metric], rel_tol=1e-9)
    }
    return {
        "side": name, "requests": len(peer.scores) + len(peer.texts),
        "ids_differ": sum(ids != own_ids.ids[key] for key, ids in peer.ids.items()),
        "windows_differ": peer.windows not in ([], own_ids.windows),
        "ids_compared": len(peer.ids), "largest": max(differences), "per_token": max(per_token),
        "texts": max((abs(v - ours.texts[t]) for t, v in peer.texts.items()), default=0.0),
        "greedy_differ": greedy, **choices(ours, peer, own_ids),
        "answers_differ": sum(text.strip() != ours.answers[prompt].strip() for prompt, text in peer.answers.items()),
        "answers": len(peer.answers), "figures_differ": figures, "errors_differ": errors,
    }  # fmt: skip


def choices(ours: Side, peer: Side, own_ids: Side) -> dict[str, int]:
    """Return counts of choices, of ties (best two within `LARGEST`) and of different choices that are no ties."""
    del own_ids
    groups: dict[str, list[tuple[str, str]]] = {}
    for context, rest in peer.scores:
        groups.setdefault(context, []).append((context, rest))
    out = {"choices": 0, "ties": 0, "choices_differ": 0}
    for keys in groups.values():
        if len(keys) != CHOICES:
            continue
        for length in (lambda key: 1, lambda key: len(key[1])):
            sides = [[scores[key][0] / length(key) for key in keys] for scores in (ours.scores, peer.scores)]
            best = sorted(sides[1])[-2:]
            tie = best[1] - best[0] <= LARGEST / min(length(key) for key in keys)
            out["choices"] += 1
            out["ties"] += tie
            out["choices_differ"] += (
                not tie and len({max(range(CHOICES), key=s.__getitem__) for s in sides}) > 1
            )
    return out


def give_answers(folder: Path, tasks: Path, add_bos: bool | None) -> None:
    """Make every second gold answer the text that the model generates, so that exact match is no constant."""
    path = tasks / "answer.jsonl"
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    backend, made = EngineBackend.open(folder, add_bos=add_bos), dict[int, Any]()
    backend.respond([GenerateRequest(r["context"], 12, ("\n", ".")) for r in records], made.__setitem__)
    for n in range(0, len(records), 2):
        records[n]["answer"] = made[n].text.strip() or "none"
    write_data(path, records)


def run_kind(kind: str, folder: Path, python: str, n_items: int, steps: int) -> list[dict[str, Any]]:
    """Return the comparisons of one tokenizer."""
    model = write_model(folder / kind, kind, steps=steps)
    tasks = write_tasks(folder / f"tasks-{kind}", n_items)
    add_bos = False if kind == "whorl" else None
    give_answers(model, tasks, add_bos)
    ours, every = run_ours(model, tasks, add_bos), tuple(TASKS)
    local = {"pretrained": str(model), "dtype": "float32"}
    sides = [
        (
            "runner",
            run_harness(
                python,
                "hf",
                {**local, "batch_size": 16, "device": "cpu", "logits_cache": False},
                tasks,
                every,
            ),
        )
    ]
    hf = sides[0][1]
    found = [compare("runner", ours, hf, ours, every)]
    own = {"pretrained": str(model)} | ({"add_bos": False} if kind == "whorl" else {})
    found.append(compare("adapter", run_harness(python, "whorl", own, tasks, every), hf, ours, every))
    some = tuple(name for name in TASKS if name != "rolling")
    with served(model) as url:
        arguments = {
            "model": "tiny", "base_url": url, "tokenizer": str(model), "tokenizer_backend": "huggingface",
            "num_concurrent": 16, "max_length": 512, "add_bos_token": kind == "unigram",
        }  # fmt: skip
        api = run_harness(python, "api", arguments, tasks, some)
    hf_some = Side(hf.scores, {}, hf.answers, *(
        {k: v for k, v in each.items() if k[0] != "whorl_rolling"} for each in (hf.figures, hf.errors)
    ), hf.ids)  # fmt: skip
    found.append(compare("api", api, hf_some, ours, some))
    for each in found:
        each["tokenizer"] = kind
        print(json.dumps(each), flush=True)
    return found


def main() -> None:
    """Compare all sides and print the claim."""
    a = parse(
        __doc__,
        lambda p: (
            p.add_argument("--peer", action="append", default=[]),
            p.add_argument("--quick", action="store_true"),
            p.add_argument("--folder", default=None, help="keeps models and tasks"),
        ),
        smoke={"quick": True},
    )
    pythons = interpreters(a.peer, ("lmeval",), 2)
    if "lmeval" not in pythons:
        skip("needs lm-evaluation-harness (--peer lmeval=PYTHON)")
    n_items, steps = (12, 5) if a.smoke else (100, 40) if a.quick else (500, 100)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(a.folder or temporary)
        found = [each for kind in KINDS for each in run_kind(kind, folder, pythons["lmeval"], n_items, steps)]
    wrong = [
        each for each in found
        if any(value for name, value in each.items() if name.endswith("_differ"))
        or each["per_token"] > PER_TOKEN or each["largest"] > LARGEST
    ]  # fmt: skip
    largest = max(each["largest"] for each in found)
    claim(
        f"{n_items * CHOICES:,} choices, three tokenizers: ids, log-likelihoods, choices, figures and standard errors of "
        "lm-evaluation-harness, by our runner, our adapter and our API; largest difference of a log-likelihood",
        ours=largest, peer=0.0, unit="nats", ratio=largest, bar=LARGEST, ok=not wrong, samples=found, quick=a.quick,
        peer_name="lm-evaluation-harness, hf",
    )  # fmt: skip


if __name__ == "__main__":
    main()
