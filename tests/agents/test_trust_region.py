"""TRPO and CPO: the natural gradient against an explicit Fisher matrix, and the multipliers against a solver."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from whorl.agents.environments.registration import make_tables
from whorl.agents.methods.cpo import solve_dual
from whorl.agents.methods.natural_gradient import conjugate_gradients, fisher_product, line_search
from whorl.agents.methods.registration import make_config
from whorl.agents.rollout import Actor, rollout_spec
from whorl.agents.tabular import constrained_optimum, expected_total
from whorl.agents.task import TrainingProgress, open_method, train
from whorl.errors import ConfigError
from whorl.slots import Board, FIFOReader, SerialProducer, SlotRing


def first_minibatch(method_name: str, environment: str, **changes: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    """The method, its networks, and the minibatch of a first rollout."""
    config = make_config(method_name, environment, hidden=(4,), n_envs=8, n_steps=16, **changes)
    method, networks = open_method(config)
    ring = SlotRing(rollout_spec(method.spaces, 8, 16), 1)
    board = Board.from_tensors(dict(networks.named_parameters()))
    with FIFOReader(ring, [SerialProducer(ring, Actor(config, 3), board=board)]) as records:
        rollout = {n: t.clone() for n, t in next(records).tensors().items()}
    (part,) = next(iter(method.minibatches(networks, rollout, 0)))
    return method, networks, dict(part)


@pytest.mark.parametrize("environment", ["CartPole-v1", "Pendulum-v1"])
def test_direction_equals_an_explicit_fisher_solve(environment: str) -> None:
    method, networks, part = first_minibatch("trpo", environment)
    networks.double()
    part = {n: t.double() if t.is_floating_point() else t for n, t in part.items()}
    parameters = [p for n, p in networks.named_parameters() if "value." not in n]
    size = sum(p.numel() for p in parameters)
    gradient = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # The Fisher matrix by definition: the mean of score x score, over all actions or for a Gaussian in closed form.
    scores, weights = [], []
    output = networks.policy(part["observation"])
    for n in range(len(output)):
        if networks.discrete:
            log_probs = output[n].log_softmax(0)
            terms = [(log_probs[a], float(log_probs[a].detach().exp())) for a in range(len(log_probs))]
        else:  # information of a mean: 1 / width^2, of a log-width: 2
            width = float(networks.log_width.detach().exp())
            terms = [(output[n, 0] / width, 1.0), (networks.log_width[0] * 2**0.5, 1.0)]
        for value, weight in terms:
            pieces = torch.autograd.grad(value, parameters, retain_graph=True, materialize_grads=True)
            scores.append(torch.cat([p.flatten() for p in pieces]))
            weights.append(weight / len(output))
    score = torch.stack(scores)
    fisher = score.T @ (torch.tensor(weights, dtype=torch.float64)[:, None] * score)
    product = fisher_product(lambda: method.kl(networks, part), parameters, damping=0.01)
    damped = fisher + 0.01 * torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(product(gradient), damped @ gradient, rtol=1e-8, atol=1e-10)
    found = conjugate_gradients(product, gradient, iterations=200, tolerance=1e-16)
    torch.testing.assert_close(found, torch.linalg.solve(damped, gradient), rtol=1e-4, atol=1e-6)


def policy_and_gradient(method: Any, networks: Any, part: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
    """The parameters of the policy and the mean gradient of its loss, with which `Method.move` is called."""
    parameters = [p for n, p in networks.named_parameters() if "value." not in n]
    loss = method.policy_loss(networks, part)
    pieces = torch.autograd.grad(loss.total / loss.count, parameters)
    return parameters, torch.cat([p.flatten() for p in pieces])


@pytest.mark.parametrize("environment", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("max_kl", [1e-4, 0.01, 0.5])
def test_accepted_step_keeps_the_kl_limit(environment: str, max_kl: float) -> None:
    method, networks, part = first_minibatch("trpo", environment, kl_limit=max_kl)
    parameters, gradient = policy_and_gradient(method, networks, part)
    memory, before = [p.data_ptr() for p in parameters], [p.detach().clone() for p in parameters]
    (loss,) = method.losses(networks)
    metrics = method.move(networks, parameters, gradient)
    assert 0 < metrics["kl"] <= max_kl and metrics["step_share"] > 0
    assert method.kl(networks, part).item() == metrics["kl"] and method.losses(networks)[0] < loss
    assert [p.data_ptr() for p in parameters] == memory
    assert any(not torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


def test_step_that_improves_nothing_leaves_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    method, networks, part = first_minibatch("trpo", "Pendulum-v1")
    parameters, gradient = policy_and_gradient(method, networks, part)
    before = [p.detach().clone() for p in parameters]
    monkeypatch.setattr(method, "improves", lambda old, new: False)
    assert method.move(networks, parameters, gradient) == {"step_share": 0.0, "kl": 0.0}
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


def test_every_step_of_a_run_keeps_the_kl_limit() -> None:
    found: list[dict[str, float]] = []
    config = make_config("trpo", "CartPole-v1", steps=4096, hidden=(16,), kl_limit=0.005)
    train(config, lambda progress, _: found.append(progress.metrics))
    assert len(found) == 4 and all(0 < step["kl"] <= 0.005 for step in found)


def test_line_search_restores_weights_if_no_step_is_accepted() -> None:
    weights = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])]
    assert line_search(weights, torch.ones(3), lambda: False) == 0.0
    assert torch.cat([w.flatten() for w in weights]).tolist() == [1, 2, 3]
    assert line_search(weights, torch.ones(3), lambda: bool(weights[0][0] < 1.3)) == 0.25


@pytest.mark.parametrize("seed", range(30))
def test_multipliers_equal_a_quadratic_solver(seed: int) -> None:
    """minimize g x with c + b x <= 0 and x H x <= limit, against SLSQP."""
    rng = np.random.default_rng(seed)
    n, limit = 4, 0.02
    root = rng.normal(size=(n, n))
    h, g, b = root @ root.T + np.eye(n), rng.normal(size=n), rng.normal(size=n)
    reach = (
        limit * b @ np.linalg.solve(h, b)
    ) ** 0.5  # the largest change of the cost within the trust region
    c = rng.uniform(-1.5, 1.5) * reach
    along, along_cost = np.linalg.solve(h, g), np.linalg.solve(h, b)
    found = solve_dual(float(g @ along), float(g @ along_cost), float(b @ along_cost), float(c), limit)
    assert found.recover == (c > reach)
    if found.recover:
        return
    x = -(along + found.cost * along_cost) / found.trust
    constraints = [
        {"type": "ineq", "fun": lambda v: -(c + b @ v)},
        {"type": "ineq", "fun": lambda v: limit - v @ h @ v},
    ]
    start = -min(1.0, max(c, 0) / reach) * along_cost * (limit / (b @ along_cost)) ** 0.5
    best = minimize(
        lambda v: g @ v,
        start,
        constraints=constraints,
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert c + b @ x <= 1e-8 and x @ h @ x <= limit * (1 + 1e-6)
    assert g @ x == pytest.approx(best.fun, abs=1e-6)


def test_cost_limit_needs_costs() -> None:
    with pytest.raises(ConfigError, match="cpo limits costs, and CartPole-v1 has none"):
        train(make_config("cpo", "CartPole-v1"))


def test_cpo_keeps_a_limit_near_the_constrained_optimum() -> None:
    """By exact returns and costs of the last ten policies. The first policy is above the limit, and the optimum on it."""
    tables = make_tables("CostlyGrid-v0")
    assert tables.cost is not None
    best = expected_total(tables, constrained_optimum(tables, 1.0, 1.0), tables.reward)
    found: list[tuple[float, ...]] = []

    def observe(progress: TrainingProgress, networks: Any) -> None:
        with torch.no_grad():
            policy = networks.policy(torch.eye(len(tables.terminal))).softmax(-1).double().numpy()
        found.append(tuple(expected_total(tables, policy, each) for each in (tables.reward, tables.cost)))

    train(make_config("cpo", "CostlyGrid-v0", steps=150_000, cost_limit=1.0), observe)
    assert found[0][1] > 2
    total, cost = np.mean(found[-10:], axis=0)
    assert total >= 0.95 * best and cost == pytest.approx(1.0, abs=0.1)


def test_recovery_lowers_the_cost_if_no_step_keeps_the_limit() -> None:
    """The excess is more than the trust region can remove. The expected cost comes from the grid's tables."""
    method, networks, part = first_minibatch("cpo", "CostlyGrid-v0")
    part["excess"] = torch.tensor(10.0)
    parameters, gradient = policy_and_gradient(method, networks, part)
    tables = make_tables("CostlyGrid-v0")
    assert tables.cost is not None

    def expected_cost() -> float:
        with torch.no_grad():
            policy = networks.policy(torch.eye(len(tables.terminal))).softmax(-1)
        return expected_total(tables, policy.double().numpy(), tables.cost)

    cost, surrogate = expected_cost(), method.losses(networks)[1]
    metrics = method.move(networks, parameters, gradient)
    assert method.recovering and "cost_multiplier" not in metrics
    assert 0 < metrics["kl"] <= method.config.kl_limit and metrics["step_share"] > 0
    assert method.losses(networks)[1] < surrogate and expected_cost() < cost
