"""Main program of a rank: `python -m whorl.parallel.launch.rank run RECIPE ...`, in the environment of a launcher."""

from __future__ import annotations

import os
import signal
import sys

from whorl import __version__
from whorl.errors import LOST, WhorlError
from whorl.machine.malloc import request_huge_pages
from whorl.machine.process import die_with_parent
from whorl.parallel.launch.spec import LAUNCHER
from whorl.registry import import_attribute


def main() -> None:
    """Run the command of this process's arguments on rank 0, and the training that it starts on every rank."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != int(os.environ.get(LAUNCHER, os.getppid())):
        raise SystemExit(1)  # the launcher was killed before
    request_huge_pages()  # before torch is imported
    from whorl.parallel.distributed import drive

    try:
        drive(import_attribute("whorl.cli:main"), identity={"version": __version__, "command": sys.argv[1:]})
    except WhorlError as error:  # of joining or serving; the command prints its own
        if error.exit_code != LOST or os.environ.get("RANK") == "0":
            print(f"whorl: rank {os.environ.get('RANK')}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error


if __name__ == "__main__":
    main()
