"""Classic control problems, each written as tensor operations over all environments.

Dynamics, limits, rewards and time limits are those of gymnasium 1.4. Its sources are Barto, Sutton & Anderson 1983 for
CartPole, Sutton 1996 for Acrobot, and Moore 1990 for MountainCar. `tests/agents/test_classic_control.py` compares both
step by step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whorl.agents.environments.environment import BatchedEnvironment, Spaces


class CartPole(BatchedEnvironment):
    """Push a cart left (0) or right (1) to keep its pole upright. State: x, x', angle, angle'. Reward: 1 per step."""

    spaces, default_max_episode_steps = Spaces((4,), n_actions=2), 500

    def __init__(self, num_envs: int, *, max_episode_steps: int | None = None, device: str = "cpu") -> None:
        super().__init__(num_envs, max_episode_steps=max_episode_steps, device=device)
        self.forces = torch.tensor([-10.0, 10.0], dtype=torch.float64, device=self.device)
        self.reward = torch.ones(num_envs, device=self.device)
        limits = [2.4, math.inf, 12 * 2 * math.pi / 360, math.inf]
        self.limits = torch.tensor(limits, dtype=torch.float64, device=self.device)[:, None]

    def initial_state(self, n: int) -> Tensor:
        return self.uniform(-0.05, 0.05, 4, n)

    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gravity, pole_mass, total_mass, half_length, tau = 9.8, 0.1, 1.1, 0.5, 0.02
        _, velocity, angle, spin = state.unbind()
        cos, sin = angle.cos(), angle.sin()
        push = self.forces.index_select(0, action)
        push.addcmul_(spin.square(), sin, value=pole_mass * half_length).div_(total_mass)
        lever = cos.square().mul_(-half_length * pole_mass / total_mass).add_(half_length * 4.0 / 3.0)
        spin_up = (gravity * sin).addcmul_(cos, push, value=-1.0).div_(lever)
        speed_up = push.addcmul_(spin_up, cos, value=-pole_mass * half_length / total_mass)
        # Explicit Euler: positions advance by the old velocities, velocities by the accelerations.
        next_state = torch.add(state, torch.stack((velocity, speed_up, spin, spin_up)), alpha=tau)
        off_track, _, fallen, _ = (next_state.abs() > self.limits).unbind()
        return next_state, self.reward, off_track | fallen

    def observe(self, state: Tensor) -> Tensor:
        return state.t().float()


class Acrobot(BatchedEnvironment):
    """Swing the tip of a two-link pendulum above a line, by torque -1, 0 or +1 at the joint between the links.

    State: both angles and their velocities, integrated by one Runge-Kutta step of 0.2 s. Reward: -1 per step, 0 at the
        goal.
    """

    spaces, default_max_episode_steps = Spaces((6,), n_actions=3), 500

    def initial_state(self, n: int) -> Tensor:
        return self.uniform(-0.1, 0.1, 4, n).float().double()

    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        torque, dt = action.double() - 1.0, 0.2
        k1 = self._derivative(state, torque)
        k2 = self._derivative(torch.add(state, k1, alpha=dt / 2), torque)
        k3 = self._derivative(torch.add(state, k2, alpha=dt / 2), torque)
        k4 = self._derivative(torch.add(state, k3, alpha=dt), torque)
        next_state = torch.add(state, k1.add_(k4).add_(k2.add_(k3), alpha=2.0), alpha=dt / 6)
        next_state[:2] = torch.remainder(next_state[:2] + math.pi, 2 * math.pi) - math.pi
        next_state[2].clamp_(-4 * math.pi, 4 * math.pi)
        next_state[3].clamp_(-9 * math.pi, 9 * math.pi)
        up = -next_state[0].cos() - (next_state[1] + next_state[0]).cos() > 1.0
        return next_state, up.float() - 1.0, up

    def _derivative(self, state: Tensor, torque: Tensor) -> Tensor:
        """Return the time derivative of the state.

        Masses, lengths and moments of inertia are 1, and centers of mass are at 1/2. The variables d1, d2, phi1 and
        phi2 are those of Sutton & Barto (2018, section 11.3 of the first edition), with cos(x - pi/2) = sin(x).
        """
        gravity = 9.8
        one, two, spin_one, spin_two = state.unbind()
        sin_one, sin_two, sin_both = torch.stack((one, two, one + two)).sin_().unbind()
        d2 = two.cos().mul_(0.5).add_(1.25)
        d1 = d2.mul(2.0).add_(1.0)
        ratio = d2 / d1
        phi2 = sin_both.mul_(0.5 * gravity)
        swing = torch.add(spin_one, spin_two, alpha=0.5).mul_(spin_two).mul_(sin_two)
        phi1 = torch.add(phi2, sin_one, alpha=1.5 * gravity).sub_(swing)
        pull = (torque - phi2).addcmul_(ratio, phi1).addcmul_(spin_one.square(), sin_two, value=-0.5)
        speed_two = pull.div_((d2 * ratio).neg_().add_(1.25))
        speed_one = phi1.addcmul_(d2, speed_two).div_(d1).neg_()
        return torch.stack((spin_one, spin_two, speed_one, speed_two))

    def observe(self, state: Tensor) -> Tensor:
        one, two = state[0], state[1]
        return torch.stack((one.cos(), one.sin(), two.cos(), two.sin(), state[2], state[3]), dim=1).float()


class Pendulum(BatchedEnvironment):
    """Swing a pendulum up and hold it there, by a torque in [-2, 2]. State: angle (0 is up) and angular velocity."""

    spaces, default_max_episode_steps = Spaces((3,), action_low=(-2.0,), action_high=(2.0,)), 200

    def initial_state(self, n: int) -> Tensor:
        return torch.stack((self.uniform(-math.pi, math.pi, n), self.uniform(-1.0, 1.0, n)))

    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gravity, dt = 10.0, 0.05
        angle, spin = state
        torque = action.view(-1).double()
        error = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        cost = error.square() + 0.1 * spin.square() + 0.001 * torque.square()
        faster = (spin + (1.5 * gravity * angle.sin() + 3.0 * torque) * dt).clamp(-8.0, 8.0)
        return torch.stack((angle + faster * dt, faster)), -cost.float(), self.none_ended

    def observe(self, state: Tensor) -> Tensor:
        return torch.stack((state[0].cos(), state[0].sin(), state[1]), dim=1).float()

    def state_of(self, observation: Tensor) -> Tensor:
        cos, sin, spin = observation.double().t()
        return torch.stack((torch.atan2(sin, cos), spin))


class MountainCar(BatchedEnvironment):
    """Drive a weak car (left 0, coast 1, right 2) out of a valley. State: position, velocity. Reward: -1 per step."""

    spaces, default_max_episode_steps = Spaces((2,), n_actions=3), 200

    def initial_state(self, n: int) -> Tensor:
        state = torch.zeros(2, n, dtype=torch.float64, device=self.device)
        state[0] = self.uniform(-0.6, -0.4, n)
        return state

    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        position, velocity = state
        velocity = (velocity + (action - 1) * 0.001 - 0.0025 * (3 * position).cos()).clamp_(-0.07, 0.07)
        position = (position + velocity).clamp_(-1.2, 0.6)
        velocity = velocity.masked_fill((position == -1.2) & (velocity < 0), 0.0)
        at_goal = (position >= 0.5) & (velocity >= 0)
        reward = torch.full((self.num_envs,), -1.0, device=self.device)
        return torch.stack((position, velocity)), reward, at_goal

    def observe(self, state: Tensor) -> Tensor:
        return state.t().float()
