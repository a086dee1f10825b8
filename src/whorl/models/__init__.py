"""Networks assembled from the layers of `nn`. The same network trains, generates and serves; none depends on an objective.

language_model.py             the interface of every language model
transformer.py                `Transformer`, the decoder: the project's own (`whorl_decoder`) and published architectures
encoder.py                    texts to vectors
multi_token.py                heads that predict several tokens ahead
vision/                       ViT, MLP-Mixer, ResNet, CLIP, Flamingo captioner
lora.py, compression/         adapters and compression
exchange/                     import from and export to Hugging Face and GGUF
serialization.py              saving and loading
"""

from whorl.models.language_model import LanguageModel
from whorl.models.serialization import load_model, make_model, read_config, save_model
from whorl.models.transformer import Transformer, TransformerState
from whorl.models.transformer_config import TransformerConfig, whorl_decoder

__all__ = [
    "LanguageModel",
    "Transformer",
    "TransformerConfig",
    "TransformerState",
    "load_model",
    "make_model",
    "read_config",
    "save_model",
    "whorl_decoder",
]
