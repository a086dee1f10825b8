"""Ray Serve application: each Ray replica runs one supervised `whorl serve` process.

    serve deploy serve.yaml            import_path: whorl.router.ray_app:app   (written by `manifests.py`)

The server is a child process of Ray's actor, behind a router with one replica (`replica_processes.py`). So Ray's event loop
and the engine use separate interpreters, a crashed server is restarted in place, and /health reports its state to Ray. The
child inherits the cores and devices of the actor.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from whorl.router.replica_processes import make_replicated_router


def command(args: Mapping[str, Any]) -> list[str]:
    """Return the command of a replica. args: model; arguments: further arguments of `whorl serve`; max_num_seqs."""
    arguments = ["serve", str(args["model"]), "--max-num-seqs", str(args.get("max_num_seqs", 32))]
    return [sys.executable, "-m", "whorl.cli", *arguments, *map(str, args.get("arguments", ()))]


def app(args: dict[str, Any]) -> Any:
    """Return Ray Serve's application. The server starts when Ray creates a replica.

    args: as in `command`; local_only: only this machine reaches Ray's proxies, and the server requires no keys.
    """
    from ray import serve

    def build() -> Any:
        router, _ = make_replicated_router(command(args), 1)
        router.local_only = bool(args.get("local_only"))
        return router.app

    return serve.deployment(name="Replica")(serve.ingress(build)()).bind()
