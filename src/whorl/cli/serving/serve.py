"""`whorl serve`: a model over HTTP, with a chat page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from whorl.cli.options import StoreOption


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="An artifact (quickstart/pretrain), or a folder in the format of transformers.",
        ),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; other than this machine's, it requires keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 selects a free one.")] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Require the keys of this file, made by `whorl keys add`."),
    ] = None,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="No keys, even on a public address.")] = False,
    name: Annotated[
        str | None, typer.Option(help="Name of the model in the API; default: that of the artifact.")
    ] = None,
    embedder: Annotated[
        str | None, typer.Option(metavar="ARTIFACT", help="An embedder to serve with the model.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Maximum tokens of prompt and output; default: the model's.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Maximum number of running sequences.")] = 32,
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(min=1, help="Tokens per engine step; a smaller number bounds the delay by prefills."),
    ] = 512,
    kv_cache_memory: Annotated[
        float | None,
        typer.Option(
            metavar="GB", min=0.001, help="Memory of the KV cache; default: a quarter of the free memory."
        ),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Maximum number of waiting requests; further ones get status 503.")
    ] = 512,
    slo_ttft: Annotated[
        float, typer.Option(help="Target of the time to first token in seconds, for /metrics.")
    ] = 0.5,
    slo_tpot: Annotated[float, typer.Option(help="Target of the time per output token in seconds.")] = 0.1,
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds to finish running requests on shutdown.")
    ] = 30.0,
    weight_dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16, int8 or int4: weight format on a CPU; default: as loaded."),
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="model or int8: type of keys and values.")] = "model",
    prompt_lookup: Annotated[
        bool,
        typer.Option(help="Speculative decoding with n-grams of the context; does not change the output."),
    ] = False,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FOLDER", help="A LoRA adapter, served as model NAME; may be repeated."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; default: the faster one.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; default: the fastest number.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of requests without one.")] = 0,
    replicas: Annotated[
        int, typer.Option(min=1, help="Server processes with separate cores behind one router.")
    ] = 1,
    prefill: Annotated[
        int, typer.Option(min=0, help="Processes that compute prompts only; with it, --decode is at least 1.")
    ] = 0,
    decode: Annotated[
        int, typer.Option(min=0, help="Processes that generate only; with it, --prefill is at least 1.")
    ] = 0,
    manifest: Annotated[
        str | None, typer.Option(metavar="KIND", help="Print the manifest for kubernetes or ray and exit.")
    ] = None,
    store: StoreOption = None,
) -> None:
    """Serve a model: a chat page and an API compatible with OpenAI's.

    The page is at the printed address, the state of the engine at /engine. Ctrl-C finishes running requests first.

    Examples:

        whorl serve quickstart/pretrain

        whorl serve ./Qwen3-0.6B --max-model-len 8192 --kv-cache-memory 4 --weight-dtype int8

        whorl serve ./Qwen3-0.6B --adapter sql=./sql-lora

        curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"model": "pretrain", "prompt": "def "}'

        OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=none python -c "import openai; print(openai.models.list())"

    Open to a network, with keys and limits:

        whorl keys add alice --file keys.json --requests-per-minute 60

        whorl serve pretrain --host 0.0.0.0 --api-key-file keys.json

    On more cores or machines:

        whorl serve pretrain --replicas 4

        whorl serve pretrain --prefill 1 --decode 2

        whorl serve /models/pretrain --manifest kubernetes | kubectl apply -f -
    """
    try:
        from whorl.serve.server import bind_socket, check_auth_required
    except ImportError as error:
        from whorl.errors import ConfigError

        raise ConfigError(
            f"the dependencies of the server are not installed ({error.name})",
            expected="the extra 'serve'",
            do="pip install 'whorl[serve]'",
        ) from error
    if manifest is not None:
        from whorl.router.manifests import DeploymentSpec, manifest_for_command

        own = ("--manifest", "--replicas", "--max-num-seqs", "--drain", "--host", "--port")
        what = DeploymentSpec(
            model=model, replicas=replicas, max_num_seqs=max_num_seqs, drain_seconds=max(1, int(drain))
        )
        print(manifest_for_command(manifest, what, sys.argv[1:], own), end="")
        return
    from whorl.engine.engine import Engine
    from whorl.engine.speculative import PromptLookup
    from whorl.machine.device_probe import probe
    from whorl.serve.app_state import AppState
    from whorl.serve.config import ServeConfig
    from whorl.serve.server import run_server as run
    from whorl.serve.worker.disaggregated import DisaggregatedEngine
    from whorl.serve.worker.disaggregated_model import ModelEngineFactory, load_disaggregated_model
    from whorl.serve.worker.model_entry import ServedEmbedder, ServedModel
    from whorl.serve.worker.model_loading import ModelLocation, engine_config, load_embedder

    config = ServeConfig(
        host=host,
        port=port,
        key_file=api_key_file,
        slo_ttft=slo_ttft,
        slo_tpot=slo_tpot,
        max_queue=max_queue,
        drain_seconds=drain,
    )
    check_auth_required(config, no_auth)
    if replicas > 1:
        from whorl.router.metrics import SLO
        from whorl.router.replica_processes import drop_options, serve_replicas

        same = drop_options(sys.argv[1:], ("--replicas", "--host", "--port"))
        print(f"{replicas} replicas behind http://{host}:{port}", file=sys.stderr, flush=True)
        command, slo = [sys.executable, "-m", "whorl.cli", *same], SLO(slo_ttft, slo_tpot)
        keys_required = config.key_file is not None
        serve_replicas(command, replicas, host, port, grace=drain + 10, slo=slo, keys_required=keys_required)
        return
    listening = bind_socket(config)  # before the model is loaded, so that a used port is reported at once
    machine = probe(dtype=dtype, threads=threads)
    machine.apply()
    place = ModelLocation(model, store, name)
    models: list[ServedModel | ServedEmbedder] = []
    engine: Engine | DisaggregatedEngine | None = None
    if place.kind == "model" or prefill or decode:
        sizes = engine_config(
            {
                "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens, "seed": seed,
                "slo_tpot": slo_tpot, "weight_dtype": weight_dtype, "kv_cache_dtype": kv_cache_dtype,
            }
        )  # fmt: skip
        memory = None if kv_cache_memory is None else int(kv_cache_memory * 1e9)
        make = ModelEngineFactory(
            place, machine, sizes, max_model_len, memory, tuple(adapter or ()), PromptLookup() if prompt_lookup else None
        )  # fmt: skip
        writers, engine = (
            load_disaggregated_model(make, prefill, decode) if prefill or decode else make.load()
        )
        models += writers
    else:
        models.append(load_embedder(place, machine))
    if embedder is not None:
        models.append(load_embedder(ModelLocation(embedder, store), machine))

    def ready(url: str) -> None:
        first = models[0]
        print(f"serving {first.name}: context {first.max_model_len:,} tokens", file=sys.stderr)
        if isinstance(first, ServedModel) and not first.chat_template.is_trained:
            print("the model has no trained chat template: the page completes text", file=sys.stderr)
        print(f"page    {url}/", file=sys.stderr)
        print(f"engine  {url}/engine", file=sys.stderr)
        print(f"API     {url}/v1", file=sys.stderr, flush=True)

    try:
        run(AppState(config, models, engine), listening, ready)
    finally:
        if isinstance(engine, DisaggregatedEngine):
            engine.close()
