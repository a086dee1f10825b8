"""`whorl serve`: models over HTTP, with a chat page."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whorl.cli.config_options import Configs, config_options
from whorl.cli.options import StoreOption, serve_extra

if TYPE_CHECKING:
    from whorl.engine.config import EngineConfig
    from whorl.machine.device_probe import Machine
    from whorl.serve.config import ServeConfig, ServedModelConfig, ServerProcessesConfig
    from whorl.serve.worker.model_entry import ServedEmbedder, ServedModel
    from whorl.serve.worker.model_loading import ModelLocation

SERVER_OPTIONS = ("host", "port", "key_file", "slo_ttft", "slo_tpot", "max_queue", "drain_seconds")
ENGINE_OPTIONS = ("max_num_seqs", "max_num_batched_tokens", "weight_dtype", "kv_cache_dtype", "seed")


def _configs() -> Configs:
    from whorl.engine.config import EngineConfig
    from whorl.serve.config import ServeConfig, ServedModelConfig, ServerProcessesConfig

    return {
        "server": (ServeConfig, SERVER_OPTIONS),
        "served": (ServedModelConfig, ()),
        "engine": (EngineConfig, ENGINE_OPTIONS),
        "processes": (ServerProcessesConfig, ()),
    }


@config_options(_configs)
def serve(
    model: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="An artifact (quickstart/pretrain), or a folder in the format of transformers; several share the memory.",
        ),
    ],
    server: ServeConfig,
    served: ServedModelConfig,
    engine: EngineConfig,
    processes: ServerProcessesConfig,
    store: StoreOption = None,
) -> None:
    """Serve models: a chat page and an API compatible with OpenAI's.

    The page is at the printed address, the state of the engine at /engine. Ctrl-C finishes running requests first.

    Examples:

        whorl serve quickstart/pretrain

        whorl serve ./Qwen3-0.6B --max-model-len 8192 --kv-cache-memory 4 --weight-dtype int8

        whorl serve ./Qwen3-0.6B --adapter chat/sft --adapter sql=./sql-lora

        whorl serve quickstart/pretrain ./Qwen3-0.6B my/embedder

        whorl serve mine/pretrain --draft mine/draft

        curl localhost:8000/v1/models

        curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"model": "NAME", "prompt": "def "}'

        OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=none python -c "import openai; print(openai.models.list())"

    Open to a network, with keys and limits:

        whorl keys add alice --file keys.json --requests-per-minute 60

        whorl serve quickstart/pretrain --host 0.0.0.0 --api-key-file keys.json

    On more cores or machines:

        whorl serve quickstart/pretrain --replicas 4

        whorl serve quickstart/pretrain --prefill 1 --decode 2

        whorl serve /models/pretrain --manifest kubernetes | kubectl apply -f -
    """
    with serve_extra():
        from whorl.serve.server import bind_socket, check_auth_required
    if processes.manifest is not None:
        _print_manifest(model[0], server, engine, processes, store)
        return
    check_auth_required(server, processes.no_auth)
    if processes.replicas > 1:
        _serve_replicas(server, processes)
        return
    from whorl.machine.device_probe import probe
    from whorl.serve.app_state import AppState
    from whorl.serve.server import run_server as run
    from whorl.serve.worker.model_entry import ServedModel
    from whorl.serve.worker.several_models import find_models

    listening = bind_socket(server)  # before a model is loaded, so that a used port is reported at once
    single = {"--name": served.name, "--adapter": served.adapter, "--chat-template": served.chat_template,
              "--draft": served.draft, "--prefill": processes.prefill, "--decode": processes.decode}  # fmt: skip
    places = find_models(model, store, served.name, [option for option, value in single.items() if value])
    machine = probe(dtype=served.dtype, threads=served.threads)
    machine.apply()
    models, made = _load_models(places, machine, server, served, engine, processes)

    def ready(url: str) -> None:
        for one in models:
            print(f"serving {one.name}: context {one.max_model_len:,} tokens", file=sys.stderr)
        first = models[0]
        if isinstance(first, ServedModel) and not first.chat_template.is_trained:
            print("the model has no trained chat template: the page completes text", file=sys.stderr)

    try:
        run(AppState(server, models, made), listening, ready)
    finally:
        if processes.prefill or processes.decode:
            made.close()


def _load_models(
    places: list[ModelLocation],
    machine: Machine,
    server: ServeConfig,
    served: ServedModelConfig,
    engine: EngineConfig,
    processes: ServerProcessesConfig,
) -> tuple[list[ServedModel | ServedEmbedder], Any]:
    """Return the entries of the models, and the engine that runs all of them; None with embedders alone."""
    from whorl.engine.speculation.load import Speculation
    from whorl.serve.worker.disaggregated_model import ModelEngineFactory
    from whorl.serve.worker.model_loading import ModelLocation
    from whorl.serve.worker.several_models import load_models

    draft = ModelLocation(served.draft, places[0].store).folder if served.draft else None
    speculation = Speculation(served.prompt_lookup, draft, served.multi_token, served.max_drafts)
    memory = None if served.kv_cache_memory is None else int(served.kv_cache_memory * 1e9)
    make = ModelEngineFactory(
        places[0], machine, engine.model_copy(update={"slo_tpot": server.slo_tpot}), served.max_model_len, memory,
        tuple(places[0].adapter(text) for text in served.adapter), served.chat_template, speculation,
    )  # fmt: skip
    return load_models(places, make, processes.prefill, processes.decode)


def _print_manifest(
    model: str, server: ServeConfig, engine: EngineConfig, processes: ServerProcessesConfig, store: str | None
) -> None:
    """Print the manifest for `processes.manifest`. That for Ray has the addresses, sizes and paths of this machine."""
    from whorl.router.manifests import DeploymentSpec, manifest_for_command
    from whorl.serve.server import check_auth_required

    own = ("--manifest", "--replicas", "--max-num-seqs", "--drain", "--host", "--port")
    kind, words, sizes = processes.manifest or "", sys.argv[1:], dict[str, Any]()
    if kind == "ray":
        check_auth_required(server, processes.no_auth)
        # A folder here may have the verb's name.
        words = [str(Path(w).absolute()) if w != "serve" and Path(w).exists() else w for w in words]
        if Path(model).exists():
            model = str(Path(model).absolute())
        elif store is None:
            home = os.environ.get("WHORL_HOME") or ".whorl"
            words += ["--store", home if "://" in home else str(Path(home).absolute())]
        sizes = {"host": server.host, "port": server.port or 8000, **_sizes_of_machine(processes.replicas)}
    what = DeploymentSpec(
        model=model, replicas=processes.replicas, max_num_seqs=engine.max_num_seqs,
        drain_seconds=max(1, int(server.drain_seconds)), **sizes,
    )  # fmt: skip
    print(manifest_for_command(kind, what, words, own), end="")


def _sizes_of_machine(replicas: int) -> dict[str, Any]:
    """Return cores and memory of a replica, such that `replicas` fit on this machine, for `DeploymentSpec`."""
    import psutil

    from whorl.machine.device_probe import usable_cores

    # Ray offers the memory that is available at its start, without its object store, which takes 0.3 of it.
    memory = 0.5 * psutil.virtual_memory().available / 2**30 / replicas
    return {
        "cpus": max(1, min(4, usable_cores() // replicas)),
        "memory_gib": max(0.1, min(8.0, round(memory, 1))),
    }


def _serve_replicas(server: ServeConfig, processes: ServerProcessesConfig) -> None:
    """Run several servers, each with the same options, behind a router."""
    from whorl.router.metrics import SLO
    from whorl.router.replica_processes import drop_options, serve_replicas
    from whorl.serve.app_state import LIMITS_FOLDER
    from whorl.serve.server import api_key_check

    same = drop_options(sys.argv[1:], ("--replicas", "--host", "--port"))
    print(
        f"starting {processes.replicas} replicas behind http://{server.host}:{server.port}",
        file=sys.stderr,
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="whorl-limits-") as folder:
        serve_replicas(
            [sys.executable, "-m", "whorl.cli", *same], processes.replicas, server.host, server.port,
            grace=server.drain_seconds + 10, slo=SLO(server.slo_ttft, server.slo_tpot), no_auth=processes.no_auth,
            is_api_key=api_key_check(server), env={LIMITS_FOLDER: folder},
        )  # fmt: skip
