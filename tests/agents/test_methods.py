"""Methods: equalities between them, losses against their definitions, and errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from whorl.agents.environments.environment import Spaces
from whorl.agents.exploration import Exploration, ExplorationConfig, VisitCounts
from whorl.agents.methods.registration import METHODS, make_config, make_method, parse_config
from whorl.agents.task import AgentTask, open_method, train
from whorl.errors import ConfigError
from whorl.objectives.action_value import q_target, soft_policy_loss
from whorl.train.learner.learner import Learner


def weights(method: str, environment: str = "CartPole-v1", **changes: object) -> dict[str, torch.Tensor]:
    networks = train(make_config(method, environment, **changes))
    return {name: p.detach().clone() for name, p in networks.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("actors", [0, 1])
def test_a3c_with_one_actor_in_lockstep_equals_a2c(actors: int) -> None:
    wanted = weights("a2c", steps=2048, hidden=(8,))
    assert same(weights("a3c", steps=2048, hidden=(8,), actors=actors, prefetch=0), wanted)


def test_hogwild_actors_move_the_shared_weights() -> None:
    before = dict(open_method(make_config("a3c", "CartPole-v1", hidden=(8,)))[1].named_parameters())
    after = weights("a3c", steps=2048, hidden=(8,), hogwild=True)
    assert all(not torch.equal(before[n], after[n]) for n in after)


@pytest.mark.parametrize(("environment", "method"), [("Pendulum-v1", "dqn"), ("CartPole-v1", "ddpg")])
def test_method_refuses_unsuitable_actions(environment: str, method: str) -> None:
    with pytest.raises(ConfigError, match=f"{method} cannot act in {environment}: its actions are"):
        AgentTask(make_config(method, environment))


def test_td3_is_ddpg_with_its_options() -> None:
    small = {"steps": 300, "learning_starts": 100, "batch_size": 8, "hidden": (8,)}
    options = {"n_critics": 2, "policy_every": 2, "target_noise": 0.2}
    assert same(weights("td3", "Pendulum-v1", **small), weights("ddpg", "Pendulum-v1", **small, **options))


def test_an_update_leaves_other_networks_alone() -> None:
    """The policy's gradient passes through the critics, which get none: it is not computed."""
    config = make_config("sac", "Pendulum-v1", hidden=(8,))
    method, networks = open_method(config)
    critics, policy = Learner(networks, method.make_updates(networks)).updates
    part = {
        "observation": torch.randn(4, 3), "next_observation": torch.randn(4, 3), "action": torch.zeros(4, 1),
        "noise": torch.randn(2, 4, 1), "reward": torch.ones(4), "next_discount": torch.ones(4), "weight": torch.ones(4),
    }  # fmt: skip
    before = {n: p.detach().clone() for n, p in networks.named_parameters()}
    policy.accumulate(policy.objective(part))
    assert all(p.grad is None for n, p in networks.named_parameters())
    policy.step(1.0)
    moved = {n for n, p in networks.named_parameters() if not torch.equal(before[n], p)}
    assert moved == {n for n in before if n.startswith(("policy.", "log_temperature"))}
    critics.accumulate(critics.objective(part))
    critics.step(1.0)
    moved = {n for n, p in networks.named_parameters() if not torch.equal(before[n], p)} - moved
    assert moved == {n for n in before if n.startswith("critics.")}


def test_double_q_target_takes_the_value_of_the_chosen_action() -> None:
    of_next, chooser = torch.tensor([[1.0, 5.0]]), torch.tensor([[3.0, 2.0]])
    reward, discount = torch.tensor([0.5]), torch.tensor([0.9])
    assert q_target(reward, discount, of_next, of_next).tolist() == pytest.approx([0.5 + 0.9 * 5])
    assert q_target(reward, discount, of_next, chooser).tolist() == pytest.approx([0.5 + 0.9 * 1])


