"""Runs lm-evaluation-harness on one model, in its own interpreter.

    PYTHON _peer.py JOB        JOB: a JSON file; the outcome is written to JOB with the suffix .out

A job: side (hf, vllm, api, or whorl for the adapter), arguments (of the model), tasks (folder of YAML files), names, rounds
(evaluations that are timed), warm (first evaluate `warm` items, uncounted). `options` are further arguments of
`simple_evaluate`, such as num_fewshot.

The outcome: seconds of each round (requests, answers, figures; without loading), results (metric -> value), and the records
of every scored request if there is one round (`record_tokens`), and the samples as the harness logs them.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any


def open_model(side: str, arguments: dict[str, Any]) -> Any:
    """Return the harness's model."""
    if side == "whorl":
        return importlib.import_module("_adapter").adapter_class().create_from_arg_obj(arguments)
    names = {"hf": "hf", "vllm": "vllm", "api": "local-completions"}
    return (
        importlib.import_module("lm_eval.api.registry").get_model(names[side]).create_from_arg_obj(arguments)
    )


def record_tokens(model: Any) -> list[list[Any]]:
    """Return a list that receives each scored request: texts (None: a window), ids of context and continuation, answer."""
    found: list[list[Any]] = []
    if not hasattr(model, "_loglikelihood_tokens"):
        return found
    method = model._loglikelihood_tokens

    def recorded(requests: list[Any], *args: Any, **kwargs: Any) -> Any:
        answers = method(requests, *args, **kwargs)
        for (texts, context, continuation), (score, greedy) in zip(requests, answers, strict=True):
            found.append([texts, list(context), list(continuation), float(score), bool(greedy)])
        return answers

    model._loglikelihood_tokens = recorded
    return found


def main() -> None:
    """Run the job."""
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    logging.disable(logging.WARNING)
    evaluator = importlib.import_module("lm_eval.evaluator")
    manager = importlib.import_module("lm_eval.tasks").TaskManager(
        include_path=job["tasks"], include_defaults=False
    )
    model = open_model(job["side"], job["arguments"])
    tokens = [] if job["rounds"] > 1 else record_tokens(model)

    def evaluate(limit: int | None = None) -> Any:
        return evaluator.simple_evaluate(
            model=model, tasks=[f"whorl_{name}" for name in job["names"]], task_manager=manager, limit=limit,
            bootstrap_iters=job.get("bootstrap", 0), log_samples=True, **job.get("options", {}),
        )  # fmt: skip

    if job.get("warm"):
        evaluate(job["warm"])
        tokens.clear()
    seconds = []
    for _ in range(job["rounds"]):
        began = time.perf_counter()
        made = evaluate()
        seconds.append(time.perf_counter() - began)
    samples = {
        name: [
            {"doc": s["doc_id"], "arguments": list(s["arguments"]), "answers": s["resps"],
             **{k: v for k, v in s.items() if isinstance(v, (int, float)) and k != "doc_id"}}
            for s in sorted(each, key=lambda s: s["doc_id"])
        ]
        for name, each in made["samples"].items()
    }  # fmt: skip
    out = {"seconds": seconds, "results": made["results"], "tokens": tokens, "samples": samples}
    path.with_suffix(".out").write_text(json.dumps(out, default=str))


if __name__ == "__main__":
    main()
