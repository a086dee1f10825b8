"""Remote copies: frequent checkpoints on the local disk, fewer in storage that outlives the machine.

A local disk takes a checkpoint in a second and is lost with its machine; an object store takes minutes and survives. So
each has a separate interval and retention. An upload copies a complete local checkpoint with its hashes; training is
not involved.

The target is any fsspec URL (`s3://`, `gs://`, `file://`, ...). Objects cannot be renamed atomically, so

    URL/JOB/step-00001200.1759990000.5f3a9c/state.safetensors      first: the files, under a unique name
    URL/JOB/step-00001200.1759990000.5f3a9c/state.json             last: the index, which makes the checkpoint valid

JOB is the hash of the job's identity, so many runs may share one URL. The seconds in the name are its age, since not
every store has timestamps. Errors never stop training: they are reported, and the next interval retries.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whorl.files import fsync_path
from whorl.train.checkpoint.writer import INDEX
from whorl.train.config import CheckpointConfig

NAME_PATTERN = re.compile(r"step-(\d{8,})\.(\d+)\.([0-9a-f]+)")
HOUR = 3600.0


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A checkpoint in remote storage: step, name, start time."""

    step: int
    name: str
    started_at: float


class RemoteStore:
    """The remote storage of one job. Raises the errors of fsspec and its back ends."""

    def __init__(self, url: str, job: str) -> None:
        import fsspec

        self.url = url
        self.fs, root = fsspec.core.url_to_fs(url)
        self.root = f"{root.rstrip('/')}/{job}"

    def list_checkpoints(self) -> tuple[list[RemoteCheckpoint], list[RemoteCheckpoint]]:
        """Return (checkpoints with an index, incomplete ones), newest first."""
        self.fs.invalidate_cache()
        if not self.fs.exists(self.root):
            return [], []
        files: dict[str, set[str]] = {}
        for path in self.fs.find(self.root):
            *_, name, file = str(path).split("/")
            files.setdefault(name, set()).add(file)
        known = [
            (RemoteCheckpoint(int(m[1]), m[0], float(m[2])), files[m[0]])
            for m in map(NAME_PATTERN.fullmatch, files)
            if m
        ]
        known.sort(key=lambda item: (item[0].step, item[0].started_at), reverse=True)
        return [f for f, has in known if INDEX in has], [f for f, has in known if INDEX not in has]

    def upload(self, folder: Path, config: CheckpointConfig) -> str:
        """Upload the checkpoint in `folder`, then apply retention; return its remote name."""
        name = f"{folder.name}.{int(time.time())}.{secrets.token_hex(3)}"
        self.fs.makedirs(f"{self.root}/{name}", exist_ok=True)
        for path in sorted(folder.iterdir(), key=lambda path: path.name == INDEX):
            target = f"{self.root}/{name}/{path.name}"
            self.fs.put_file(str(path), target)
            if "file" in (self.fs.protocol if isinstance(self.fs.protocol, tuple) else (self.fs.protocol,)):
                for local in (Path(target), Path(target).parent):
                    fsync_path(local)
        self.prune(config)
        return name

    def prune(self, config: CheckpointConfig) -> None:
        """Apply retention, and remove uploads that were started over an hour ago and never finished."""
        whole, begun = self.list_checkpoints()
        now = time.time()
        for number, each in enumerate(whole):
            hours = (now - each.started_at) / HOUR
            too_old = config.remote_keep_hours is not None and hours > config.remote_keep_hours
            if number and (number >= config.remote_keep or too_old):
                self.fs.rm_file(
                    f"{self.root}/{each.name}/{INDEX}"
                )  # first, so that no reader sees a partial checkpoint
                self.fs.rm(f"{self.root}/{each.name}", recursive=True)
        for each in begun:
            if now - each.started_at > HOUR:
                self.fs.rm(f"{self.root}/{each.name}", recursive=True)

    def download(self, checkpoint: RemoteCheckpoint, folder: Path) -> Path:
        """Download a checkpoint next to the local ones, under a temporary name until complete. `load` verifies it."""
        folder.mkdir(parents=True, exist_ok=True)
        temporary, final = folder / f"writing-{os.getpid()}-fetched", folder / f"step-{checkpoint.step:08d}"
        shutil.rmtree(temporary, ignore_errors=True)  # remove a failed download
        temporary.mkdir()
        for path in self.fs.find(f"{self.root}/{checkpoint.name}"):
            self.fs.get_file(str(path), str(temporary / str(path).split("/")[-1]))
        if final.exists():  # the local copy is damaged, or it would have been loaded
            shutil.rmtree(final)
        temporary.rename(final)
        return final


class Uploader:
    """Uploads in the writer process. Reports every result through `notify` and never raises."""

    def __init__(self, config: CheckpointConfig, job: str, notify: Callable[[dict[str, Any]], None]) -> None:
        self.config, self.job, self.notify = config, job, notify
        self.store: RemoteStore | None = None

    def upload(self, folder: Path, step: int) -> None:
        """Upload a checkpoint and report the result."""
        began = time.monotonic()
        assert self.config.remote_url is not None
        try:
            self.store = self.store or RemoteStore(self.config.remote_url, self.job)
            name = self.store.upload(folder, self.config)
        except Exception as error:  # any back end may raise any error; training continues
            self.notify({"tier": "remote", "step": step, "error": f"{type(error).__name__}: {error}"})
            return
        self.notify({"tier": "remote", "step": step, "name": name, "seconds": time.monotonic() - began})
