"""Run the code blocks of each tutorial and of the course on agents, in order, in an empty folder.

A `bash` fence runs with `bash -e`. All `python` fences of a page share one namespace. `skip` after the language leaves a
block out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = [*sorted((ROOT / "docs" / "tutorials").glob("*.md")), ROOT / "docs" / "agents.md"]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
DRIVER = """
import json, subprocess, sys
namespace = {"__name__": "tutorial"}
for line, language, code in json.load(open(sys.argv[1])):
    print(f"--- line {line} ({language})", flush=True)
    if language == "bash":
        subprocess.run(["bash", "-e", "-c", code], check=True)
    else:
        exec(compile("\\n" * line + code, sys.argv[2], "exec"), namespace)
"""


@pytest.mark.parametrize("page", TUTORIALS, ids=[path.stem for path in TUTORIALS])
def test_tutorial_runs_as_printed(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = [
        (text.count("\n", 0, found.start()) + 1, found[1], found[3])
        for found in FENCE.finditer(text)
        if found[1] in ("bash", "python") and "skip" not in found[2]
    ]
    assert blocks, f"{page.name} has no code"
    (tmp_path / "blocks.json").write_text(json.dumps(blocks))
    work = tmp_path / "work"
    work.mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "blocks.json"), str(page)]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{page.name}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
