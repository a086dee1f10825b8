"""Units of work: a function of input files that writes a folder, kept under the hash of all that its result depends on.

The key of a unit has the contents of its inputs, the stage's function, version and configuration, and the unit's
arguments. It has no path, time, or number of workers. So after a changed file, a new filter or a kill, exactly the
missing units run; equal inputs run once; and any executor gives the same bytes.

A map stage writes its records into one file per partition (`partition_name`). `shuffled` makes one unit of each
partition, with that partition's files of all maps as inputs: the reduce stage. A map that ran again and wrote an equal
partition does not repeat that partition's reduction, since its key has the contents.

    UNITS/KEY/        the files of a finished unit, and manifest.json with their hashes and the unit's summary
    UNITS/.KEY-PID/   a unit in progress; renamed when it is finished, so that a kill leaves no half unit
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from whorl.registry import import_attribute

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Input:
    """A local path or URL. Only `digest`, a hash of the content (`hash_file`), is part of a key."""

    path: str
    digest: str

    @classmethod
    def of(cls, path: Path) -> Input:
        """Return a local file as an input; reads it, unless this process has read it and it has not changed."""
        status = path.stat()
        stamp = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        return cls(str(path), _unchanged_hash(path, stamp))


@dataclass(frozen=True)
class Unit:
    """The arguments of one call of a stage's function.

    arguments: JSON values, such as a range of the file.
    covered: further inputs, after the others. They are not part of the key: what the function reads of them is covered by
        a digest inside one of `inputs`. So a change of the rest of such a file does not run the unit again.
    """

    inputs: tuple[Input, ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    covered: tuple[Input, ...] = ()


@dataclass(frozen=True)
class Stage:
    """A step of the work.

    function: "module:name" of `f(inputs, out, config, arguments) -> summary`, which reads the files of the list `inputs`,
    writes files into the empty folder `out`, and returns JSON values. Equal arguments must give equal bytes.
    version: to be raised when the function's results change.
    isolate: a local pool of several workers runs the function in a child process always: it may crash on foreign bytes, or
        load a model. Not part of the key.
    """

    function: str
    version: int
    config: Mapping[str, Any] = field(default_factory=dict)
    isolate: bool = False

    def key(self, unit: Unit) -> str:
        """Return the key of a unit in this stage: 32 hex digits."""
        parts = [self.function, self.version, self.config, [i.digest for i in unit.inputs], unit.arguments]
        text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Output:
    """A finished unit. files: name -> digest."""

    key: str
    folder: Path
    files: Mapping[str, str]
    summary: Mapping[str, Any]

    def input(self, name: str) -> Input:
        """Return one of the files as an input of another stage."""
        return Input(str(self.folder / name), self.files[name])


@dataclass(frozen=True)
class Call:
    """A unit with its stage, to be run in any process that sees the folder; picklable."""

    stage: Stage
    unit: Unit
    folder: Path

    def __call__(self) -> None:
        """Run the unit, unless it is finished, and publish its folder. Raises what the function raises."""
        if (self.folder / MANIFEST).is_file():
            return
        work = self.folder.with_name(f".{self.folder.name}-{os.getpid()}")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            function: Callable[..., Mapping[str, Any] | None] = import_attribute(self.stage.function)
            paths = [i.path for i in (*self.unit.inputs, *self.unit.covered)]
            summary = function(paths, work, self.stage.config, self.unit.arguments)
            files = {p.name: hash_file(p) for p in sorted(work.iterdir())}
            manifest = {"files": files, "summary": dict(summary or {})}
            (work / MANIFEST).write_text(json.dumps(manifest))
            try:
                work.rename(self.folder)
            except OSError:  # another process has finished the same unit
                if not (self.folder / MANIFEST).is_file():
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)


class Executor(Protocol):
    """Where calls run."""

    def execute(self, calls: Sequence[Call]) -> Iterator[int]:
        """Run all calls, each once or more often, and yield their numbers as they finish, in any order.

        Raises:
            DataError: a call's process was killed, again and again.
            Exception: what a call raised.
        """


class UnitStore:
    """A folder of finished units, which several runs may share.

    A unit that is used again gets a new modification time. One that was damaged runs again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(
        self, stage: Stage, units: Sequence[Unit], executor: Executor,
        advance: Callable[[Unit], Any] = lambda unit: None,
    ) -> list[Output]:  # fmt: skip
        """Run the units that are not finished, and return the outputs of all, in order.

        Args:
            advance: called for each unit when it is finished, in any order.

        Raises:
            DataError: a unit's process was killed, again and again.
        """
        keys = [stage.key(unit) for unit in units]
        missing: dict[str, Call] = {}
        for key, unit in zip(keys, units, strict=True):
            if key not in missing and self._read(key, check=True) is None:
                missing[key] = Call(stage, unit, self.folder / key)
            else:
                advance(unit)
        calls = list(missing.values())
        for number in executor.execute(calls):
            advance(calls[number].unit)
        outputs = [self._read(key) for key in keys]
        assert None not in outputs
        return [output for output in outputs if output is not None]

    def _read(self, key: str, *, check: bool = False) -> Output | None:
        """Return a finished unit; with `check` only if its files are whole, else it is deleted."""
        folder = self.folder / key
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            if check and any(
                hash_file(folder / name) != digest for name, digest in manifest["files"].items()
            ):
                raise ValueError("a file was changed")
            os.utime(folder)
        except FileNotFoundError:
            if not folder.exists():
                return None
        except ValueError:
            pass
        else:
            return Output(key, folder, manifest["files"], manifest["summary"])
        shutil.rmtree(folder)
        return None


def partition_name(number: int) -> str:
    """Return the name of the file in which a map stage writes the records of a partition."""
    return f"part-{number:05d}"


def shuffled(outputs: Iterable[Output], names: Sequence[str] | None = None) -> list[Unit]:
    """Return one unit for each partition that a map has written, with the files of all maps in their order.

    Args:
        names: the partitions' files; default all, sorted.
    """
    outputs = list(outputs)
    found = sorted({name for output in outputs for name in output.files}) if names is None else names
    return [Unit(tuple(o.input(name) for o in outputs if name in o.files)) for name in found]


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a hard link to a file that is never changed, or a copy on another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


@functools.lru_cache(maxsize=1 << 16)
def _unchanged_hash(path: Path, stamp: tuple[int, ...]) -> str:
    return hash_file(path)


def hash_file(path: Path) -> str:
    """Return the BLAKE2b hash of a file's content: 32 hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
