"""`whorl keys`: API keys of a server, with rate limits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

File = Annotated[Path, typer.Option("--file", metavar="FILE", help="File with the hashes of the keys.")]
DEFAULT = Path("whorl-keys.json")


def add(
    name: Annotated[str, typer.Argument(help="Name of the owner.")],
    file: File = DEFAULT,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Default: no limit.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Prompt and output tokens together; default: no limit.")
    ] = None,
    min_priority: Annotated[
        int, typer.Option(min=-1000, max=1000, help="Lowest priority of its requests; lower is served first.")
    ] = 0,
) -> None:
    """Make a key. It is shown only now; the file keeps its hash.

    Examples:

        whorl keys add alice

        whorl keys add bob --requests-per-minute 60 --tokens-per-minute 100000
    """
    from whorl.serve.middleware.auth import KeyFile

    key = KeyFile(file).add(name, requests_per_minute, tokens_per_minute, min_priority)
    print(f"key of {name}, shown only now (serve with --api-key-file {file}):", file=sys.stderr)
    print(key)


def list(file: File = DEFAULT) -> None:
    """List the keys by id and name, with their limits.

    Examples:

        whorl keys list --file keys.json
    """
    from whorl.cli.options import format_time
    from whorl.errors import ConfigError
    from whorl.serve.middleware.auth import KeyFile

    if not file.exists():
        raise ConfigError(f"there is no key file {file}", do=f"make a key: whorl keys add NAME --file {file}")
    for key in KeyFile(file).read():
        limits = [
            f"{limit:,} {what}/min"
            for limit, what in ((key.requests_per_minute, "requests"), (key.tokens_per_minute, "tokens"))
            if limit is not None
        ]
        print(f"{key.id}  {format_time(key.created)}  {key.name}  {', '.join(limits) or 'no limit'}")


def revoke(
    which: Annotated[str, typer.Argument(metavar="NAME", help="Name or id of the key.")], file: File = DEFAULT
) -> None:
    """Revoke a key; a running server applies it within a second.

    Examples:

        whorl keys revoke alice
    """
    from whorl.serve.middleware.auth import KeyFile

    key = KeyFile(file).revoke(which)
    print(f"revoked {key.name} ({key.id})", file=sys.stderr)
