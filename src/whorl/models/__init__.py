"""Networks assembled from the layers of `nn`. The same network trains, generates and serves; none depends on an objective.

language_model.py             the interface of every language model
decoder.py                    `Decoder`, the small model of the quickstart recipe
transformer.py                `Transformer`, the configurable decoder for published architectures
encoder.py                    texts to vectors
multi_token.py                heads that predict several tokens ahead
vision/                       ViT, MLP-Mixer, ResNet, CLIP, Flamingo captioner
lora.py, pruning/, quantization/   adapters and compression
exchange/                     import from and export to Hugging Face and GGUF
serialization.py              saving and loading
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
