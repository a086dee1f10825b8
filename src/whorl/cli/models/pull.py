"""`whorl pull`: download a model from a hub of models into the store."""

from __future__ import annotations

from typing import Annotated

import typer

from whorl.cli.models.push import EndpointOption, RepoArgument, hub_errors
from whorl.cli.options import StoreOption


def pull(
    repo: RepoArgument,
    name: Annotated[
        str | None, typer.Option(help="Name in the store; default: that of the repository.")
    ] = None,
    endpoint: EndpointOption = None,
    store: StoreOption = None,
) -> None:
    """Download a model and import it, as `whorl import` does. Downloads are kept in the cache of huggingface_hub.

    Examples:

        whorl pull Qwen/Qwen3-0.6B

        whorl pull me/my-model --name mine
    """
    from whorl.cli.models.import_ import import_

    with hub_errors(repo, endpoint) as hub:
        files = ["*.json", "*.safetensors", "*.jinja", "*.txt"]  # no pickles, no code
        others = ["*/*", "consolidated*"]  # weights in further formats
        folder = hub.snapshot_download(
            repo, endpoint=endpoint, allow_patterns=files, ignore_patterns=others, library_name="whorl"
        )
    import_(folder, name=name or repo.rpartition("/")[2], store=store)