def test_discrete_soft_policy_is_the_softmax_of_values() -> None:
    """With alpha = 1 the loss is least for pi = softmax(Q): its gradient is 0 there, by definition of the entropy."""
    value = torch.tensor([[1.0, 2.0, -1.0]])
    logits = value.clone().requires_grad_()
    log_prob = logits.log_softmax(-1)
    soft_policy_loss(log_prob.exp(), log_prob, value, torch.zeros(()), 0.5).total.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None and logits.grad.abs().max() < 1e-6


def test_squashed_gaussian_has_its_density() -> None:
    """The log-probability integrates to 1 over (-1, 1), by the change of variables."""
    config = make_config("sac", "Pendulum-v1", hidden=(8,))
    method, networks = open_method(config)
    noise = torch.linspace(-6, 6, 20_001)[:, None]
    part = {"observation": torch.zeros(len(noise), 3), "noise": torch.stack((noise, noise))}
    with torch.no_grad():
        _, log_prob, _ = method._policy_values(networks, networks.critics, part, 0)
        action = networks.squash(method._draw(networks.policy(part["observation"]), noise)).squeeze(1) / 2
    assert torch.trapezoid(log_prob.exp(), action).item() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("baseline", ["none", "moving-average"])
def test_reinforce_ignores_steps_without_a_known_return(baseline: str) -> None:
    config = make_config("reinforce", "CartPole-v1", baseline=baseline, discount=0.5, hidden=(4,))
    method, networks = open_method(config)
    flags = torch.tensor([[0, 0], [1, 0], [0, 0]], dtype=torch.bool)
    rollout = {
        "observation": torch.zeros(4, 2, 4), "final_observation": torch.zeros(3, 2, 4), "reward": torch.ones(3, 2),
        "terminated": flags, "truncated": torch.zeros_like(flags),
    }  # fmt: skip
    advantage = method.estimate_advantages(networks, rollout)["advantage"]
    assert advantage.tolist() == [[1.5, 0], [1.0, 0], [0, 0]]
    if baseline == "moving-average":
        again = method.estimate_advantages(networks, rollout)["advantage"]
        assert again[:2, 0].tolist() == pytest.approx([1.5 - 0.125, 1.0 - 0.125])


