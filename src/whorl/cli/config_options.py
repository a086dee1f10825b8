"""Options of a verb from pydantic models: one for each field, with its description as help, its default and its bounds.

    def _configs() -> Configs:
        from whorl.serve.config import ServeConfig

        return {"server": (ServeConfig, ())}                    # or (ServeConfig, ("host", "port")) for some fields

    @config_options(_configs)
    def serve(model: str, *, server: ServeConfig) -> None: ...

`json_schema_extra` of a field may have `option` (its names, if not --FIELD), `metavar` and `envvar`. A boolean field is a
flag.

The models are imported, and the options made, when the verb itself is used: importing pydantic takes longer than running
`whorl --help`.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

Configs = Mapping[str, tuple[type["BaseModel"], tuple[str, ...]]]  # parameter -> (model, fields; none: all)


def config_options(configs: Callable[[], Configs]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator of a verb whose parameters named in `configs()` are pydantic models.

    The decorated verb has no parameters; `with_options` of it has them, for `expand`.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        def later() -> None:
            raise RuntimeError("expand(verb) makes the command of this verb")

        later.__doc__, later.__name__, later.__module__ = verb.__doc__, verb.__name__, verb.__module__
        vars(later)["with_options"] = lambda: _with_options(verb, configs())
        return later

    return decorate


def expand(verb: Callable[..., None]) -> Callable[..., None]:
    """Return a verb with its options, made now if it is decorated by `config_options`."""
    make = getattr(verb, "with_options", None)
    return verb if make is None else typing.cast("Callable[..., None]", make())


def _with_options(verb: Callable[..., None], configs: Configs) -> Callable[..., None]:
    names = {model.__name__: model for model, _ in configs.values()}
    hints = typing.get_type_hints(verb, localns=names, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(verb).parameters.items():
        if name not in configs:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        model, fields = configs[name]
        parameters += [_parameter(field, model.model_fields[field]) for field in fields or model.model_fields]

    @functools.wraps(verb)
    def call(**given: Any) -> None:
        made = {
            name: _validated(model, {field: given.pop(field) for field in fields or model.model_fields})
            for name, (model, fields) in configs.items()
        }
        verb(**given, **made)

    vars(call)["__signature__"] = inspect.Signature(parameters)
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _validated(model: type[BaseModel], given: Mapping[str, Any]) -> BaseModel:
    """Return the model of the options that were given.

    Raises:
        ConfigError: names the first invalid option.
    """
    from pydantic import ValidationError

    from whorl.errors import ConfigError

    try:
        return model.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:
            raise ConfigError(message) from error
        option = option_names(str(first["loc"][0]), model.model_fields[str(first["loc"][0])])[0]
        raise ConfigError(
            f"{option} is {first['input']!r}", expected=f"{message[:1].lower()}{message[1:]}"
        ) from error


def option_names(name: str, field: FieldInfo) -> list[str]:
    """Return the names of a field's option: `--max-queue`, or those that the field gives."""
    given = _extra(field).get("option")
    return list(given) if given else [f"--{name.replace('_', '-')}"]


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return the parameter of one field, with typer's option as its annotation."""
    kind: Any = _base_type(field.annotation)
    extra = _extra(field)
    options: dict[str, Any] = {key: extra[key] for key in ("metavar", "envvar") if key in extra}
    default = field.get_default(call_default_factory=True)
    if typing.get_origin(kind) in (list, tuple):
        kind, default = types.GenericAlias(list, typing.get_args(kind)[:1]), None
    if kind in (int, float):
        for bound in field.metadata:
            if (lowest := getattr(bound, "ge", None)) is not None:
                options["min"] = lowest
            if (above := getattr(bound, "gt", None)) is not None and kind is int:
                options["min"] = above + 1
            if (highest := getattr(bound, "le", None)) is not None:
                options["max"] = highest
    option = typer.Option(*option_names(name, field), help=_sentence(field.description or ""), **options)
    annotated: Any = Annotated
    annotation = annotated[kind if default is not None else kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _extra(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def _base_type(annotation: Any) -> Any:
    """Return the type of an optional one."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        (annotation,) = (kind for kind in typing.get_args(annotation) if kind is not type(None))
    return annotation


def _sentence(description: str) -> str:
    """Return a description as help: the first letter in upper case, and a full stop."""
    end = "" if description.endswith((".", "?")) or not description else "."
    return f"{description[:1].upper()}{description[1:]}{end}"
