"""A private PostgreSQL server in a temporary folder, on a free port, as a user without privileges."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def postgres_programs() -> Path | None:
    """The folder of `initdb` and `postgres`, which Debian does not put on the path; None if they are not installed."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if on_path := shutil.which("initdb"):
        folders.insert(0, Path(on_path).resolve().parent)
    return next((f for f in folders if (f / "initdb").is_file() and (f / "postgres").is_file()), None)


@contextmanager
def postgres_server(programs: Path) -> Iterator[str]:
    """Start a server; yield the URL of its database."""
    folder = Path(tempfile.mkdtemp(prefix="whorl-postgres-"))
    user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None  # initdb refuses to run as root
    if user is not None:
        os.chown(folder, user.pw_uid, user.pw_gid)
    options = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    run = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": folder, **options}
    data = folder / "data"
    try:
        init = [
            programs / "initdb", "-D", data, "-U", "whorl", "-A", "trust", "--no-sync", "-E", "UTF8",
            "--locale=C",
        ]  # fmt: skip
        done = subprocess.run([*map(str, init)], timeout=120, **run)
        assert done.returncode == 0, done.stdout
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        command = [programs / "postgres", "-D", data, "-p", port, "-h", "127.0.0.1", "-k", folder, "-F"]
        server = subprocess.Popen([*map(str, command)], **run)
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    assert server.poll() is None and time.monotonic() < deadline, "PostgreSQL does not start"
                    time.sleep(0.05)
            time.sleep(0.3)  # it accepts, but may still be starting up
            yield f"postgresql://whorl@127.0.0.1:{port}/postgres"
        finally:
            server.terminate()
            server.communicate(timeout=60)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
