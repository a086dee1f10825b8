"""The command line: one file per verb, registered here.

A verb is a function in a module of the same name; its docstring is the help text. Verbs import what they need inside the
function, so that `whorl --help` starts fast.

A WhorlError is printed to standard error as a message, with its exit code. Ctrl-C exits with 130; the same command then
continues the run. Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import errno
import functools
import importlib
import io
import os
import sys
import warnings
from collections.abc import Callable
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from whorl.cli.config_options import expand
from whorl.errors import WhorlError, shorten

VERBS = {
    "run": "jobs",
    "launch": "jobs",
    "profile": "jobs",
    "machine": "jobs",
    "sample": "models",
    "serve": "serving",
    "loop": "serving",
    "watch": "serving",
    "route": "serving",
    "search": "serving",
    "embed": "models",
    "classify": "models",
    "caption": "models",
    "report": "jobs",
    "runs": "jobs",
    "recipes": "jobs",
    "ls": "artifacts",
    "show": "artifacts",
    "lineage": "artifacts",
    "verify": "artifacts",
    "gc": "artifacts",
    "import": "models",
    "export": "models",
    "push": "models",
    "pull": "models",
    "bench-serve": "serving",
    "simulate-raters": "serving",
    "promote": "serving",
    "forget": "serving",
    "quantize": "models",
    "eval": "models",
}  # verb -> the folder of its module
GROUPS = {
    "rl": ("jobs", ("train", "solve", "compare", "record", "match", "play", "methods", "environments")),
    "gen": ("jobs", ("train", "sample", "compare", "methods")),
    "plan": ("plan", ("show", "fit", "law", "study", "audit")),
    "log": ("jobs", ("info", "tail", "replay", "copy", "trim")),
    "keys": ("serving", ("add", "list", "revoke")),
    "arena": ("serving", ("serve", "judge", "table", "page", "export")),
    "corpus": (
        "jobs",
        (
            "ingest",
            "rewrite",
            "filter",
            "dedup",
            "decontaminate",
            "mix",
            "train-classifier",
            "train-perplexity",
            "train-importance",
            "stats",
            "show",
            "why",
        ),
    ),
}  # verbs of one subject: `whorl rl train`

HELP = """From a folder of raw bytes to a language model that is trained, measured and explained.

A first model, from the Python standard library, in about ten minutes:

    whorl run quickstart

Artifacts are kept in a store (./.whorl, $WHORL_HOME, or --store). A step that is in the store already is not run again.

Exit codes: 0 done; 2 a command, option, recipe or setting is wrong; 1 any other error, e.g. an artifact or run that does not
exist; 74 or 75 a process was lost, 130 (Ctrl-C) and 143 (SIGTERM) stopped: the same command continues.
"""


class _Command(TyperCommand):
    """A verb. Options from pydantic models are made at its first use."""

    expanded = False

    def get_params(self, ctx: Any) -> list[Any]:
        if not self.expanded and self.callback is not None and hasattr(self.callback, "with_options"):
            app = typer.Typer(add_completion=False, rich_markup_mode=None)
            app.command()(with_error_handling(expand(self.callback)))
            made = typer.main.get_command(app)
            self.params, self.callback = made.params, made.callback
        self.expanded = True
        return super().get_params(ctx)


def with_error_handling(verb: Callable[..., None]) -> Callable[..., None]:
    """Wrap a verb: turn its errors into messages and exit codes."""

    @functools.wraps(verb)
    def call(*args: Any, **options: Any) -> None:
        try:
            Path.cwd()
        except FileNotFoundError:
            print(
                "whorl: the working directory does not exist any more\n  do: change to another one",
                file=sys.stderr,
            )
            raise typer.Exit(2) from None
        try:
            verb(*args, **options)
        except WhorlError as error:
            sys.stdout.flush()
            print(f"whorl: {error}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt:
            print("\ninterrupted; the same command continues", file=sys.stderr)
            raise typer.Exit(130) from None
        except BrokenPipeError:  # the reader of the pipe (head, less) has closed it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            print(
                f"whorl: {shorten(repr(error.filename))}: {error.strerror}\n  do: shorten it", file=sys.stderr
            )
            raise typer.Exit(2) from error

    return call


def build_app() -> typer.Typer:
    """Return the command line with every verb."""
    app = typer.Typer(
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback(invoke_without_command=True)(_global_options)  # `--version` needs no verb
    for name, folder in VERBS.items():
        inside = name.replace("-", "_") + "_" * iskeyword(name)  # `import` cannot name a module
        module = importlib.import_module(f"whorl.cli.{folder}.{inside}")
        settings = getattr(module, "CONTEXT", None)  # of click
        app.command(name, cls=_Command, context_settings=settings)(
            with_error_handling(getattr(module, inside))
        )
    for group, (folder, verbs) in GROUPS.items():
        module = importlib.import_module(f"whorl.cli.{folder}" + f".{group}" * (folder != group))
        about = str(module.__doc__).replace("\n\n    ", "\n\n\b\n    ")  # examples keep their lines
        inner = typer.Typer(help=about, no_args_is_help=True, rich_markup_mode=None)
        for name in verbs:
            inner.command(name, cls=_Command)(with_error_handling(getattr(module, name.replace("-", "_"))))
        app.add_typer(inner, name=group)
    return app


def _global_options(
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
    code: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:ATTRIBUTE", help="Code that records, task files and model folders may name."
        ),
    ] = None,
) -> None:
    from whorl.registry import permit_code

    with_error_handling(permit_code)(*code or ())
    if version:
        from importlib.metadata import version as installed

        print(f"whorl {installed('whorl')}")
        raise typer.Exit


def main() -> None:
    """Run the command `whorl`. Names of the form "module:attribute" may name files of the working directory."""
    sys.path.append("")
    warnings.formatwarning = _format_warning
    if missing := _open_standard_streams():
        print(f"whorl: {missing} is closed\n  do: open it, for example to /dev/null", file=sys.stderr)
        raise SystemExit(1)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character gets its escape
            stream.reconfigure(errors="backslashreplace")
    code: str | int | None = 0
    try:
        try:
            build_app()()
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or not _stdout_is_broken():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"whorl: standard output cannot be written: {error.strerror}", file=sys.stderr)
        code = 1
    raise SystemExit(code)


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"whorl: warning: {message}\n"


def _open_standard_streams() -> str:
    """Open closed standard streams, so that no file gets their numbers; return "standard output" if that was closed.

    A closed standard input remains None in `sys`: verbs that read it refuse.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    return "" if sys.stdout is not None else "standard output"


def _stdout_is_broken() -> bool:
    """Return whether standard output cannot be written, by writing the end of a line."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return True
    return False
