"""Samplers of the replies of episodes.

EngineSampler     on ids: a reply keeps its sampled ids, and no text is tokenized twice
PolicyBackend     gives tasks of the kind `episodes` an EngineSampler
BackendSampler    on messages: any model under evaluation, also an endpoint; equal requests come from the cache
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import ConfigError
from whorl.evals.episodes.environment import Reply
from whorl.evals.episodes.runner import Episode
from whorl.evals.grading.task import VerifiableTask
from whorl.evals.model.requests import Completion, Finish, GenerateRequest, Missing, Response
from whorl.evals.model.requests import Request as AnyRequest
from whorl.tokens.token_encoder import Message, TokenEncoder


class EngineSampler:
    """A `ReplySampler` over an engine. max_tokens: ids of one reply."""

    def __init__(self, engine: Engine, encoder: TokenEncoder, max_tokens: int) -> None:
        self.engine, self.encoder, self.max_tokens = engine, encoder, max_tokens
        self.empty_row: Sequence[int] = (encoder.tokenizer.end_ids[0],)
        self._prompt_ids: dict[int, tuple[VerifiableTask, list[int]]] = {}

    @property
    def busy(self) -> bool:
        """Whether a reply is being sampled."""
        return self.engine.busy

    def start(self, episode: Episode, task: VerifiableTask) -> None:
        """See `ReplySampler`."""
        env, known = episode.env, self._prompt_ids.get(id(task))
        encode = self.encoder.prompt
        ids = known[1] if known else encode(episode.prompt, env.tools, env.chat_template_kwargs)
        if len(ids) >= self.engine.max_positions:
            raise ConfigError(
                f"the prompt of task {task.id!r} has {len(ids):,} ids, and the engine holds "
                f"{self.engine.max_positions:,}",
                expected="shorter prompts", do="leave it out, or increase max_seq_len",
            )  # fmt: skip
        self._prompt_ids[id(task)] = task, ids
        episode.append(ids)

    def submit(self, n: int, episode: Episode, sampling: SamplingParams) -> None:
        """See `ReplySampler`."""
        limits = self.max_tokens, self.engine.max_positions - len(episode.ids), episode.env.max_tokens
        self.engine.add(Request(
            id=str(n), ids=tuple(episode.ids), sampling=sampling, stop_ids=self.encoder.stop_ids,
            max_tokens=min(each for each in limits if each is not None),
        ))  # fmt: skip

    def step(self, episodes: Sequence[Episode]) -> list[int]:
        """See `ReplySampler`: one step of the engine."""
        ended = []
        for delta in self.engine.step():
            episode = episodes[int(delta.request_id)]
            for token in delta.tokens:
                episode.ids.append(token.id)
                episode.action_mask.append(True)
                episode.log_probs.append(token.log_prob)
                episode.versions.append(token.version)
            if delta.finish_reason is not None:
                ids, start = episode.ids, episode.reply_start
                text = self.encoder.decode(ids[start:])
                finish: Finish = "stop" if delta.finish_reason == "stop" else "length"
                log_probs = tuple(episode.log_probs[start:])
                episode.reply = Reply(text, tuple(ids[start:]), log_probs, finish, prompt_ids=ids[:start])
                ended.append(int(delta.request_id))
        return ended

    def extend(self, episode: Episode, messages: Sequence[Message]) -> bool:
        """See `ReplySampler`: not after a reply without an end, nor beyond the context."""
        if not episode.reply.finished:
            return False
        env = episode.env
        ids = self.encoder.after_reply(
            episode.prompt, messages, env.tools, env.chat_template_kwargs, stop_id=episode.ids[-1]
        )
        if len(episode.ids) + len(ids) >= self.engine.max_positions:
            return False
        episode.append(ids)
        return True


class PolicyBackend:
    """A `ModelBackend` over the engine of a model in training, for tasks of the kind `episodes`."""

    name, address = "policy", ""

    def __init__(self, engine: Engine, encoder: TokenEncoder) -> None:
        self.max_length: int | None = engine.max_positions
        self.sampler = partial(EngineSampler, engine, encoder)

    def respond(self, requests: Sequence[AnyRequest], on_response: Callable[[int, Response], None]) -> None:
        """See `ModelBackend`: it answers episodes alone."""
        for n in range(len(requests)):
            on_response(n, Missing("a policy answers tasks of the kind episodes"))


class BackendSampler:
    """A `ReplySampler` over a back end, for environments whose prompt is a conversation.

    Args:
        respond: returns the responses of requests, in order.
        requests: settings of the replies of each episode; their prompt is not used.
    """

    empty_row: Sequence[int] = ()

    def __init__(
        self,
        respond: Callable[[Sequence[GenerateRequest]], Sequence[Response]],
        requests: Sequence[GenerateRequest],
    ) -> None:
        self.respond, self.requests = respond, requests
        self._waiting: dict[int, GenerateRequest] = {}

    @property
    def busy(self) -> bool:
        """Whether requests wait."""
        return bool(self._waiting)

    def start(self, episode: Episode, task: VerifiableTask) -> None:
        """See `ReplySampler`: the messages are the prompt."""

    def submit(self, n: int, episode: Episode, sampling: SamplingParams) -> None:
        """See `ReplySampler`. The requests of the episodes replace `sampling`."""
        each, own = self.requests[n], episode.env.max_tokens
        limit = each.max_tokens if own is None else min(each.max_tokens, own)
        self._waiting[n] = replace(each, prompt=tuple(episode.messages), max_tokens=limit)

    def step(self, episodes: Sequence[Episode]) -> list[int]:
        """See `ReplySampler`: all waiting requests are answered together."""
        waiting, self._waiting = self._waiting, {}
        for n, response in zip(waiting, self.respond(list(waiting.values())), strict=True):
            if isinstance(response, Completion):
                episodes[n].reply = Reply(**vars(response))
            else:
                episodes[n].fail(response.reason if isinstance(response, Missing) else "no completion")
        return list(waiting)

    def extend(self, episode: Episode, messages: Sequence[Message]) -> bool:
        """See `ReplySampler`: a reply without an end is a message too."""
        return True
