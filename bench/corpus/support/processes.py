"""A process with its children: the JSON of its last line, its peak memory and CPU time, read from /proc."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

PAGE, TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


def start(command: list[str], pause: float) -> dict[str, Any]:
    """Run a process in a new session, and return its last line with figures of the session.

    Args:
        pause: seconds between readings; 0: none.

    Returns:
        peak: bytes of resident memory of all processes together. anonymous: without mapped files, whose pages the system
        drops when it needs them. cpu_seconds: of all processes, as of their last readings.

    Raises:
        RuntimeError: the process failed.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    peaks, cpu, is_done = {"peak": 0, "anonymous": 0}, dict[str, float](), threading.Event()

    def read() -> None:
        total = anonymous = 0
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) != process.pid:
                    continue
                total += int(fields[21]) * PAGE
                cpu[entry.name] = (int(fields[11]) + int(fields[12])) / TICKS
                status = (entry / "status").read_text()
                anonymous += sum(int(kib) << 10 for kib in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", status))
        peaks["peak"], peaks["anonymous"] = max(peaks["peak"], total), max(peaks["anonymous"], anonymous)

    def watch() -> None:
        while not is_done.wait(pause):
            read()

    watcher = threading.Thread(target=watch)
    if pause:
        watcher.start()
    printed, errors = process.communicate()
    is_done.set()
    if pause:
        watcher.join()
    if process.returncode:
        raise RuntimeError(errors[-3000:])
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return {**found, **peaks, "cpu_seconds": round(sum(cpu.values()), 2)}
