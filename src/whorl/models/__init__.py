"""Networks assembled from layers. A network knows no objective; the one that trains is the one that serves.

decoder.py        the small model that quickstart trains, tuned as a whole
transformer.py    the general decoder: what published models are, by configuration; any mixer by name
encoder.py        texts to vectors;  resnet.py, vision.py  ResNet, ViT, MLP-Mixer;  bridges.py  CLIP, captioner
multi_token.py    heads that predict several tokens ahead
exchange/         folders of `transformers`, in and out
"""

from whorl.models.decoder import Cache, Decoder, DecoderConfig
from whorl.models.files import load_decoder, read_config, save_decoder

__all__ = ["Cache", "Decoder", "DecoderConfig", "load_decoder", "read_config", "save_decoder"]