def explore(
    kind: str, spaces: Spaces, n_envs: int = 2000, steps: int = 6, **more: Any
) -> tuple[Exploration, list[torch.Tensor]]:
    """Six actions of an actor whose best action is always 0; even copies end their episode after the third."""
    n_envs, steps = 2000, 6
    exploration = Exploration(ExplorationConfig(kind=kind, start=0.5, end=0.5, **more), spaces, n_envs, 3)  # type: ignore[arg-type]

    class Zero:
        def act(
            self, networks: Any, observation: torch.Tensor, noise: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            best = torch.zeros_like(noise, dtype=torch.int64 if spaces.n_actions else torch.float32)
            return best, best

        def act_as_member(
            self, networks: Any, observation: torch.Tensor, member: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return member, member

    exploration.start(steps, torch.Generator().manual_seed(0), 0, 100)
    actions = []
    for t in range(steps):
        actions.append(exploration.act(Zero(), None, torch.zeros(n_envs, 1), t)[0])
        exploration.end_step(
            torch.arange(n_envs) % 2 == 0 if t == 2 else torch.zeros(n_envs, dtype=torch.bool)
        )
    return exploration, actions


DISCRETE, VECTOR = Spaces((1,), n_actions=4), Spaces((1,), action_low=(-1.0,), action_high=(3.0,))


def test_epsilon_is_the_share_of_random_actions() -> None:
    _, actions = explore("epsilon", DISCRETE)
    share = torch.stack(actions).ne(0).float().mean().item()
    assert share == pytest.approx(0.5 * 3 / 4, abs=0.02)


def test_random_actions_are_repeated_within_an_episode() -> None:
    _, actions = explore("repeat", DISCRETE)
    repeated = (actions[1] == actions[0]) & (actions[0] != 0)
    chance = repeated.sum() / (actions[0] != 0).sum()
    again = 1 - 6 / math.pi**2  # of a length above 1
    assert chance.item() == pytest.approx(again + (1 - again) * 0.5 / 4, abs=0.05)


def test_member_changes_with_the_episode_only() -> None:
    _, members = explore("ensemble", DISCRETE)
    assert torch.equal(members[0], members[2]) and torch.equal(members[2][1::2], members[3][1::2])
    assert members[2][::2].ne(members[3][::2]).float().mean().item() == pytest.approx(2 / 3, abs=0.06)


def test_noise_is_scaled_to_the_range_and_stays_within() -> None:
    _, actions = explore("gaussian", VECTOR, scale=0.1)
    assert torch.stack(actions).std().item() == pytest.approx(0.2, rel=0.05)
    state, actions = explore("ou", VECTOR, scale=5.0)
    assert torch.stack(actions).amax() == 3 and torch.stack(actions).amin() == -1
    assert state.state["noise"].shape == (2000, 1)


def test_bonus_falls_with_visits() -> None:
    counts = VisitCounts(2.0)
    cell = torch.tensor([[[0.5, 1.0]], [[0.5, 1.0]]])
    assert counts.rewards(cell).flatten().tolist() == pytest.approx([2 / math.sqrt(2)] * 2)
    assert counts.rewards(cell[:1] + 1).item() == 2 and counts.rewards(cell[:1]).item() == pytest.approx(
        2 / math.sqrt(3)
    )


@pytest.mark.parametrize(("kind", "spaces"), [("epsilon", VECTOR), ("ou", DISCRETE), ("ensemble", DISCRETE)])
def test_unsuitable_exploration_is_refused(kind: str, spaces: Spaces) -> None:
    with pytest.raises(ConfigError, match=f"exploration.kind is '{kind}'"):
        Exploration(ExplorationConfig(kind=kind), spaces, 2, 1)  # type: ignore[arg-type]


def test_every_method_is_built_from_its_settings() -> None:
    for name, method in METHODS.items():
        assert method.Config.model_fields["method"].default == name
        spaces = VECTOR if method.actions == "vectors" else DISCRETE
        if not (
            method.needs_costs or method.needs_trials or method.players == 2 or name == "max-entropy-irl"
        ):
            assert isinstance(make_method(method.Config(), spaces), method)


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("trpo", {"entropy_coef": 0.1}, "the setting 'entropy_coef' has no effect in trpo"),
        ("reinforce", {"gae_lambda": 0.5}, "the setting 'gae_lambda' has no effect in reinforce"),
        ("cpo", {"actors": 2}, "actors must be 0"),
        ("dqn", {"steps": 500}, r"learning_starts \(1000\) must be at most steps \(500\)"),
        ("dqn", {"capacity": 900}, r"capacity \(900\) must be at least 4 rollouts \(1024 steps\)"),
    ],
)
def test_settings_that_cannot_work_are_refused(method: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(method, "CartPole-v1", changes)
    assert parse_config(
        method, "CartPole-v1", METHODS[method].Config().model_dump(include={"entropy_coef", "steps"})
    )


def test_one_field_of_exploration_keeps_the_others() -> None:
    tuned = parse_config("dqn", "CartPole-v1", {"exploration": {"end": "0.2"}}).exploration
    default = parse_config("dqn", "MountainCar-v0", {"exploration": {"end": "0.2"}}).exploration
    random = parse_config("sac", "Pendulum-v1", {"exploration": {"bonus": "0.5"}}).exploration
    assert (tuned.kind, tuned.end, tuned.fraction) == ("epsilon", 0.2, 0.16)
    assert (default.kind, default.end, default.fraction) == ("epsilon", 0.2, 0.1)
    assert (random.bonus, random.random_steps) == (0.5, 256)
