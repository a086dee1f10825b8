"""Interpreters of the peers: each peer is installed in an environment of its choice, given by `--peer NAME=PYTHON`.

The variable WHORL_BENCH_PEERS (NAME=PYTHON,...) gives them to every script; `bench/run_all.py --peer` sets it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

VARIABLE = "WHORL_BENCH_PEERS"
TITLES = {
    "vllm": "vLLM",
    "openvino": "OpenVINO GenAI",
    "llama": "llama.cpp",
    "hf": "Hugging Face generate",
    "lmeval": "lm-evaluation-harness",
    "lmeval_vllm": "lm-evaluation-harness on vLLM",
    "mctx": "mctx",
    "bm25s": "bm25s",
}
MODULES = {
    "vllm": ("vllm",),
    "openvino": ("openvino_genai",),
    "llama": ("llama_cpp",),
    "hf": ("transformers",),
    "lmeval": ("lm_eval",),
    "lmeval_vllm": ("lm_eval", "vllm"),
    "mctx": ("mctx",),
    "bm25s": ("bm25s",),
}
ENGINES = ("vllm", "openvino", "llama", "hf")
FIND = (
    "import sys, importlib.util as u; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None], sep=', ')"
)


def interpreters(given: Sequence[str], names: Sequence[str], threads: int) -> dict[str, str]:
    """Return the interpreter of each peer in `names` that can be imported; the others are printed.

    Raises:
        SystemExit: an option that is not NAME=PYTHON; no interpreter there.
    """
    chosen = dict.fromkeys(names, sys.executable)
    everywhere = [text.partition("=") for text in os.environ.get(VARIABLE, "").split(",") if text]
    chosen |= {name: python for name, _, python in everywhere if name in names}
    for text in given:
        name, _, python = text.partition("=")
        if name not in names or not python:
            sys.exit(f"--peer {text}: expected NAME=PYTHON, NAME one of {', '.join(names)}")
        chosen[name] = python
    found = {}
    for name, python in chosen.items():
        try:
            looked = subprocess.run(
                [python, "-c", FIND, *MODULES[name]], env=environment(python, threads), capture_output=True, text=True
            )  # fmt: skip
        except OSError as error:
            sys.exit(f"--peer {name}={python}: {error.strerror}; expected an interpreter")
        if looked.returncode:
            sys.exit(f"--peer {name}={python}: no interpreter: {looked.stderr.strip()[-300:]}")
        if missing := looked.stdout.strip():
            print(f"left out: {TITLES[name]}, no module {missing} in {python}")
        else:
            found[name] = python
    return found


def environment(python: str, threads: int) -> dict[str, str]:
    """Return the variables of a contender's process. PYTHONPATH is for this interpreter only."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" or python == sys.executable}
    return kept | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
