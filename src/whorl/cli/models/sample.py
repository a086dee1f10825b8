"""`whorl sample`: continue a text in the terminal, token by token."""

from __future__ import annotations

import codecs
import sys
import time
from typing import Annotated

import typer

from whorl.cli.options import RefArgument, StoreOption


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
    cache: Annotated[bool, typer.Option(help="Use the KV cache or recurrent state (much faster).")] = True,
    store: StoreOption = None,
) -> None:
    """Continue a text with a model and stream the result.

    Examples:

        whorl sample quickstart/pretrain "def "

        whorl sample pretrain "class Stack:" --temperature 0.5 --seed 1 --stop "class "

        whorl sample imported/Qwen3-0.6B "The capital of France is"
    """
    import torch

    from whorl.engine import SamplingParams, generate, load_for_sampling
    from whorl.engine.sampling.stop_strings import StopStringChecker
    from whorl.errors import ConfigError
    from whorl.machine.device_probe import probe
    from whorl.store import Store
    from whorl.tokens.healing import heal
    from whorl.tokens.hf_tokenizer import HFTokenizer, load_tokenizer
    from whorl.tracking.seeds import generator

    found = Store(store).open(artifact)
    if found.kind != "model":
        raise ConfigError(
            f"{found.name} is a {found.kind}", expected="a model", do="list the artifacts with `whorl ls`"
        )
    found.check()
    machine = probe()
    torch.set_num_threads(1)  # the operations of one token are too small for several threads
    model = load_for_sampling(found.path, machine)
    tokenizer = load_tokenizer(found.path)
    text = _text(prompt)
    if isinstance(tokenizer, HFTokenizer):
        healed, token_bytes = tokenizer.heal_prompt(text), tokenizer.token_bytes
    else:
        healed, token_bytes = heal(tokenizer, text), tokenizer.token_bytes[: tokenizer.n_ordinary]
    if model.max_positions is not None:
        room = model.max_positions - len(healed.ids) + 1  # the last token is generated but not read
        if room < 1:
            raise ConfigError(
                f"the prompt is {len(healed.ids)} tokens long",
                expected=f"at most {model.max_positions}, the longest row of {found.name}",
                do="shorten the prompt",
            )
        max_tokens = min(max_tokens, room)
    rows = model.config.vocab_size
    padding_ids = range(tokenizer.vocab_size, rows)  # padding rows of the output matrix
    control_ids = (
        i for i in tokenizer.control_ids if i < rows
    )  # an external tokenizer may have more ids than the model
    seed = seed if seed is not None else time.time_ns() % (1 << 31)
    stream = generate(
        model,
        healed.ids,
        SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k),
        generator(seed, "sample"),
        max_tokens=max_tokens,
        banned_ids=(*control_ids, *padding_ids),
        forced_prefix=healed.forced_prefix,
        token_bytes=token_bytes[:rows],
        use_cache=cache,
    )
    # Decode incrementally: the forced prefix may start inside a character.
    given = text.encode()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    fits = given.endswith(healed.forced_prefix)  # false if the tokenizer normalizes text
    sys.stdout.write(
        decoder.decode(given.removesuffix(healed.forced_prefix) if fits else tokenizer.decode(healed.ids))
    )
    stops, began, count = (
        StopStringChecker([text.encode() for text in stop or [] if text]),
        time.perf_counter(),
        0,
    )
    for token in stream:
        count += 1
        if token.id in tokenizer.end_ids:
            break
        sys.stdout.write(decoder.decode(stops.add(tokenizer.decode([token.id]))))
        sys.stdout.flush()
        if stops.matched is not None:
            break
    sys.stdout.write(decoder.decode(stops.flush()))
    seconds = time.perf_counter() - began
    sys.stdout.write("\n")
    print(f"{count} tokens, {count / seconds:,.0f} tokens/s, seed {seed}", file=sys.stderr)


def _text(prompt: str) -> str:
    """Return the prompt, from standard input for "-". Raises ConfigError if it is not UTF-8."""
    from whorl.errors import ConfigError

    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()
    except UnicodeError as error:  # other encodings raise, or contain lone surrogates
        raise ConfigError(f"the prompt cannot be read: {error}", expected="text in UTF-8") from error
    return text
