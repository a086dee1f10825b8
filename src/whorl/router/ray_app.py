"""The application that Ray Serve deploys: each of its replicas is one `whorl serve` process, looked after as on one machine.

    serve deploy serve.yaml            import_path: whorl.router.ray_app:app   (`manifests.py` writes the file)

The server runs in a process of its own below Ray's actor, behind a router with one replica (`replicas.py`): Ray's event loop
and the engine do not share an interpreter, a server that dies is started again in place, and Ray hears through /health what
it is to know. Cores and devices are those that Ray gave the actor; a child inherits them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from whorl.router.replica_processes import make_replicated_router


def command(args: Mapping[str, Any]) -> list[str]:
    """What a replica runs. args: model; arguments: further words of `whorl serve`; sequences: at once."""
    words = ["serve", str(args["model"]), "--max-num-seqs", str(args.get("max_num_seqs", 32))]
    return [sys.executable, "-m", "whorl.cli", *words, *map(str, args.get("arguments", ()))]


def app(args: dict[str, Any]) -> Any:
    """Ray Serve's application. Nothing is started before Ray makes a replica."""
    from ray import serve

    def build() -> Any:
        router, _ = make_replicated_router(command(args), 1)
        return router.app

    return serve.deployment(name="Replica")(serve.ingress(build)()).bind()
