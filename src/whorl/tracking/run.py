"""The run folder: configuration, code version, machine, log and metrics of a run.

    RUN/config.json        the resolved recipe
    RUN/environment.json   interpreter, versions, CPU, code version and commit
    RUN/log.txt            the terminal output
    RUN/metrics/STEP.jsonl one record per line: {"step_name", "step", "time", ...values}
    RUN/tb/STEP/           the same numbers for TensorBoard

A recipe with the same settings has the same folder, so a killed run continues its curves. A step that resumes at
optimizer step n drops the records from n on, since they will be written again. Each recipe step has a separate metrics
file. Only the step's owner (the holder of the store's lock) may truncate it, and another process may run another step.

Run folders are records, not inputs: an artifact never depends on one.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.errors import without_credentials
from whorl.files import write_atomic
from whorl.machine.device_probe import ram_bytes, usable_cores
from whorl.machine.identity import cpu_name
from whorl.tracking.sinks import SafeSinks

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PACKAGES = ("torch", "numpy", "pyarrow", "duckdb", "pydantic", "safetensors", "tiktoken", "regex")
# Variables that can change a result. Others (keys, addresses, folders) are not recorded.
SETTINGS = (
    "WHORL_CHOICES", "WHORL_CHOOSE", "WHORL_CODE", "WHORL_DEVICE", "WHORL_DTYPE", "WHORL_FORK_SERVER",
    "WHORL_THREADS",
)  # fmt: skip


def event_record(event: Mapping[str, Any]) -> dict[str, float | str]:
    """Return the record of an event of training (a skipped batch, a rollback, a stall, overfitting) for `MetricsLog`."""
    return {
        "event": event["kind"],
        "message": event["message"],
        "action": event["action"],
        "documents": json.dumps(event.get("documents", []), ensure_ascii=False),
        "n_documents": event.get("n_documents", 0),
    }


class MetricsLog:
    """The metrics of one recipe step, appended to JSONL and TensorBoard.

    Args:
        path: the JSONL file.
        step_name: the recipe step.
        resume_at: drop records at or after this optimizer step; 0 drops all.
        tensorboard: folder of TensorBoard events; None disables them.
        sinks: further receivers of each record.
    """

    def __init__(
        self,
        path: Path,
        step_name: str,
        *,
        resume_at: int = 0,
        tensorboard: Path | None = None,
        sinks: SafeSinks | None = None,
    ) -> None:
        self.path, self.step_name, self._sinks = path, step_name, sinks
        self._resume_at, self._tensorboard = resume_at, tensorboard
        self._writer: SummaryWriter | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [record for record in read_metrics(path) if int(record["step"]) < resume_at]
        write_atomic(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = path.open("a")

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        """Append one record; numbers also go to TensorBoard under their names."""
        record: dict[str, Any] = {"step_name": self.step_name, "step": step, "time": time.time()}
        if reserved := record.keys() & values:
            raise ValueError(f"{reserved.pop()!r} is a reserved name, not a metric")
        record |= values
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._sinks is not None:
            self._sinks.write(self.step_name, step, values)
        if self._tensorboard is None:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._tensorboard), purge_step=self._resume_at)
        for name, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, step)
            else:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        if self._writer is not None:
            self._writer.close()
        if self._sinks is not None:
            self._sinks.end_step(self.step_name)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file, none if absent. A last line cut off by a kill is dropped."""
    records = []
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                break
    return records


class Run:
    """A run folder, created or continued at `dir`."""

    def __init__(
        self,
        dir: Path,
        *,
        config: Mapping[str, Any] | None = None,
        tensorboard: bool = True,
        sinks: SafeSinks | None = None,
    ) -> None:
        self.dir, self._started = dir, time.monotonic()
        self.tensorboard, self.sinks = tensorboard, sinks
        self.config = dict(config or {})
        dir.mkdir(parents=True, exist_ok=True)
        write_json(dir / "config.json", self.config)
        if sinks is not None:
            sinks.start(dir, self.config)

    @property
    def name(self) -> str:
        return self.dir.name

    @property
    def seconds(self) -> float:
        """Return the seconds since this process started or continued the run."""
        return time.monotonic() - self._started

    @property
    def has_metrics(self) -> bool:
        """Whether a step has recorded metrics."""
        return (self.dir / "metrics").is_dir()

    def record_environment(self) -> dict[str, Any]:
        """Write `environment.json`; return its contents."""
        found = environment()
        write_json(self.dir / "environment.json", found)
        return found

    def log(self, text: str) -> None:
        """Append to `log.txt`, with the time and without credentials of URLs."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with (self.dir / "log.txt").open("a") as file:
            file.write("".join(f"{stamp}  {line}\n" for line in without_credentials(text).splitlines()))

    def metrics(self, step_name: str, resume_at: int = 0) -> MetricsLog:
        """Return the metrics log of a recipe step; records at or after `resume_at` are dropped."""
        events = self.dir / "tb" / step_name if self.tensorboard else None
        return MetricsLog(
            self.dir / "metrics" / f"{step_name}.jsonl",
            step_name,
            resume_at=resume_at,
            tensorboard=events,
            sinks=self.sinks,
        )

    def read_metrics(self, step_name: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield the records of one step, or of all."""
        for path in sorted((self.dir / "metrics").glob("*.jsonl")):
            if step_name in (None, path.stem):
                yield from read_metrics(path)


def environment() -> dict[str, Any]:
    """Return interpreter, libraries, CPU and code version: everything a result depends on except its inputs."""
    return {
        "whorl": _version("whorl"),
        "commit": _commit(),
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "ram_bytes": ram_bytes(),
        "versions": {package: _version(package) for package in PACKAGES},
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
    }


def _version(package: str) -> str:
    """Return the version of an installed package, or "absent"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _commit() -> str:
    """The commit of the source checkout ("+" if edited), or "" for an installed package."""
    source = Path(__file__).parents[3]
    if not (source / ".git").exists():
        return ""
    try:
        found = subprocess.run(
            ["git", "-C", str(source), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically: readers and kills never meet a partial file."""
    write_atomic(path, json.dumps(value, indent=2, default=str) + "\n")
