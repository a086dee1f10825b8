"""Simulations per second of mctx, with Connect 4 and the evaluation of `speed.py` in JAX; runs in the peer's environment.

python bench/agents/search/_mctx.py GAMES SIMULATIONS ROUNDS WEIGHT...
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import mctx


def main() -> None:
    games, simulations, rounds, *weights = map(int, sys.argv[1:])
    cells = jnp.arange(42).reshape(6, 7)
    hashed = jnp.asarray(weights)

    def lines(board: Any) -> Any:
        """Whether there are four stones in a row on [6, 7] bool."""
        found = jnp.zeros((), bool)
        for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
            rows, columns = 6 - 3 * down, 7 - 3 * abs(right)
            left = 3 if right < 0 else 0
            parts = [
                jax.lax.dynamic_slice(board, (i * down, left + i * right), (rows, columns)) for i in range(4)
            ]
            found |= (parts[0] & parts[1] & parts[2] & parts[3]).any()
        return found

    def evaluate(state: Any) -> tuple[Any, Any]:
        mixed = ((state + 1) * hashed).sum()
        logits = (mixed * jnp.arange(1, 8)) % 61 / 32
        return jnp.where(state[:7] == 0, logits, -1e9), mixed % 63 / 32 - 31 / 32

    def step(state: Any, action: Any) -> Any:
        column = state.reshape(6, 7)[:, action]
        cell = cells[(column == 0).sum() - 1, action]
        after = (-state).at[cell].set(-1)
        won = lines(after.reshape(6, 7) == -1)
        ended = won | (after != 0).all()
        logits, value = evaluate(after)
        return (
            after,
            won.astype(jnp.float32),
            jnp.where(ended, 0.0, -1.0),
            logits,
            jnp.where(ended, 0.0, value),
        )

    def recurrent(params: Any, key: Any, action: Any, state: Any) -> Any:
        after, reward, discount, logits, value = jax.vmap(step)(state, action)
        output = mctx.RecurrentFnOutput(reward=reward, discount=discount, prior_logits=logits, value=value)
        return output, after

    def run(key: Any, state: Any, gumbel: bool) -> Any:
        logits, value = jax.vmap(evaluate)(state)
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=state)
        if gumbel:
            return mctx.gumbel_muzero_policy((), key, root, recurrent, simulations).action
        return mctx.muzero_policy((), key, root, recurrent, simulations, dirichlet_fraction=0.0).action

    state, rates = jnp.zeros((games, 42), jnp.int32), {}
    for name in ("puct", "gumbel"):
        compiled = (
            jax.jit(run, static_argnums=2).lower(jax.random.PRNGKey(0), state, name == "gumbel").compile()
        )
        times = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            jax.block_until_ready(compiled(jax.random.PRNGKey(0), state))
            times.append(time.perf_counter() - began)
        rates[name] = games * simulations / sorted(times[1:])[rounds // 2]
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
