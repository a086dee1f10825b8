"""The runner, the KV cache and the sampler of an engine, sized from its settings."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from whorl.engine.burst import DecodeBurst
from whorl.engine.cache.block_pool import BlockPool
from whorl.engine.cache.cache_manager import KVCacheGroup, KVCacheManager
from whorl.engine.cache.layer_cache import page_windows
from whorl.engine.config import EngineConfig
from whorl.engine.cpu.runner import NativeRunner, make_runner
from whorl.engine.cpu.sampling import row_sampler
from whorl.engine.cpu.summary import row_summary
from whorl.engine.model.multi_lora import Adapters
from whorl.engine.model.runner import ModelRunner
from whorl.engine.sampling.sampler import Sampler
from whorl.models import LanguageModel


def context_length(model: LanguageModel, config: EngineConfig) -> int:
    """Return the positions of a sequence: at most what the model declares, unless `max_model_len` is set to more.

    Warns where it is: rotary positions extrapolate, and outputs there may be wrong. A table of positions is a hard limit.
    """
    declared = model.declared_length
    if config.max_model_len <= declared:
        return config.max_model_len
    if model.max_positions is not None or "max_model_len" not in config.model_fields_set:
        return declared
    warnings.warn(
        f"sequences of {config.max_model_len:,} positions exceed the {declared:,} that the model declares; "
        "outputs beyond may be wrong",
        stacklevel=3,
    )
    return config.max_model_len


def cache_pages(model: LanguageModel, config: EngineConfig, max_model_len: int) -> dict[int | None, int]:
    """Return the numbers of pages of a cache, by the window of a group of layers."""
    tokens = config.kv_cache_tokens or max(max_model_len, config.max_num_seqs * max_model_len // 2)
    pages: dict[int | None, int] = {}
    for window in page_windows(mixer.cache_spec() for mixer in model.layer_mixers()) or [None]:
        n = tokens
        if window is not None:  # live positions of all sequences, plus prefixes that can be reused
            live = config.max_num_seqs * (window + config.block_size) + config.max_num_batched_tokens + window
            n = min(tokens, live + tokens // 4)
        pages[window] = max(1, -(-n // config.block_size))
    return pages


def make_runner_and_cache(
    model: LanguageModel,
    config: EngineConfig,
    max_model_len: int,
    adapters: Adapters,
    *,
    compile_native: bool,
) -> tuple[ModelRunner, KVCacheManager]:
    """Return the runner with the tensors of its cache, and the manager of their pages.

    max_model_len: longest sequence, in positions. compile_native: now, if that has not been done on this machine.

    Raises:
        ConfigError: a mixer declares a cache that the engine does not support.
    """
    pages = cache_pages(model, config, max_model_len)
    same = config.batch_invariant
    runner = make_runner(
        model, pages, config.block_size, config.max_num_seqs, max_model_len,
        weight_dtype=config.weight_dtype, weight_group_size=config.weight_group_size, invariant=same,
        dtype=torch.int8 if config.kv_cache_dtype == "int8" else None, adapters=adapters, compile_native=compile_native,
        decode_rows=config.decode_rows, max_threads=config.max_threads,
    )  # fmt: skip
    groups = [KVCacheGroup(w, BlockPool(pages[w], config.block_size)) for w in runner.windows or [None]]
    share = config.enable_prefix_caching and not runner.has_recurrent_layers
    manager = KVCacheManager(
        groups, config.max_num_seqs, max_model_len, config.max_num_batched_tokens, share, not same
    )
    return runner, manager


def make_sampler(runner: ModelRunner, banned_ids: Sequence[int]) -> Sampler:
    """Return the sampler of a runner's logits. `banned_ids`: ids that are never sampled."""
    step = runner.native_step if isinstance(runner, NativeRunner) else None
    model = runner.model
    sampler = Sampler(model.config.vocab_size, banned_ids, str(model.embedding.device), row_summary(step))
    sampler.draw_plain = row_sampler(step, sampler.is_banned)
    return sampler


def make_burst(
    runner: ModelRunner, cache: KVCacheManager, config: EngineConfig, sampler: Sampler, max_positions: int
) -> DecodeBurst | None:
    """Return what runs several decode steps at once, or None if the settings or the runner exclude it."""
    if config.decode_burst < 2 or not isinstance(runner, NativeRunner) or sampler.draw_plain is None:
        return None
    return DecodeBurst(runner, cache, config.decode_burst, sampler.is_banned, max_positions)
