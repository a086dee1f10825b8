"""`whorl sample`: continue a text in the terminal, token by token."""

from __future__ import annotations

import codecs
import math
import sys
import time
from typing import Annotated, Literal

import typer

from whorl.cli.options import RefArgument, StoreOption, open_artifact, standard_input

MAX_TOKENS = 1_000_000  # the cache is allocated for all of them


def sample(
    artifact: RefArgument,
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")] = "",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, help="Maximum number of tokens.")
    ] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy decoding.")] = 0.8,
    top_p: Annotated[
        float,
        typer.Option(
            min=0.001, max=1, help="Nucleus sampling: smallest set of tokens with this probability."
        ),
    ] = 0.95,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k likeliest tokens; 0 for all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Random seed; default: the time.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text; may be repeated.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The text is a user's message, to be answered.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Masked diffusion: passes of a block; default: one per token.")
    ] = None,
    reveal: Annotated[
        Literal["confidence", "entropy"], typer.Option(help="Masked diffusion: what a pass reveals first.")
    ] = "confidence",
    suffix: Annotated[
        str, typer.Option(help="Masked diffusion: fill a gap of --max-tokens before this text.")
    ] = "",
    store: StoreOption = None,
) -> None:
    """Continue a text with a model and stream the result, answer a message, or fill the gap between two texts.

    Examples:

        whorl sample quickstart/pretrain "def "

        whorl sample pretrain "class Stack:" --temperature 0.5 --seed 1 --stop "class "

        whorl sample chat/sft "What did I plan for Monday?" --chat

        whorl sample imported/Qwen3-0.6B "The capital of France is"

        whorl sample diffuse-code/pretrain "def add(a, b):" --suffix "    return c" --max-tokens 12 --steps 6
    """
    import torch

    from whorl.engine import EngineConfig, SamplingParams, load_for_sampling
    from whorl.engine.request import Request
    from whorl.errors import ConfigError
    from whorl.evals.model.sampling import open_engine, prompt_ids
    from whorl.machine.device_probe import probe
    from whorl.tokens.token_encoder import TokenEncoder
    from whorl.tokens.vocabulary import HealedPrompt
    from whorl.tracking.seeds import derive

    if not math.isfinite(temperature):
        raise ConfigError(f"--temperature is {temperature}", expected="a finite number, 0 or more")
    if max_tokens > MAX_TOKENS:
        raise ConfigError(f"--max-tokens is {max_tokens:,}", expected=f"at most {MAX_TOKENS:,}")
    text = _text(prompt)
    found = open_artifact(artifact, store, ("model",), "a model")
    found.check()
    machine = probe()
    torch.set_num_threads(1)  # the operations of one token are too small for several threads
    model = load_for_sampling(found.path, machine, masked=True)
    encoder = TokenEncoder.load(found.path)
    tokenizer, stop_ids = encoder.tokenizer, frozenset(encoder.tokenizer.end_ids)
    healed, behind = prompt_ids(model, tokenizer, text), tuple(tokenizer.encode_to_list(suffix))
    if chat:
        ids = encoder.prompt([{"role": "user", "content": text}])
        healed, stop_ids = HealedPrompt(ids, b"", len(ids)), encoder.stop_ids
    wanted = healed.n_tokens + max_tokens + len(behind)
    seed = seed if seed is not None else time.time_ns() % (1 << 31)
    engine = open_engine(
        model,
        EngineConfig.for_batch(  # single steps, so that each token is shown at once
            1, min(wanted, model.max_positions or sys.maxsize), decode_burst=1
        ),
        encoder if chat else tokenizer,
        compile_native=False,  # the first token does not wait for a compiler
    )
    request = Request(
        id="sample",
        ids=tuple(healed.ids),
        sampling=SamplingParams(
            temperature=temperature, top_p=top_p, top_k=top_k, seed=derive(seed, "sample"), steps=steps, reveal=reveal
        ),
        max_tokens=max_tokens,
        stop=tuple(text.encode() for text in stop or [] if text),
        stop_ids=stop_ids,
        forced_prefix=healed.forced_prefix,
        suffix=behind,
    )  # fmt: skip
    given = b"" if chat else text.encode()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    fits = given.endswith(healed.forced_prefix)  # false if the tokenizer normalizes text
    start = (
        given
        if fits or chat
        else tokenizer.decode(healed.ids, skip_special_tokens=True) + healed.forced_prefix
    )
    began, count = time.perf_counter(), 0
    for delta in engine.stream([request]):
        count += len(delta.tokens) - delta.n_forced
        sys.stdout.write(decoder.decode(start + delta.text))
        sys.stdout.flush()
        start = b""
    seconds = time.perf_counter() - began
    sys.stdout.write(suffix + "\n")
    print(f"{count} tokens, {count / seconds:,.0f} tokens/s, seed {seed}", file=sys.stderr)


def _text(prompt: str) -> str:
    """Return the prompt, from standard input for "-". Raises ConfigError if it is not UTF-8."""
    from whorl.errors import ConfigError

    try:
        text = standard_input().read() if prompt == "-" else prompt
        text.encode()
    except UnicodeError as error:  # other encodings raise, or contain lone surrogates
        raise ConfigError(f"the prompt cannot be read: {error}", expected="text in UTF-8") from error
    return text
