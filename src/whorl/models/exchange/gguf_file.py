"""GGUF export: one file with configuration, weights and vocabulary for llama.cpp and programs based on it.

    export_gguf(model, Path("mine.gguf"), source=Path("folder-with-tokenizer"), kind="q8_0")

`architecture.py` selects the architecture and writes its numbers, `vocabulary.py` the vocabulary. This file writes the
tensors. The rules of the families give Hugging Face's names, and the `gguf` package maps them. The remaining conversions:

- llama rotates adjacent features (2 i, 2 i + 1), so rows of queries and keys are reordered; the other architectures use
  the half-split layout. DeepSeek's features are adjacent on both sides.
- Norms of Gemma hold 1 + weight. GPT-2's matrices are [d_out, d_in] here. Experts are one tensor per layer,
  [E, d_out, d_in].
- DeepSeek's `kv_b` is split, per head, into the part of the keys, transposed, and that of the values: llama.cpp computes
  with the latent, as `nn/attention/mla.py` does in decoding.
- Llama 3's rotary scaling is a tensor of divisors, one per wave.

Norms, vectors, routers and learned positions are fp32, as llama.cpp requires. `gguf_types.py` has the types of matrices.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl.errors import ConfigError, one_of
from whorl.models.exchange.gguf_architecture import GGUFModel, attention_configs, write_fields
from whorl.models.exchange.gguf_types import (
    FILE_TYPES,
    TYPE_OF,
    fallback_note,
    to_bytes,
    type_of_matrix,
)
from whorl.models.exchange.gguf_vocabulary import read_vocabulary
from whorl.models.exchange.rules import ConversionRule
from whorl.models.language_model import LanguageModel
from whorl.models.transformer import Transformer
from whorl.models.transformer_config import AttentionConfig, MLAConfig
from whorl.nn.rotary import rotary_frequencies, to_interleaved

State = Mapping[str, Tensor]
Make = Callable[[State], Tensor]
FP32_TENSORS = ("ffn_gate_inp.", "position_embd.", "rope_freqs.")


def export_gguf(
    model: LanguageModel, file: Path, *, source: Path | None = None, kind: str | None = None,
    turn_end: int | None = None, template: str | None = None,
) -> None:  # fmt: skip
    """Write a model as one GGUF file. Memory: one tensor in addition to the model.

    Args:
        source: a folder with `tokenizer.json`; special ids are read from `tokenizer_config.json`,
            `generation_config.json` and `config.json` in it. None for a file without a vocabulary.
        turn_end: the id that ends a turn of a chat (`eot`).
        template: the chat template; None takes that of the folder.
        kind: of the matrices, where their rows allow it (a warning names the others); None keeps each unchanged.

    Raises:
        ConfigError: llama.cpp has no such network (the error names the field); the tokenizer has no GGUF form; `file`
            exists; a weight is too large for float16; the `gguf` package is missing.
        CheckpointError: a file of the tokenizer is missing or damaged.
    """
    gguf = _library()
    if not isinstance(model, Transformer):
        raise ConfigError(
            f"the model is a {type(model).__name__}",
            expected="a Transformer",
        )
    if file.exists():
        raise ConfigError(f"{file} exists", expected="a new file", do="name another, or remove it first")
    if kind is not None and kind not in FILE_TYPES:
        raise ConfigError(f"the type of a GGUF file is {kind!r}", expected=one_of(kind, list(FILE_TYPES)))
    shape = GGUFModel.from_config(model.config)
    vocabulary = read_vocabulary(source, model.config.vocab_size, turn_end)
    vocabulary.chat_template = template or vocabulary.chat_template
    own = model.state_dict()
    makes = dict(_Tensors(gguf, shape).items())
    empty = {name: torch.empty(t.shape, device="meta", dtype=t.dtype) for name, t in own.items()}
    sizes = {name: make(empty) for name, make in makes.items()}
    kinds = {name: _kind(name, t, kind) for name, t in sizes.items()}
    if strange := set(kinds.values()) - FILE_TYPES.keys():
        raise ConfigError(f"weights are {strange.pop()}", expected=" or ".join(FILE_TYPES), do="pass `kind`")
    if kind is not None and (note := fallback_note(kinds, kind)):
        warnings.warn(note, stacklevel=2)

    draft = file.with_name(f".{file.name}.{os.getpid()}.partial")
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(draft, shape.architecture)
    try:
        writer.add_name(file.stem)
        writer.add_file_type(FILE_TYPES[kind or TYPE_OF[own["embedding"].dtype]])
        write_fields(writer, shape)
        vocabulary.add_to(writer)
        for name, made in kinds.items():
            raw, size = gguf.GGMLQuantizationType[made.upper()], sizes[name]
            block, block_bytes = gguf.GGML_QUANT_SIZES[raw]
            n_bytes = size.numel() // block * block_bytes
            writer.add_tensor_info(name, list(size.shape), np.dtype("f4"), n_bytes, raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, make in makes.items():
            writer.write_tensor_data(to_bytes(gguf, name, make(own).detach().cpu(), kinds[name]))
        writer.close()
        draft.rename(file)
    finally:
        writer.close()
        draft.unlink(missing_ok=True)


def _library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            "the package `gguf` is not installed",
            expected="the writer of GGUF files",
            do="pip install gguf",
        ) from error
    return gguf


def _kind(name: str, tensor: Tensor, kind: str | None) -> str:
    """Return the type that a tensor is written in."""
    if tensor.dim() == 1 or any(part in name for part in FP32_TENSORS):
        return "f32"
    return (
        TYPE_OF.get(tensor.dtype, str(tensor.dtype)) if kind is None else type_of_matrix(name, tensor, kind)
    )


class _Tensors:
    """GGUF's tensors: name -> function that makes it."""

    def __init__(self, gguf: Any, shape: GGUFModel) -> None:
        self.shape, self.config = shape, shape.config
        arch = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[shape.architecture]
        self._names = gguf.get_tensor_name_map(arch, shape.config.n_layers)

    def items(self) -> Iterator[tuple[str, Make]]:
        """Return (name, function) of each tensor, in the order of the file."""
        parts: dict[str, list[Make]] = {}
        for rule in self.shape.family.rules(self.config):
            for n, theirs in enumerate(rule.hf_names):
                merged = re.sub(r"\.experts\.\d+\.", ".experts.", theirs)
                parts.setdefault(merged, []).append(self._converted(rule, n, theirs))
        for theirs, makes in parts.items():
            if theirs.endswith("kv_b_proj.weight"):
                layer = int(theirs.split(".")[2])
                yield f"blk.{layer}.attn_k_b.weight", lambda own, make=makes[0]: self._kv(make(own))[0].mT  # type: ignore[misc]
                yield f"blk.{layer}.attn_v_b.weight", lambda own, make=makes[0]: self._kv(make(own))[1]  # type: ignore[misc]
            elif len(makes) > 1 or ".experts." in theirs:
                yield self._name(theirs), lambda own, makes=makes: torch.stack([m(own) for m in makes])  # type: ignore[misc]
            else:
                yield self._name(theirs), makes[0]
        if self.config.tie_embeddings and self.shape.architecture == "qwen2moe":
            yield "output.weight", lambda own: own["embedding"]
        heads = attention_configs(self.config)
        rope = heads[0].rope if heads else None
        if rope is not None and rope.scaling is not None and rope.scaling.kind == "llama3":
            plain, stretched = (
                rotary_frequencies(heads[0].head_dim, rope.base, s) for s in (None, rope.scaling)
            )
            yield "rope_freqs.weight", lambda own: plain / stretched

    def _name(self, theirs: str) -> str:
        stem, _, suffix = theirs.rpartition(".")
        if theirs.endswith("e_score_correction_bias"):
            stem, suffix = theirs.removesuffix("_bias"), "bias"
        name = self._names.get_name(stem)
        assert name is not None, theirs  # every family in ARCHITECTURES is tested
        return f"{name}.{suffix}"

    def _converted(self, rule: ConversionRule, n: int, theirs: str) -> Make:
        """Return tensor `n` of a rule, in GGUF's form."""
        finish = self._to_gguf(theirs)

        def make(own: State) -> Tensor:
            ours = [own[name] for name in rule.names]
            out: Tensor = finish(rule.to_hf([t.float() for t in ours])[n])
            return out if out.dim() == 1 else out.to(ours[0].dtype)

        return make

    def _to_gguf(self, theirs: str) -> Callable[[Tensor], Tensor]:
        c, architecture = self.config, self.shape.architecture
        found = re.search(r"(?:layers|h)\.(\d+)\..*?(\w+)\.(weight|bias)$", theirs)
        layer, part = (int(found[1]), found[2]) if found else (0, "")
        mixer = c.layer_mixers()[layer]
        gain = self.shape.query_gain[layer] if isinstance(mixer, AttentionConfig) else 1.0
        scaled = "q_norm" if isinstance(mixer, AttentionConfig) and mixer.qk_norm else "q_proj"

        def finish(t: Tensor) -> Tensor:
            if theirs.endswith("norm.weight") and c.norm_offset:
                t = t + c.norm_offset
            if architecture == "gpt2" and t.dim() == 2 and found:
                t = t.t()
            if part == scaled and gain != 1.0:
                t = t * gain
            if architecture == "llama" and part in ("q_proj", "k_proj") and not self.shape.interleaved:
                assert isinstance(mixer, AttentionConfig)
                n_heads = mixer.n_heads if part == "q_proj" else mixer.n_kv_heads
                t = to_interleaved(t, n_heads, mixer.head_dim)
            return t.squeeze(0) if part == "shared_expert_gate" else t

        return finish

    def _kv(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Split [H (nope + v), rank] into the keys' part [H, nope, rank] and the values' part [H, v, rank]."""
        mixer = self.config.layer_mixers()[0]
        assert isinstance(mixer, MLAConfig)
        heads = t.view(mixer.n_heads, -1, t.shape[-1])
        return heads[:, : mixer.nope_dim], heads[:, mixer.nope_dim :]
