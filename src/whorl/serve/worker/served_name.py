"""A model under a name of the store, `served/NAME`: promotion moves the name, and servers take over the weights.

The new weights apply from the next step on. A running completion continues with them and ends on its own.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from torch import Tensor

from whorl.align.distillation.teacher import check_same_vocabulary
from whorl.errors import ConfigError, WhorlError
from whorl.models import load_model
from whorl.serve.worker.engine_group import engine_of
from whorl.serve.worker.model_entry import ServedModel
from whorl.serve.worker.model_loading import ModelLocation
from whorl.serve.worker.worker import EngineWorker
from whorl.store import Store
from whorl.tokens.token_encoder import TokenEncoder

LOG = logging.getLogger("whorl.serve")
POLL_SECONDS = 1.0


async def follow_name(
    worker: EngineWorker, served: ServedModel, store: Store, ref: str, seen: str | None
) -> None:
    """Serve what a name of the store names, from about a second after it moves. Runs until it is cancelled.

    A model that this server cannot take over is logged once, and the old one stays.

    Args:
        seen: address that the name had; None: that of now.
    """
    while True:
        await asyncio.sleep(POLL_SECONDS)
        try:
            now = (await asyncio.to_thread(store.names)).get(ref, seen or "")
            before, seen = seen, now
            if before is not None and now != before:
                await take_over(worker, served, ModelLocation(now, store.location))
                LOG.warning("%s is now %s", served.name, now[:12])
        except (WhorlError, OSError, RuntimeError) as error:
            LOG.error("%s moved to %.12s, and this server keeps its model: %s; restart it", ref, seen, error)


async def take_over(worker: EngineWorker, served: ServedModel, place: ModelLocation) -> None:
    """Replace the weights of a model that is being served.

    Raises:
        ConfigError: another architecture, tokenizer or chat format; or the model runs in other processes.
    """
    engine: Any = engine_of(worker.engine, served.engine)
    if not hasattr(engine, "update_weights"):
        raise ConfigError("its processes cannot change weights", expected="a server without --prefill")

    def load() -> dict[str, Tensor]:
        encoder = TokenEncoder.load(place.folder)
        check_same_vocabulary(served.tokenizer, encoder.tokenizer, names=(served.name, place.names[0]))
        model = load_model(place.folder, masked=True)  # the engine casts its tensors
        if encoder.chat.source != served.chat_template.source or model.config != engine.model.config:
            raise ConfigError(f"{place.names[0]} has another architecture or chat format")
        return dict(model.named_parameters())

    tensors = await asyncio.to_thread(load)
    served.weights.digest = ""  # until all new tokens are of the new weights
    await worker.call(lambda _: engine.update_weights(tensors, engine.version + 1))
    served.weights.digest = place.address
