"""Networks assembled from layers. A network knows no objective; the one that trains is the one that serves."""

from whorl.models.decoder import Cache, Decoder, DecoderConfig
from whorl.models.files import load_decoder, read_config, save_decoder

__all__ = ["Cache", "Decoder", "DecoderConfig", "load_decoder", "read_config", "save_decoder"]
