"""The command line: one file per verb, registered here.

A verb is a module of this folder with a function of the same name, whose docstring is its help. What a verb
needs is imported inside its function, so that `whorl --help` answers at once.

An error that the user can mend is printed as its message on standard error, with its exit code; Ctrl-C says
that the same command continues (130); anything else is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from keyword import iskeyword
from typing import Any

import typer

from whorl.errors import WhorlError

VERBS = {
    "run": "jobs",
    "profile": "jobs",
    "sample": "models",
    "serve": "serving",
    "route": "serving",
    "embed": "models",
    "report": "jobs",
    "recipes": "jobs",
    "ls": "artifacts",
    "show": "artifacts",
    "lineage": "artifacts",
    "verify": "artifacts",
    "gc": "artifacts",
    "import": "models",
    "export": "models",
    "bench-serve": "serving",
    "quantize": "models",
    "eval-scaling": "models",
}  # verb -> the folder of its module
GROUPS = {
    "rl": ("jobs", ("train", "environments")),
    "keys": ("serving", ("add", "list", "revoke")),
}  # verbs of one subject: `whorl rl train`

HELP = """From a folder of raw bytes to a language model that is trained, measured and explained.

A first model, from the Python standard library, in about ten minutes:

    whorl run quickstart

Everything made is kept in a store (.whorl here, $WHORL_HOME, or --store) and looked up when asked for again.
"""


def with_error_handling(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb with its errors turned into messages and exit codes."""

    @functools.wraps(verb)
    def call(*args: Any, **options: Any) -> None:
        try:
            verb(*args, **options)
        except WhorlError as error:
            sys.stdout.flush()
            print(f"whorl: {error}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt:
            print("\ninterrupted; the same command continues", file=sys.stderr)
            raise typer.Exit(130) from None
        except BrokenPipeError:  # the reader (head, less) has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None

    return call


def build_app() -> typer.Typer:
    """The command line with every verb."""
    app = typer.Typer(
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_version)
    for name, folder in VERBS.items():
        inside = name.replace("-", "_") + "_" * iskeyword(name)  # `import` is no name for a module
        module = importlib.import_module(f"whorl.cli.{folder}.{inside}")
        app.command(name)(with_error_handling(getattr(module, inside)))
    for group, (folder, verbs) in GROUPS.items():
        module = importlib.import_module(f"whorl.cli.{folder}.{group}")
        inner = typer.Typer(help=module.__doc__, no_args_is_help=True, rich_markup_mode=None)
        for name in verbs:
            inner.command(name)(with_error_handling(getattr(module, name)))
        app.add_typer(inner, name=group)
    return app


def _version(
    version: bool = typer.Option(False, "--version", help="Show the version and leave.", is_eager=True),
) -> None:
    if version:
        import whorl

        print(f"whorl {whorl.__version__}")
        raise typer.Exit


def main() -> None:
    """The entry point of the command `whorl`."""
    build_app()()
