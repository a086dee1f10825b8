"""AlphaZero and expert iteration: a search acts, and a network learns what it found (Silver et al. 2018,
doi:10.1126/science.aar6404; Anthony, Tian and Barber 2017, arXiv:1705.08439).

    policy target   the search's distribution over the moves
    value target    the game's result for the player to move; after it the newest value, where the replay ends

Results pass from player to player with a discount of -1, so the target is an n-step return of the replay buffer. The network
is the prior of the search. Its value evaluates leaves in AlphaZero, random playouts do so in expert iteration. Half of the
positions of a minibatch are mirrored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from whorl.agents.environments.environment import Spaces
from whorl.agents.methods.method import MethodConfig
from whorl.agents.methods.replayed import ReplayConfig, ReplayMethod
from whorl.agents.networks import draw_action, initialize
from whorl.agents.search.game import GAMES, Game, playout
from whorl.agents.search.match import Player, play_match, random_player, uct_player
from whorl.agents.search.tree import Found, search
from whorl.objectives.next_token import Loss
from whorl.train.learner.update import MicroBatch, Update, all_adamw


class AlphaZeroConfig(ReplayConfig):
    method: Literal["alphazero"] = "alphazero"
    environment: str = "connect4"
    steps: int = Field(default=800_000, ge=1)
    actors: int = Field(default=1, ge=0)
    n_envs: int = Field(default=256, ge=1)
    n_steps: int = Field(default=8, ge=1)
    hidden: tuple[int, ...] = Field(default=(32, 32, 32), min_length=1, description="channels of blocks")
    discount: float = Field(default=-1.0, ge=-1, le=-1, description="-1: a player's gain is the other's loss")
    n_step: int = Field(default=42, ge=1, description="plies before the estimate of the rest")
    learning_rate: float = Field(default=2e-3, gt=0)
    clip_norm: float = Field(default=5.0, gt=0)
    weight_decay: float = Field(default=1e-2, ge=0)
    anneal: bool = True
    capacity: int = Field(default=150_000, ge=2)
    learning_starts: int = Field(default=4_000, ge=1)
    batch_size: int = Field(default=128, ge=1)
    updates_per_step: float = Field(default=0.064, gt=0)
    evaluation: Literal["network", "rollout"] = Field(default="network", description="of a search's leaves")
    rule: Literal["gumbel", "puct"] = Field(default="gumbel", description="how the search chooses moves")
    simulations: int = Field(default=32, ge=1, description="of a search, in self-play and in play")
    search_value: float = Field(default=0.5, ge=0, le=1, description="its share in the value's target")
    opening_moves: int = Field(default=10, ge=0, description="that the search's policy draws")
    random_moves: float = Field(
        default=0.0, ge=0, le=1, description="probability of any legal move, in self-play"
    )
    opponent_simulations: int = Field(default=1000, ge=1, description="of UCT, in the evaluation")


class BoardNetwork(nn.Module):
    """Policy and value of board positions: residual convolutions of 3 x 3 without normalisation.

    forward: states [N, cells], own = 1, other = -1 -> (logits [N, A], values [N] in (-1, 1)).

    Each cell has its own bias, so rows and columns differ. The last convolution of each block starts at 0, so that deep
    networks train without normalisation (Zhang et al. 2019, arXiv:1901.09321).
    """

    def __init__(self, game: Game, hidden: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        self.shape, channels = game.shape, hidden[0]

        def layer(made: nn.Conv2d | nn.Linear, gain: float = 2**0.5) -> nn.Module:
            initialize(made, gain, generator)
            return made

        def block(width: int) -> nn.Module:
            first, second = nn.Conv2d(channels, width, 3, padding=1), nn.Conv2d(width, channels, 3, padding=1)
            return nn.Sequential(layer(first), nn.ReLU(inplace=True), layer(second, 0.0))

        self.first = layer(nn.Conv2d(2, channels, 3, padding=1))
        self.place = nn.Parameter(torch.zeros(channels, *game.shape))
        self.blocks = nn.ModuleList(map(block, hidden))
        self.heads = layer(nn.Conv2d(channels, 32, 1))
        self.policy = layer(nn.Linear(32 * game.n_cells, game.n_actions), 0.01)
        hidden_layer, last = layer(nn.Linear(32 * game.n_cells, 64)), layer(nn.Linear(64, 1), 0.01)
        self.value = nn.Sequential(hidden_layer, nn.ReLU(), last)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        board = state.view(-1, 1, *self.shape)
        planes = torch.cat((board > 0, board < 0), dim=1).float()
        x = (self.first(planes.contiguous(memory_format=torch.channels_last)) + self.place).relu_()
        for block in self.blocks:
            x = (x + block(x)).relu_()
        found = self.heads(x).relu_().flatten(1)
        return self.policy(found), self.value(found).squeeze(-1).tanh()


class AlphaZero(ReplayMethod):
    Config: ClassVar[type[MethodConfig]] = AlphaZeroConfig
    config: AlphaZeroConfig
    actions = "discrete"
    players = 2

    def __init__(self, config: AlphaZeroConfig, spaces: Spaces) -> None:
        super().__init__(config, spaces)
        self.game: Game = GAMES[config.environment]
        self.n_outputs = self.game.n_actions + 1  # policy and value of the search

    def make_networks(self, generator: torch.Generator) -> BoardNetwork:
        return BoardNetwork(self.game, self.config.hidden, generator)

    def search(
        self, networks: BoardNetwork, states: Tensor, simulations: int, generator: torch.Generator, *, explore: bool = False
    ) -> Found:  # fmt: skip
        """Search positions [N, cells]; `explore` adds noise to the prior of the roots."""
        game, config, noise = self.game, self.config, None

        def evaluate(leaves: Tensor) -> tuple[Tensor, Tensor]:
            logits, value = networks(leaves)
            return logits, playout(game, leaves, generator) if config.evaluation == "rollout" else value

        if explore:
            drawn = torch.empty(len(states), game.n_actions).exponential_(generator=generator)
            share = drawn * game.legal(states)  # Dirichlet(1, ..., 1): for few actions
            noise = -drawn.log() if config.rule == "gumbel" else share / share.sum(1, keepdim=True)
        return search(game, states, evaluate, simulations=simulations, rule=config.rule, noise=noise)

    def act(self, networks: BoardNetwork, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions, and policies and values of the search [B, A + 1]. The policies draw the first moves."""
        states, seed = observation.to(torch.int8), int(noise[0] * (1 << 24))
        generator = torch.Generator().manual_seed(seed)
        _, value, tree = self.search(networks, states, self.config.simulations, generator, explore=True)
        policy, opening = tree.policy, (states != 0).sum(1) < self.config.opening_moves
        action = torch.where(opening, draw_action(policy.log(), noise), tree.action)
        strays = torch.rand(len(states), generator=generator) < self.config.random_moves
        action = torch.where(strays, random_player(self.game)(states, generator), action)
        return action, torch.cat((policy, value[:, None]), dim=1)

    def greedy_action(self, networks: BoardNetwork, observation: Tensor) -> Tensor:
        play = self.player(networks, self.config.simulations)
        return play(observation.to(torch.int8), torch.Generator().manual_seed(0))

    def player(self, networks: BoardNetwork, simulations: int) -> Player:
        """Return the agent as a player of matches."""
        return lambda states, generator: self.search(networks, states, simulations, generator).tree.action

    def match_points(self, networks: BoardNetwork, games: int, seed: int) -> list[float]:
        agent = self.player(networks, self.config.simulations)
        opponent = uct_player(self.game, self.config.opponent_simulations)
        return play_match(self.game, (agent, opponent), games, seed).points.tolist()

    def make_updates(self, networks: BoardNetwork) -> list[Update]:
        config, loss = self.config, partial(self.loss, networks)
        optims = all_adamw(networks, config.learning_rate)
        return [Update(loss, optims, clip_norm=config.clip_norm, weight_decay=config.weight_decay)]

    def loss(self, networks: BoardNetwork, part: MicroBatch) -> Loss:
        """Return the cross-entropy with the search's policy, plus the squared error of the value."""
        state, policy, target = part["observation"], part["output"][:, :-1], part["reward"]
        unknown = part["next_discount"] != 0  # the replay ends before the game
        if unknown.any():
            later = networks(part["next_observation"][unknown])[1].detach()
            target = target.index_put((unknown,), target[unknown] + part["next_discount"][unknown] * later)
        target = target.lerp(part["output"][:, -1], self.config.search_value)
        half, columns = len(state) // 2, self.game.shape[1]
        mirrored = (t[:half].view(half, -1, columns).flip(2).flatten(1) for t in (state, policy))
        state, policy = (torch.cat((m, t[half:])) for m, t in zip(mirrored, (state, policy), strict=True))
        logits, value = networks(state)
        log_prob = logits.masked_fill(~self.game.legal(state), -1e9).log_softmax(1)
        entropy, error = -(policy * log_prob).sum(), (value - target).square().sum()
        count = torch.tensor(float(len(state)))
        return Loss(entropy + error, count, {"policy_loss": entropy.detach(), "value_loss": error.detach()})
