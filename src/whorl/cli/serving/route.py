"""`whorl route`: a router in front of running servers."""

from __future__ import annotations

from typing import Annotated

import typer

from whorl.cli.options import serve_extra


def route(
    urls: Annotated[
        list[str] | None, typer.Argument(metavar="URL...", help="Servers, e.g. http://10.0.0.7:8000.")
    ] = None,
    discover: Annotated[
        str | None, typer.Option(metavar="NAME:PORT", help="Or a DNS name that resolves to all addresses.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8080,
    slo_ttft: Annotated[
        float | None, typer.Option(min=0, help="Target of the time to the first byte, in seconds.")
    ] = None,
    slo_tpot: Annotated[
        float | None, typer.Option(min=0, help="Target of the time between events, in seconds.")
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Concurrent requests per server, for the scaling advice.")
    ] = 32,
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds to finish running requests on shutdown.")
    ] = 30.0,
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Use servers without API keys although --host is public.")
    ] = False,
    admin_key_sha256: Annotated[
        str | None,
        typer.Option(
            envvar="WHORL_ADMIN_KEY_SHA256", metavar="HEX", help="SHA-256 of the key for /v1/router/..."
        ),
    ] = None,
) -> None:
    """Route requests to several servers of the same model.

    A request goes to the server that has the start of its prompt in its cache, unless that server's queue is too long. A
    failing server gets no requests for a while. A drained one (/v1/router/drain) finishes its running requests.
    /v1/router/advice returns the recommended number of servers and the reason. On an address that other machines reach, only
    servers with API keys are used, unless --no-auth is given.

    Examples:

        whorl route http://10.0.0.7:8000 http://10.0.0.8:8000

        whorl route --discover whorl-replica:8000 --host 0.0.0.0

        curl localhost:8080/v1/router/drain -H 'content-type: application/json' -d '{"replica": "10.0.0.7:8000"}'
    """
    from whorl.errors import ConfigError

    with serve_extra():
        from whorl.router.autoscaling_advice import AutoscalingConfig
        from whorl.router.discovery import dns_discovery, parse_host_port
        from whorl.router.metrics import SLO
        from whorl.router.router import make_router, serve_router
    if bool(urls) == (discover is not None):
        raise ConfigError(
            "both URLs and --discover were given, or neither", expected="either URLs or --discover NAME:PORT"
        )
    invalid = [url for url in urls or () if not url.startswith(("http://", "https://"))]
    if invalid:
        raise ConfigError(
            f"{invalid[0]!r} is not the address of a server", expected="e.g. http://10.0.0.7:8000"
        )
    if discover is not None:
        parse_host_port(discover)  # before the router starts
    router = make_router(
        {url.split("://")[1].rstrip("/"): url for url in urls or ()},
        slo=SLO(slo_ttft, slo_tpot),
        autoscaling=AutoscalingConfig(max_num_seqs=max_num_seqs),
        admin_key_sha256=admin_key_sha256,
    )
    if discover is not None:
        router.outer_context = dns_discovery(router.pool, discover)
    serve_router(router, host, port, drain, no_auth=no_auth)
