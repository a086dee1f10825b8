"""A loaded model: text in, text, log-probabilities or vectors out.

`load` opens what `whorl serve` opens: an artifact of the store (`quickstart/pretrain`), a folder that Whorl saved, or a
folder as `transformers` writes it. Generation runs on the engine that serves users: equal seeds give equal tokens in both.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from whorl.api.arguments import as_count, as_path, as_texts, checked_by_pydantic, invalid, require_encodable
from whorl.embedding.embedder import Embedder, result_of
from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import ConfigError
from whorl.evals.model.sampling import prompt_ids
from whorl.machine.device_probe import probe
from whorl.models import LanguageModel
from whorl.serve.worker.model_entry import ServedModel
from whorl.serve.worker.model_loading import ModelLocation, load_generation_model
from whorl.tokens.tokenizer import Tokenizer
from whorl.tokens.vocabulary import HealedPrompt

Message = Mapping[str, Any]


class Model:
    """A language model, its tokenizer and an engine.

    Attributes:
        name: as given to `load`.
        network: the `torch.nn.Module`, in its compute type.
        tokenizer: `encode(text) -> ids`, `decode(ids) -> bytes`.
        engine: paged KV cache, scheduler and sampler; `engine.add` and `engine.step` for one's own loop.
    """

    def __init__(self, entry: ServedModel, engine: Engine) -> None:
        self._entry, self.engine = entry, engine
        self.name, self.tokenizer = entry.name, entry.tokenizer
        self.network: LanguageModel = engine.model
        self._request_ids = itertools.count()

    def __repr__(self) -> str:
        total = self.network.params()["total"]
        return f"<whorl.Model {self.name}: {total / 1e6:.1f} M parameters, {self._entry.max_model_len:,} positions>"

    @overload
    def generate(self, prompts: str, **options: Any) -> str: ...
    @overload
    def generate(self, prompts: Sequence[str], **options: Any) -> list[str]: ...
    def generate(self, prompts: str | Sequence[str], **options: Any) -> str | list[str]:
        """Continue one text, or many in one batch.

        Args:
            options: max_tokens (256), stop (texts that end the output), and the fields of `SamplingParams`: temperature
                (0.8; 0 is greedy), top_p (0.95), top_k, min_p, seed, repetition_penalty, ...

        Returns:
            The continuation, without the prompt; a list of them for a list of prompts.

        Raises:
            ConfigError: an option that does not exist, or a prompt without room for a token.
        """
        texts = as_texts("prompts", prompts)
        if isinstance(prompts, str):
            return "".join(self.stream(prompts, **options))
        encoded = [prompt_ids(self.network, self._entry.tokenizer, text) for text in texts]
        return self._complete([self._request(healed, n, options) for n, healed in enumerate(encoded)])

    def stream(self, prompt: str, **options: Any) -> Iterator[str]:
        """Yield the continuation of a text in pieces, as it is sampled. Options are those of `generate`."""
        if not isinstance(prompt, str):
            raise invalid("prompt", prompt, "a text")
        require_encodable("prompt", prompt)
        healed = prompt_ids(self.network, self._entry.tokenizer, prompt)
        yield from self._stream(self._request(healed, 0, options))

    def chat(self, messages: str | Sequence[Message], **options: Any) -> str:
        """Answer a conversation: messages with `role` and `content`, or one user message as a text.

        The chat template is that of the model's folder. A base model without one gets a plain transcript. Options are
        those of `generate`.
        """
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if not isinstance(turns, Sequence) or not turns:
            raise invalid("messages", turns, "a text, or a list of messages")
        for turn in turns:
            if (
                not isinstance(turn, Mapping)
                or not isinstance(turn.get("role"), str)
                or "content" not in turn
            ):
                raise invalid("a message", turn, "a mapping with role and content")
        template = self._entry.chat_template
        stop = (*(text.decode() for text in template.stop), *as_texts("stop", options.get("stop", ())))
        ids = template.encode_prompt(turns)
        request = self._request(
            HealedPrompt(ids, b"", len(ids)), 0, {**options, "stop": stop}, template.stop_ids
        )
        return "".join(self._stream(request))

    @overload
    def log_probs(self, texts: str) -> Tensor: ...  # type: ignore[overload-overlap]
    @overload
    def log_probs(self, texts: Sequence[str]) -> list[Tensor]: ...
    @torch.inference_mode()
    def log_probs(self, texts: str | Sequence[str]) -> Tensor | list[Tensor]:
        """Log-probability of each token of a text, in nats, given the tokens before it.

        Returns:
            [n] in fp32 for the n ids of `tokenizer.encode(text)`; a list of such tensors for a list of texts. The sum
            divided by -ln 2 and by the bytes of the text is its bits per byte.
        """
        found = [self._log_probs(text) for text in as_texts("texts", texts)]
        return found[0] if isinstance(texts, str) else found

    @torch.inference_mode()
    def embed(self, texts: str | Sequence[str]) -> Tensor:
        """Unit vectors of texts: mean-pooled last hidden states, [d] or [n, d] in fp32.

        For search, load a model that the step `embedder` trained: a language model's vectors lie in a narrow cone.
        """
        embed = self._entry.embed
        assert embed is not None
        vectors = []
        for text in as_texts("texts", texts):
            if not (ids := self._entry.tokenizer.encode_to_list(text)):
                raise invalid("texts", text, "a text with at least one token")
            vectors.append(torch.tensor(result_of(embed(self._fitting(ids)))))
        if not vectors:
            return torch.empty(0, self.network.config.d_model)
        return vectors[0] if isinstance(texts, str) else torch.stack(vectors)

    def _fitting(self, ids: list[int]) -> list[int]:
        """Return ids that fit the model's context; raise ConfigError otherwise."""
        if len(ids) > (most := self._entry.max_model_len):
            raise ConfigError(
                f"a text has {len(ids):,} tokens",
                expected=f"at most {most:,}, the model's context",
                do="divide the text, or raise `context` of whorl.load",
            )
        return ids

    def _log_probs(self, text: str) -> Tensor:
        tokenizer = self._entry.tokenizer
        n_text = len(tokenizer.encode_to_list(text))
        if self.network.config.masked is not None:
            raise ConfigError("log_probs of a masked diffusion model", expected="a model of the next token")
        if not n_text:
            return torch.empty(0)
        ids = self._fitting(tokenizer.encode_prompt(text))
        rows = torch.tensor([ids], device=self.network.embedding.device)
        logits = self.network.logits(self.network(rows[:, :-1])).float()
        picked = logits.log_softmax(-1).gather(-1, rows[:, 1:, None])[0, :, 0]
        return picked[len(picked) - min(n_text, len(picked)) :].cpu()

    def _request(
        self,
        prompt: HealedPrompt,
        index: int,
        options: Mapping[str, Any],
        stop_ids: frozenset[int] | None = None,
    ) -> Request:
        settings = dict(options)
        stop = as_texts("stop", settings.pop("stop", ()))
        max_tokens = settings.pop("max_tokens", 256)
        unknown = sorted(set(settings) - set(SamplingParams.model_fields))
        if unknown:
            allowed = ", ".join(["max_tokens", "stop", *SamplingParams.model_fields])
            raise ConfigError(f"{unknown[0]} is not an option of generation", expected=allowed)
        room = self._entry.max_model_len - prompt.n_tokens
        if room < 1:
            raise ConfigError(
                f"prompt {index} has {prompt.n_tokens:,} tokens",
                expected=f"at most {self._entry.max_model_len - 1:,}",
            )
        with checked_by_pydantic():
            sampling = SamplingParams(**settings)
            if sampling.seed is not None:
                sampling = sampling.model_copy(update={"seed": sampling.seed + index})
            request = Request(
                id=str(next(self._request_ids)),
                ids=tuple(prompt.ids),
                sampling=sampling,
                max_tokens=max_tokens,
                stop=tuple(text.encode() for text in stop),
                stop_ids=frozenset(self.tokenizer.end_ids) if stop_ids is None else stop_ids,
                forced_prefix=prompt.forced_prefix,
            )
        return request.model_copy(update={"max_tokens": min(request.max_tokens, room)})

    def _stream(self, request: Request) -> Iterator[str]:
        """The text of one request; it is aborted when the caller stops reading."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for delta in self.engine.stream([request]):
            if text := decoder.decode(delta.text, final=delta.finish_reason is not None):
                yield text

    def _complete(self, requests: Sequence[Request]) -> list[str]:
        texts = {request.id: b"" for request in requests}
        for delta in self.engine.stream(requests):
            texts[delta.request_id] += delta.text
        return [texts[request.id].decode("utf-8", "replace") for request in requests]


def load(
    name_or_path: str | Path, *, store: str | None = None, context: int | None = None, **engine: Any
) -> Model | Embedder:
    """Open a model, or an embedder that the step `embedder` trained (`.embed(texts)`: unit vectors as a NumPy array).

    Args:
        name_or_path: `RECIPE/STEP` or another name of the store (`whorl ls`), or a folder with `config.json`.
        store: folder or URL of the store; default $WHORL_HOME or `.whorl` here.
        context: positions of prompt and output at most; default what the model declares. More gives a warning.
        engine: fields of `EngineConfig`, such as max_num_seqs, kv_cache_dtype="int8", weight_dtype="int8".

    Raises:
        ConfigError: no such model, or an engine setting that does not exist. CheckpointError, DataError: damaged files.
    """
    unknown = sorted(set(engine) - set(EngineConfig.model_fields))
    if unknown:
        raise ConfigError(
            f"{unknown[0]} is not a setting of the engine", expected=", ".join(EngineConfig.model_fields)
        )
    context = context if context is None else as_count("context", context, 2)
    with checked_by_pydantic():
        config = EngineConfig(**{"max_num_seqs": 32, **engine})
    location = ModelLocation(as_path("name_or_path", name_or_path), store and as_path("store", store))
    if location.kind == "embedder":
        return Embedder.load(location.folder, Tokenizer.load(location.folder), probe().device)
    entries, running = load_generation_model(location, probe(), config, max_model_len=context)
    return Model(entries[0], running)
