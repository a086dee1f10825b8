"""The event log of a server: completions that users let it keep, and their feedback.

A completion is sealed and appended when it is complete, outside of the engine's thread. Its answer is sent once the log has
acknowledged it, with a token for feedback. If the log is away, the answer is sent without a token, and
`whorl_completions_unlogged_total` counts it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from prometheus_client import Counter

from whorl.log import Event, Log, default_log, open_log
from whorl.log.port import LogUnavailableError
from whorl.loop.actor_keys import PRIVATE, ActorKeys
from whorl.loop.events import COMPLETIONS, CompletionMade, create_topics
from whorl.loop.feedback_token import TOKEN_SECONDS, issue_token, load_secret
from whorl.loop.page_state import PageState
from whorl.serve.config import EventLogConfig
from whorl.store import Store

LOG = logging.getLogger("whorl.serve")
KEEP_SECONDS = 5.0  # that an answer waits for the log
APPEND_SECONDS = 30.0  # that feedback waits


class CompletionLog:
    """The log, the keys of actors and the secret of tokens. pages: contents of the pages; None without a store."""

    pages: PageState | None = None

    def __init__(self, log: Log, keys: ActorKeys, secret: bytes) -> None:
        self.log, self.keys, self.secret = log, keys, secret
        self.unlogged = Counter(
            "whorl_completions_unlogged", "Completions to keep that the log did not take", registry=None
        )
        create_topics(log)

    @classmethod
    def open(cls, store: str | Path | None = None, config: EventLogConfig | None = None) -> CompletionLog:
        """Open the log and the views of a store, or those that `config` names, with the keys and the secret of the store.

        Raises:
            ConfigError, DataError, LogUnavailableError, ViewsUnavailableError: one of them cannot be opened.
        """
        config = config or EventLogConfig()
        opened = Store(store)
        folder = opened.root / "log"
        keys, secret = ActorKeys(folder / "keys.db"), load_secret(folder / "secret")
        made = cls(open_log(config.log_url or default_log(opened.root)), keys, secret)
        made.pages = PageState(opened, made.log, keys, secret, config.views, config.count_cache)
        return made

    async def append(self, topic: str, event: Event, timeout: float = APPEND_SECONDS) -> None:
        """Seal and append an event; return once it is durable.

        Raises: as `Log.append`; DataError, the actor is erased.
        """
        data = event.data or {}
        private = any(data.get(name) for name in PRIVATE.get(event.type, ()))
        if private and data["actor"] not in self.keys.ciphers:  # a new key waits for the disk
            event = await asyncio.to_thread(self.keys.seal, event)
        future = self.log.submit(topic, [self.keys.seal(event)])
        try:  # shielded: a client that leaves does not take its record out of the batch
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), timeout)
        except TimeoutError:
            raise LogUnavailableError(f"the log did not answer within {timeout:g} s") from None

    async def keep(self, made: CompletionMade) -> dict[str, Any] | None:
        """Append a completion and return its token with the expiry; None if the log did not take it."""
        now = time.time()
        try:
            await self.append(COMPLETIONS, made.event(now), KEEP_SECONDS)
        except Exception as error:  # of any kind: the answer is sent
            self.unlogged.inc()
            LOG.warning("a completion was not logged: %s", error)
            return None
        expires = int(now + TOKEN_SECONDS)
        token = issue_token(self.secret, made.id, len(made.choices), made.actor, expires)
        return {"token": token, "expires": expires}

    def close(self) -> None:
        """Wait for what was submitted, and close."""
        if self.pages is not None:
            self.pages.close()
        self.log.close()
        self.keys.close()
