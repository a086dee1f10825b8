"""Rollouts: the record that an actor writes into a slot, and the actor, a producer.

A rollout is T steps of B environments. Environments continue where the last rollout ended, so an actor's rollouts
depend on one another. Random choices within a rollout depend only on the slot's seed.

The actor stores log-probabilities of the weights that acted. The slot's header holds the version of these weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from whorl.agents.environments.environment import Spaces, step_fields
from whorl.agents.environments.registration import make_env
from whorl.agents.exploration import Exploration
from whorl.agents.methods.method import MethodConfig
from whorl.agents.methods.registration import make_method
from whorl.errors import ConfigError
from whorl.slots import BoardReader, Slot, Spec
from whorl.slots.spec import FieldSpec
from whorl.train.optim.clipping import clip_scale

STEP_FIELDS = ("observation", "action", "reward", "terminated", "truncated", "final_observation")


@dataclass(frozen=True)
class Rollout:
    """T steps of B environments.

    observation: [T + 1, B, d], flattened, the last after step T; fp32, or uint8 for pixels. final_observation: [T, B, d].
    action: [T, B] int64, or [T, B, k] fp32. cost: [T, B], 0 in environments without costs. The others: [T, B].
    output: [T, B, n], only of methods that keep the second result of `act`.
    gradient: [P + 2], only of actors that compute it: of all parameters, then the loss and its count.
    """

    observation: NDArray[Any]
    final_observation: NDArray[Any]
    action: NDArray[Any]
    behaviour_log_prob: NDArray[np.float32]
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    cost: NDArray[np.float32]
    output: NDArray[np.float32] | None = None
    gradient: NDArray[np.float32] | None = None


def rollout_spec(
    spaces: Spaces, n_envs: int, n_steps: int, n_parameters: int | None = None, n_outputs: int = 0
) -> Spec[Rollout]:
    """Return the slot spec of `n_steps` steps of `n_envs` environments; with the gradient of `n_parameters`, if given."""
    fields = step_fields(spaces, n_outputs)
    fields["final_observation"] = fields["observation"]
    rows = {name: n_steps + (name == "observation") for name in fields}
    in_slot = {n: FieldSpec((rows[n], n_envs, *f.shape), f.dtype) for n, f in fields.items()}
    if n_parameters is not None:
        in_slot["gradient"] = FieldSpec((n_parameters + 2,), np.dtype(np.float32))
    return Spec(Rollout, in_slot)


@dataclass
class Actor:
    """Producer that acts in `config.n_envs` copies of an environment with the board's newest weights.

    It pickles small: environments and networks are created in the process that runs it. `seed` seeds the environments
    and must differ between actors.
    """

    config: MethodConfig
    seed: int

    def setup(self) -> None:
        """Create the environments and the networks. `fill` calls it if it was not called before."""
        torch.set_num_threads(1)
        self._envs = make_env(self.config.environment, self.config.n_envs)
        self._method = make_method(self.config, self._envs.spaces)
        self._networks = self._method.make_networks(torch.Generator())
        self._observation = self._envs.reset(self.seed).flatten(1)
        given = self.config.exploration, self._envs.spaces, self.config.n_envs, self._method.n_members
        self._exploration = Exploration(*given)
        self._steps = 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state that determines the next rollout, without weights; empty if the environment has none."""
        state = self._envs.state_dict()
        own = {f"exploration/{name}": t for name, t in self._exploration.state.items()}
        return {**state, **own, "seen": self._observation} if state else {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the state of another actor; an empty one changes nothing."""
        if not state:
            return
        self._envs.load_state_dict(state)
        # The layout in memory of `reset`'s observations: products of matrices with another one differ in the last bits.
        self._observation = self._observation.clone().copy_(state["seen"])
        self._exploration.state = {n: state[f"exploration/{n}"].clone() for n in self._exploration.state}

    def fill(self, slot: Slot[Any], weights: BoardReader, rng: np.random.Generator) -> int:
        """Write T steps into the slot and return T * B."""
        if not hasattr(self, "_envs"):
            self.setup()
        weights.load_into(self._networks)
        rollout = slot.tensors()
        self._act(rollout, slot.seed, slot.sequence)
        if "gradient" in rollout:
            self._write_gradient(rollout, weights, slot.sequence)
        return rollout["reward"].numel()

    @torch.no_grad()
    def _act(self, rollout: dict[str, torch.Tensor], seed: int, sequence: int) -> None:
        """Fill the fields of all steps."""
        envs, method, networks, observation = self._envs, self._method, self._networks, self._observation
        n_steps, n_envs = rollout["reward"].shape
        generator = torch.Generator().manual_seed(seed)
        method.start_rollout(networks, n_envs)
        self._exploration.start(n_steps, generator, sequence * n_steps * n_envs, self.config.steps)
        outputs, costs, steps = [], [], list[tuple[torch.Tensor, ...]]()
        for t in range(n_steps):
            action, output = self._exploration.act(method, networks, observation, t)
            outputs.append(output)
            transition = envs.step(action)
            _, reward, terminated, truncated, final, _ = transition
            steps.append((observation, action, reward, terminated, truncated, final.flatten(1)))
            if transition.cost is not None:
                costs.append(transition.cost)
            if self._exploration.state:
                self._exploration.end_step(terminated | truncated)
            observation = transition.observation.flatten(1)
        rollout["observation"][n_steps] = observation
        # Stacked once: the cost is per operation, not per byte.
        for name, values in zip(STEP_FIELDS, zip(*steps, strict=True), strict=True):
            torch.stack(values, out=rollout[name][:n_steps])
        rollout["behaviour_log_prob"][:] = method.log_prob(networks, torch.stack(outputs), rollout["action"])
        if "output" in rollout:
            torch.stack(outputs, out=rollout["output"])
        rollout["cost"].copy_(torch.stack(costs)) if costs else rollout["cost"].zero_()
        if not rollout["reward"].isfinite().all():
            t, copy = (~rollout["reward"].isfinite()).nonzero()[0].tolist()
            where = f"{rollout['reward'][t, copy]:g} at step {self._steps + t + 1} of copy {copy}"
            raise ConfigError(
                f"the reward of {self.config.environment} is {where}",
                expected="a finite number", do="correct the environment's reward",
            )  # fmt: skip
        self._steps += n_steps
        self._observation = observation

    def _write_gradient(self, rollout: dict[str, torch.Tensor], weights: BoardReader, sequence: int) -> None:
        """Write the gradient of the method's loss on this rollout, or take the step of gradient descent on the board."""
        method, networks = self._method, self._networks
        loss = method.rollout_loss(networks, rollout)
        parameters = dict(networks.named_parameters())
        gradients = torch.autograd.grad(loss.total, list(parameters.values()), materialize_grads=True)
        flat = torch.cat([g.flatten() for g in gradients])
        torch.cat((flat, loss.total.detach()[None], loss.count[None]), out=rollout["gradient"])
        rates = method.actor_rates(networks, sequence // self.config.rollouts_per_step)
        if rates is not None:
            count = float(loss.count)
            clipped = clip_scale(float(flat.norm()) / count, self.config.clip_norm) / count
            named = zip(parameters, gradients, strict=True)
            weights.board.add_unlocked({n: g * (-clipped * rates[n]) for n, g in named})
