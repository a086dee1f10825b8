"""`whorl serve`: models over HTTP, with a chat page."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whorl.cli.config_options import Configs, config_options
from whorl.cli.options import StoreOption, serve_extra
from whorl.cli.serving.serve_processes import print_manifest, serve_replicas_of

if TYPE_CHECKING:
    from whorl.engine.config import EngineConfig
    from whorl.machine.device_probe import Machine
    from whorl.serve.config import EventLogConfig, ServeConfig, ServedModelConfig, ServerProcessesConfig
    from whorl.serve.worker.model_entry import ServedEmbedder, ServedModel
    from whorl.serve.worker.model_loading import ModelLocation

SERVER_OPTIONS = (
    "host", "port", "key_file", "slo_ttft", "slo_tpot", "max_queue", "drain_seconds", "search", "source_tokens",
)  # fmt: skip
ENGINE_OPTIONS = ("max_num_seqs", "max_num_batched_tokens", "weight_dtype", "kv_cache_dtype", "seed")


def _configs() -> Configs:
    from whorl.engine.config import EngineConfig
    from whorl.serve.config import EventLogConfig, ServeConfig, ServedModelConfig, ServerProcessesConfig

    return {
        "server": (ServeConfig, SERVER_OPTIONS),
        "served": (ServedModelConfig, ()),
        "engine": (EngineConfig, ENGINE_OPTIONS),
        "processes": (ServerProcessesConfig, ()),
        "events": (EventLogConfig, ()),
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
    events: EventLogConfig,
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

        whorl serve quickstart/rl --log

        whorl serve cite-sources/sft --search notes

        whorl serve served/chat --log --challenger mine/preference --traffic 0.2

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
        from whorl.serve.server import bind_socket, check_auth_required, make_state, run_server
    if processes.manifest is not None:
        print_manifest(model[0], server, engine, processes, store)
        return
    check_auth_required(server, processes.no_auth)
    if processes.replicas > 1:
        serve_replicas_of(server, processes)
        return
    from whorl.cli.serving.search import open_sources
    from whorl.errors import ConfigError
    from whorl.machine.device_probe import probe
    from whorl.serve.worker.model_entry import ServedModel
    from whorl.serve.worker.several_models import find_challenger, find_models, promoted_name

    listening = bind_socket(server)  # before a model is loaded, so that a used port is reported at once
    single = {"--name": served.name, "--adapter": served.adapter, "--chat-template": served.chat_template,
              "--draft": served.draft, "--prefill": processes.prefill, "--decode": processes.decode}  # fmt: skip
    if events.log:
        model = [promoted_name(ref, store) for ref in model]
    places = find_models(model, store, served.name, [option for option, value in single.items() if value])
    if events.challenger:
        if served.adapter or processes.prefill or processes.decode or len(model) > 1:
            raise ConfigError("--challenger", expected="one model, without adapters, --prefill and --decode")
        places.append(find_challenger(events.challenger, store, places[0]))
    search = None if server.search is None else open_sources(store, server.search, server.source_tokens)
    machine = probe(dtype=served.dtype, threads=served.threads)
    machine.apply()
    models, made = _load_models(places, machine, server, served, engine, processes)
    state = make_state(server, events, places, models, made, is_open=processes.no_auth)
    state.sources = search

    def ready(url: str) -> None:
        for one in state.models:
            print(f"serving {one.name}: context {one.max_model_len:,} tokens", file=sys.stderr)
        for ref in model:
            if ref.startswith("served/"):
                print(
                    f"{ref} was promoted; to return: whorl promote --rollback --name {ref[7:]}",
                    file=sys.stderr,
                )
        first = models[0]
        if isinstance(first, ServedModel) and not first.chat_template.is_trained:
            print("the model has no trained chat template: the page completes text", file=sys.stderr)

    try:
        run_server(state, listening, ready)
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
