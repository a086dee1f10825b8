"""`whorl push`: upload a model of the store to a hub of models."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from whorl.cli.options import RefArgument, StoreOption, open_artifact

RepoArgument = Annotated[str, typer.Argument(metavar="REPO", help="USER/NAME on the hub.")]
EndpointOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Address of the hub; else $HF_ENDPOINT, else huggingface.co."),
]


def push(
    artifact: RefArgument,
    repo: RepoArgument,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default: unchanged.")
    ] = None,
    endpoint: EndpointOption = None,
    store: StoreOption = None,
) -> None:
    """Upload a model as `whorl export --to hf` writes it. The repository is created if it does not exist.

    Log in first: `hf auth login`, or HF_TOKEN.

    Examples:

        whorl push chat/sft me/my-model

        whorl push chat/sft me/my-model --private --dtype bfloat16
    """
    from whorl.cli.models.export import write_hf_folder

    found = open_artifact(artifact, store, ("model", "vision"), "a model")
    found.check()
    with hub_errors(repo, endpoint) as hub, tempfile.TemporaryDirectory(prefix="whorl-push-") as temp:
        api, folder = hub.HfApi(endpoint=endpoint, library_name="whorl"), Path(temp) / "model"
        write_hf_folder(found, folder, dtype=dtype)
        url = api.create_repo(repo, private=private or None, exist_ok=True)
        old = ["*.safetensors", "*.safetensors.index.json"]  # which the new weights may not overwrite
        note = f"{found.name} by whorl push"
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=note, delete_patterns=old)
    print(url)


@contextmanager
def hub_errors(repo: str, endpoint: str | None) -> Iterator[Any]:
    """Yield `huggingface_hub`, and raise its errors about a repository as errors of this package.

    Raises:
        ConfigError: the extra is not installed; the repository does not exist or its name is invalid; no permission.
        StoreError: the hub cannot be reached, or it fails.
    """
    from whorl.errors import ConfigError, StoreError, shorten

    try:
        import huggingface_hub as hub

        errors: Any = importlib.import_module("huggingface_hub.errors")
    except ImportError as error:
        raise ConfigError(
            "the package huggingface_hub is not installed",
            expected="the extra 'hub'",
            do="pip install 'whorl[hub]'",
        ) from error
    place = hub.HfApi(endpoint=endpoint).endpoint
    login = "log in with `hf auth login`, or set HF_TOKEN to a token that may {} it"
    try:
        yield hub
    except errors.HFValidationError as error:
        raise ConfigError(f"the repository {repo!r}: {shorten(str(error))}", expected="USER/NAME") from error
    except errors.RepositoryNotFoundError as error:  # 401 and 404, and a gated one
        gated = f"{repo} is gated" if isinstance(error, errors.GatedRepoError) else ""
        raise ConfigError(
            gated or f"there is no repository {repo} at {place}, or it is private", expected="USER/NAME of a model",
            do=f"see {place}/{repo}; " + login.format("read"),
        ) from error  # fmt: skip
    except (errors.HTTPError, errors.LocalTokenNotFoundError, errors.LocalEntryNotFoundError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403) or isinstance(error, errors.LocalTokenNotFoundError):
            raise ConfigError(f"{place} refuses access to {repo}", do=login.format("write")) from error
        raise StoreError(
            f"{place} {'cannot be reached' if status is None else 'fails'}: {shorten(str(error))}",
            expected="a network, and the address of a hub (--endpoint, HF_ENDPOINT)",
        ) from error
