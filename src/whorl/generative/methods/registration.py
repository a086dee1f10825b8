"""Methods by name, and their settings from a recipe or a command line."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from whorl.errors import ConfigError, one_of, settings_error
from whorl.generative.methods.ddpm import DDPM
from whorl.generative.methods.flow import Flow
from whorl.generative.methods.gan import GAN
from whorl.generative.methods.method import GenerativeConfig, GenerativeMethod
from whorl.generative.methods.pix2pix import Pix2Pix
from whorl.generative.methods.score import ScoreMatching
from whorl.generative.methods.vae import AE, VAE
from whorl.generative.methods.vqvae import VQVAE

METHODS: dict[str, type[GenerativeMethod]] = {
    "ae": AE, "vae": VAE, "vqvae": VQVAE, "gan": GAN, "pix2pix": Pix2Pix,
    "ddpm": DDPM, "score": ScoreMatching, "flow": Flow,
}  # fmt: skip


def parse_config(method: str, changes: Mapping[str, object]) -> GenerativeConfig:
    """Return a method's settings with changes by field.

    Raises:
        ConfigError: unknown method or field, or an invalid value.
    """
    if method not in METHODS:
        raise ConfigError(f"unknown method {method!r}", expected=one_of(method, list(METHODS)))
    config_type = METHODS[method].Config
    try:
        return config_type.model_validate({**changes, "method": method})
    except ValidationError as error:
        do = f"see `whorl gen methods {method}`"
        raise settings_error(error.errors()[0], method, config_type, do) from error
