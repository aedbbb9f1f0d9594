"""Reinforcement learning with actors and a learner: balance a pole on a cart.

    muster run --nproc-per-node 3 examples/python/actor_learner.py

Rank 0 is the learner, the other ranks are actors. Each actor has carts of its own, and plays them with a copy of the
policy. The learner pulls experience from each actor as soon as it is there, learns from it, and pushes the new weights
to this actor. No actor waits for another one. So an actor may have played with weights that have changed since; the
learner corrects for that with the probabilities that the actor's policy gave to its actions. The algorithm is PPO
(Schulman et al. 2017). The return of an episode is the number of steps until the pole falls, 500 at most.
"""

import argparse
import asyncio
import math
import os
from collections import deque

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from muster import rpc

CARTS = 16  # of each actor
STEPS = 64  # of each cart between two pulls
LONGEST = 500  # steps of an episode
DISCOUNT = 0.99
REWARD = 1 - DISCOUNT  # of each step, so that values are between 0 and 1
TRACE = 0.95  # lambda of generalized advantage estimation
CLIP = 0.2
PASSES = 4  # over each piece of experience
RATE = 3e-3


class CartPole:
    """Carts with a pole, in one tensor. The physics are those of Barto, Sutton and Anderson (1983)."""

    def __init__(self, count: int) -> None:
        self.state = torch.empty(count, 4).uniform_(-0.05, 0.05)  # position, speed, angle, angular speed
        self.age = torch.zeros(count)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """action: int64[carts], 0 pushes to the left and 1 to the right. Returns which poles have fallen, and which
        episodes have ended.
        """
        speed, angle, turning = self.state[:, 1:].unbind(dim=1)
        cosine, sine = angle.cos(), angle.sin()
        push = (20.0 * action - 10.0 + 0.05 * turning.square() * sine) / 1.1
        turn = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
        acceleration = push - 0.05 * turn * cosine / 1.1
        change = torch.stack([speed, acceleration, turning, turn], dim=1)
        self.state = self.state + 0.02 * change
        self.age += 1
        fallen = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > math.radians(12))
        return fallen, fallen | (self.age >= LONGEST)

    def restart(self, ended: Tensor) -> None:
        self.state[ended] = torch.empty(int(ended.sum()), 4).uniform_(-0.05, 0.05)
        self.age[ended] = 0


class Policy(nn.Module):
    """Scores of the two actions, and the value of a state: the discounted return to expect from there."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, state: Tensor) -> tuple[Categorical, Tensor]:
        return Categorical(logits=self.actor(state)), self.critic(state)[..., 0]


class Actor:
    """Made by the learner at each actor. It has one caller, so it needs no lock."""

    def __init__(self) -> None:
        self.carts, self.policy = CartPole(CARTS), Policy()

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        self.policy.load_state_dict(weights)

    @torch.no_grad()
    def play(self) -> tuple[list[Tensor], list[float]]:
        """Returns states, actions, their log-probabilities, which poles have fallen and which episodes have ended, each
        with the dimensions [STEPS, CARTS], except that there is one more state; and the returns of these episodes.
        """
        states, actions, chances, falls, ends = [self.carts.state.clone()], [], [], [], []
        returns: list[float] = []
        for _ in range(STEPS):
            distribution, _ = self.policy(self.carts.state)
            action = distribution.sample()
            fallen, ended = self.carts.step(action)
            returns += self.carts.age[ended].tolist()
            self.carts.restart(ended)
            states.append(self.carts.state.clone())
            actions.append(action)
            chances.append(distribution.log_prob(action))
            falls.append(fallen)
            ends.append(ended)
        return [torch.stack(each) for each in (states, actions, chances, falls, ends)], returns


class Learner:
    def __init__(self, updates: int) -> None:
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=RATE)
        self.updates = updates
        self.done = 0
        self.returns: deque[float] = deque(maxlen=100)

    def weights(self) -> dict[str, Tensor]:
        """A copy: the next update changes the weights, perhaps while they are sent."""
        return {name: value.clone() for name, value in self.policy.state_dict().items()}

    async def follow(self, actor: rpc.RRef[Actor]) -> None:
        """Learns from one actor. asyncio runs this for all actors in one thread; updates do not overlap."""
        while self.done < self.updates:
            await actor.rpc_async().set_weights(self.weights())
            experience, returns = await actor.rpc_async().play()
            if self.done == self.updates:  # meanwhile, with experience of the other actors
                return
            self.returns.extend(returns)
            self.update(*experience)
            self.done += 1
            if self.done % 20 == 0 and self.returns:
                mean = sum(self.returns) / len(self.returns)
                print(f"update {self.done:4}: mean return {mean:.1f}", flush=True)

    def update(self, states: Tensor, actions: Tensor, chances: Tensor, falls: Tensor, ends: Tensor) -> None:
        advantages, targets = self.judge(states, falls, ends)
        self.optimizer.param_groups[0]["lr"] = RATE * (1 - self.done / self.updates)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        for _ in range(PASSES):
            distribution, values = self.policy(states[:-1])
            ratio = (distribution.log_prob(actions) - chances).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
            loss = 0.5 * (values - targets).square().mean() - gain.mean() - 0.01 * distribution.entropy().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def judge(self, states: Tensor, falls: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """How much better each action was than expected, and what the value of its state should have been."""
        _, values = self.policy(states)
        goes_on = 1.0 - ends.float()
        surprise = REWARD + DISCOUNT * goes_on * values[1:] - values[:-1]
        surprise[ends & ~falls] = 0  # the time was up: what would have come next is not known
        advantages = torch.zeros_like(surprise)
        later = torch.zeros_like(values[0])
        for step in reversed(range(len(surprise))):
            later = surprise[step] + DISCOUNT * TRACE * goes_on[step] * later
            advantages[step] = later
        return advantages, advantages + values[:-1]


async def learn(learner: Learner, actors: list[rpc.RRef[Actor]]) -> None:
    await asyncio.gather(*(learner.follow(actor) for actor in actors))


def main() -> None:
    parser = argparse.ArgumentParser(description="Balance a pole on a cart, with actors and a learner.")
    parser.add_argument("--updates", type=int, default=300, help="pieces of experience to learn from (default: 300)")
    arguments = parser.parse_args()

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size < 2:
        parser.error("a learner needs actors: start at least two processes")
    torch.manual_seed(rank)
    rpc.init_rpc("learner" if rank == 0 else f"actor{rank}")
    if rank == 0:
        actors = [rpc.remote(f"actor{number}", Actor) for number in range(1, size)]
        asyncio.run(learn(Learner(arguments.updates), actors))
    rpc.shutdown()


if __name__ == "__main__":
    main()
