"""Methods by name, and their settings from a recipe or a command line."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from whorl.errors import ConfigError, example_setting, one_of
from whorl.generative.methods.ddpm import DDPM
from whorl.generative.methods.flow import Flow
from whorl.generative.methods.method import GenerativeConfig, GenerativeMethod
from whorl.generative.methods.score import ScoreMatching

METHODS: dict[str, type[GenerativeMethod]] = {"ddpm": DDPM, "flow": Flow, "score": ScoreMatching}


def parse_config(method: str, changes: Mapping[str, object]) -> GenerativeConfig:
    """Return a method's settings with changes by field.

    Raises:
        ConfigError: unknown method or field, or an invalid value.
    """
    if method not in METHODS:
        raise ConfigError(f"unknown method {method!r}", expected=one_of(method, list(METHODS)))
    config_type = METHODS[method].Config
    known = [name for name in config_type.model_fields if name != "method"]
    for name in changes:
        if name not in known:
            raise ConfigError(f"unknown setting {name!r} of {method}", expected=one_of(name, known))
    try:
        return config_type.model_validate(changes)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the settings"
        example = example_setting(config_type, first)
        raise ConfigError(
            f"{where}: {first['msg'].removeprefix('Value error, ')}",
            expected=f"for example {example}" if example else "",
        ) from error
