"""Peers of the engine: Hugging Face `generate` and llama.cpp with the same weights and the same prompts.

Both finish `rows` greedy continuations of exactly `n_new` tokens without a stop token. Times include the prefill.
llama.cpp is used as in its server, through `llama_batch`: one call computes the newest tokens of all rows; prompts are
passed in calls of `BATCH` tokens. The argmax is computed in numpy over all rows at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

BATCH = 2048  # tokens per llama_decode call; llama.cpp computes 512 of them at once
Rows = list[list[int]]


class HuggingFace:
    """`LlamaForCausalLM.generate`.

    Args:
        compiled: its static cache, with the decoding step compiled (the shape is that of the first call).
    """

    def __init__(self, folder: Path, dtype: torch.dtype, threads: int, compiled: bool = False) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        torch.set_num_threads(threads)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.model.generation_config.eos_token_id = None
        self.options: dict[str, Any] = {}
        if compiled:
            # On a CPU `generate` compiles the decoding step only if this is set.
            from transformers import CompileConfig

            settings = CompileConfig(fullgraph=True, mode="default", dynamic=False)
            settings._compile_all_devices = True
            self.options = {"cache_implementation": "static", "compile_config": settings}

    @torch.inference_mode()
    def run(self, prompts: Rows, n_new: int) -> Rows:
        ids = torch.tensor(prompts)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n_new, pad_token_id=0, **self.options
        )  # fmt: skip
        found: Rows = out[:, ids.shape[1] :].tolist()
        return found


class LlamaCpp:
    """llama.cpp over one file: `rows` parallel sequences of up to `length` positions."""

    def __init__(self, file: Path, rows: int, length: int, threads: int) -> None:
        import llama_cpp

        self.library: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        self.library.llama_log_set(self._quiet, ctypes.c_void_p(0))
        self.library.llama_backend_init()
        self.model = self.library.llama_model_load_from_file(
            str(file).encode(), self.library.llama_model_default_params()
        )
        options = self.library.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_seq_max = rows * length, BATCH, rows
        options.n_threads = options.n_threads_batch = threads
        self.context = self.library.llama_init_from_model(self.model, options)
        if not self.context:
            raise RuntimeError(f"llama.cpp could not open {file}")
        self.batch = self.library.llama_batch_init(BATCH, 0, 1)
        self.vocab = self.library.llama_vocab_n_tokens(self.library.llama_model_get_vocab(self.model))

    def close(self) -> None:
        """Free the memory of llama.cpp."""
        self.library.llama_batch_free(self.batch)
        self.library.llama_free(self.context)
        self.library.llama_model_free(self.model)

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
