"""Loads what drafts tokens for an engine: prompt lookup, a draft model, or the heads in the model's folder.

The proposers are in `proposers.py`; drafts never change a token.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from whorl.engine.config import EngineConfig
from whorl.engine.load import load_for_sampling
from whorl.engine.sequence import Proposer
from whorl.engine.speculation.prompt_lookup import PromptLookup
from whorl.engine.speculation.proposers import DraftModel, MultiTokenDraft
from whorl.errors import ConfigError
from whorl.machine.device_probe import Machine
from whorl.models import LanguageModel
from whorl.models.multi_token import CONFIG_FILE, load_multi_token

LOG = logging.getLogger("whorl.engine")
DEFAULT_LOOKUP_DRAFTS, DEFAULT_MODEL_DRAFTS = 8, 4


@dataclass(frozen=True)
class Speculation:
    """The source of draft tokens: at most one of three. Picklable, because each process of an engine loads its own.

    prompt_lookup: n-grams of the context. draft: folder of a draft model. multi_token: heads in the model's folder.
    max_drafts: tokens per step; default 8 for prompt lookup, 4 for a draft model, all heads.

    Raises:
        ConfigError: more than one is set.
    """

    prompt_lookup: bool = False
    draft: Path | None = None
    multi_token: bool = False
    max_drafts: int | None = None

    def __post_init__(self) -> None:
        given = {
            "prompt lookup": self.prompt_lookup,
            "a draft model": self.draft is not None,
            "multi-token heads": self.multi_token,
        }
        chosen = [name for name, is_set in given.items() if is_set]
        if len(chosen) > 1:
            raise ConfigError(f"drafts come from {' and '.join(chosen)}", expected="one of them")
        if self.max_drafts is not None and not chosen:
            raise ConfigError(
                f"max_drafts is {self.max_drafts}, and nothing drafts",
                expected="prompt lookup, a draft model or multi-token heads",
            )

    def load_draft(self, model: LanguageModel, machine: Machine, batch_size: int) -> LanguageModel | None:
        """Return the draft model of `model`, or None without one. A draft model that is not smaller is logged.

        Raises:
            ConfigError: it has another number of ids. CheckpointError: as `load_model`.
        """
        if self.draft is None:
            return None
        found = load_for_sampling(self.draft, machine, batch_size)
        sizes = found.config.vocab_size, model.config.vocab_size
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"the draft model {self.draft} has {sizes[0]:,} ids, and the model {sizes[1]:,}",
                expected="one vocabulary",
                do="train a draft of this model with the step `draft`",
            )
        draft_parameters, model_parameters = found.params()["total"], model.params()["total"]
        if draft_parameters >= model_parameters:
            LOG.warning(
                "the draft model has %s parameters and the model %s: drafts cost more than they save",
                f"{draft_parameters:,}",
                f"{model_parameters:,}",
            )
        return found


NO_SPECULATION = Speculation()


def make_proposer(
    speculation: Speculation,
    folder: Path,
    model: LanguageModel,
    draft: LanguageModel | None,
    config: EngineConfig,
    banned_ids: list[int],
) -> Proposer | None:
    """Return the proposer for an engine of `model` with the sizes of `config`; None if nothing drafts.

    Args:
        folder: of the model. draft: from `Speculation.load_draft`.

    Raises:
        ConfigError: the model has no heads, or the draft model cannot be rolled back by a position.
        CheckpointError: the heads are damaged.
    """
    if speculation.prompt_lookup:
        return PromptLookup(speculation.max_drafts or DEFAULT_LOOKUP_DRAFTS)
    if draft is not None:
        return DraftModel(
            draft, speculation.max_drafts or DEFAULT_MODEL_DRAFTS, max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len, page_size=config.block_size,
            kv_cache_tokens=config.kv_cache_tokens, banned_ids=banned_ids,
        )  # fmt: skip
    if not speculation.multi_token:
        return None
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"the model of {folder} has no multi-token heads",
            expected=f"{CONFIG_FILE} in its folder",
            do="train them with the step `multi_token`",
        )
    heads = load_multi_token(folder, model.dtype, str(model.embedding.device))
    if heads.d_model != model.config.d_model:
        raise ConfigError(
            f"the heads of {folder} have width {heads.d_model}",
            expected=f"{model.config.d_model}, the model's",
        )
    return MultiTokenDraft(heads, model.head_weight, config.max_model_len, speculation.max_drafts)
