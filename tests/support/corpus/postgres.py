"""A private PostgreSQL server in a temporary folder, on a free port, as a user without privileges."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def postgres_programs() -> Path | None:
    """The folder of `initdb` and `postgres`, which Debian does not put on the path; None if they are not installed."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if on_path := shutil.which("initdb"):
        folders.insert(0, Path(on_path).resolve().parent)
    return next((f for f in folders if (f / "initdb").is_file() and (f / "postgres").is_file()), None)


def make_database(programs: Path, folder: Path) -> tuple[Path, int | None]:
    """Make a database in a folder; return its data folder, and the user that runs it (None: this one)."""
    user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None  # initdb refuses to run as root
    if user is not None:
        os.chown(folder, user.pw_uid, user.pw_gid)
    options = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    init = [
        programs / "initdb", "-D", folder / "data", "-U", "whorl", "-A", "trust", "--no-sync", "-E", "UTF8",
        "--locale=C",
    ]  # fmt: skip
    done = subprocess.run(
        [*map(str, init)], timeout=120, capture_output=True, text=True, cwd=folder, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "data", None if user is None else user.pw_uid


@contextmanager
def postgres_server(programs: Path) -> Iterator[str]:
    """Start a server; yield the URL of its database."""
    from tests.support.log.servers import running

    with running("postgresql") as server:
        yield server.url
