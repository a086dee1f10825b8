"""Networks assembled from layers. A network knows no objective; the one that trains is the one that serves.

language.py       what every language model answers to: the one interface of trainer, engine and evaluation
decoder.py        the small model that quickstart trains, tuned as a whole
transformer.py    the general decoder: what published models are, by configuration; any mixer by name
encoder.py        texts to vectors;  resnet.py, vision.py  ResNet, ViT, MLP-Mixer;  bridges.py  CLIP, captioner
multi_token.py    heads that predict several tokens ahead
exchange/         folders of `transformers`, in and out
"""

from whorl.models.decoder import Decoder, DecoderConfig, DecoderState
from whorl.models.language_model import LanguageModel
from whorl.models.serialization import ModelConfig, load_model, make_model, read_config, save_model
from whorl.models.transformer import Transformer, TransformerConfig

__all__ = [
    "Decoder",
    "DecoderConfig",
    "DecoderState",
    "LanguageModel",
    "ModelConfig",
    "Transformer",
    "TransformerConfig",
    "load_model",
    "make_model",
    "read_config",
    "save_model",
]
