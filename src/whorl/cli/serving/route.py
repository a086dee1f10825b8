"""`whorl route`: one address in front of servers that run already."""

from __future__ import annotations

from typing import Annotated

import typer


def route(
    urls: Annotated[
        list[str] | None, typer.Argument(metavar="URL...", help="Servers, as http://10.0.0.7:8000.")
    ] = None,
    discover: Annotated[
        str | None, typer.Option(metavar="NAME:PORT", help="Or a name that resolves to all their addresses.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8080,
    slo_ttft: Annotated[float | None, typer.Option(min=0, help="Promised seconds to the first byte.")] = None,
    slo_tpot: Annotated[float | None, typer.Option(min=0, help="Promised seconds between events.")] = None,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Requests that a server runs at once (for advice).")
    ] = 32,
    drain: Annotated[float, typer.Option(min=0, help="Seconds for what runs, once told to stop.")] = 30.0,
    admin_key_sha256: Annotated[
        str | None,
        typer.Option(envvar="WHORL_ADMIN_KEY_SHA256", metavar="HEX", help="Of the key for /v1/router/..."),
    ] = None,
) -> None:
    """Put one address in front of several servers of the same model.

    Requests go where the beginning of their prompt is cached, unless too much waits there. A server that fails is left
    alone for a while; one that is drained (/v1/router/drain) finishes what it has. /v1/router/advice says how many servers
    there should be, and why.

    Examples:

        whorl route http://10.0.0.7:8000 http://10.0.0.8:8000

        whorl route --discover whorl-replica:8000 --host 0.0.0.0

        curl -X POST localhost:8080/v1/router/drain -d '{"replica": "10.0.0.7:8000"}'
    """
    from whorl.errors import ConfigError

    try:
        from whorl.router.autoscaling_advice import AutoscalingConfig
        from whorl.router.discovery import dns_discovery
        from whorl.router.metrics import SLO
        from whorl.router.router import make_router, serve_router
    except ImportError as error:
        raise ConfigError(
            f"the server's parts are not installed ({error.name})",
            expected="the extra 'serve'",
            do="pip install 'whorl[serve]'",
        ) from error
    if bool(urls) == (discover is not None):
        raise ConfigError(
            "servers are given twice or not at all", expected="either URLs or --discover NAME:PORT"
        )
    wrong = [url for url in urls or () if not url.startswith(("http://", "https://"))]
    if wrong:
        raise ConfigError(f"{wrong[0]!r} is no server's address", expected="as http://10.0.0.7:8000")
    router = make_router(
        {url.split("://")[1].rstrip("/"): url for url in urls or ()},
        slo=SLO(slo_ttft, slo_tpot),
        autoscaling=AutoscalingConfig(max_num_seqs=max_num_seqs),
        admin_key_sha256=admin_key_sha256,
    )
    if discover is not None:
        router.outer_context = dns_discovery(router.pool, discover)
    serve_router(router, host, port, drain)
