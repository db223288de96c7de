"""Reinforcement learning: a policy that balances a pole on a cart (REINFORCE, with a learned baseline).

    python examples/reinforcement.py                        # alone
    unisono run examples/reinforcement.py --workers 4       # on four workers: the same bits

A sample is the start of an episode, and a micro-batch plays its episodes to the end. The library sets the generators
before each sample and before each micro-batch, so the same games are played, whichever worker plays them.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, Dataset, TensorDataset

import unisono

LONGEST = 500  # steps: then an episode is over
DISCOUNT = 0.99
GRAVITY, CART, POLE, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02


class Starts(Dataset[Tensor]):
    """Starts of episodes: position, speed, angle and turning speed, (4,), drawn anew in every epoch."""

    def __init__(self, num_episodes: int) -> None:
        self._num_episodes = num_episodes

    def __len__(self) -> int:
        return self._num_episodes

    def __getitem__(self, index: int) -> Tensor:
        return torch.empty(4).uniform_(-0.05, 0.05)


def move(states: Tensor, actions: Tensor) -> Tensor:
    """Return the states (n, 4) after a push to the left (0) or right (1), by Barto, Sutton and Anderson (1983)."""
    _, speed, angle, turning = states.unbind(1)
    force = FORCE * (2 * actions - 1)
    sine, cosine = angle.sin(), angle.cos()
    pushed = (force + POLE * HALF_LENGTH * turning**2 * sine) / (CART + POLE)
    turned = (GRAVITY * sine - cosine * pushed) / (HALF_LENGTH * (4 / 3 - POLE * cosine**2 / (CART + POLE)))
    moved = pushed - POLE * HALF_LENGTH * turned * cosine / (CART + POLE)
    return states + SECONDS * torch.stack((speed, moved, turning, turned), 1)


def stands(states: Tensor) -> Tensor:
    """Return whether the cart is on its track and the pole upright, (n,)."""
    return (states[:, 0].abs() < 2.4) & (states[:, 2].abs() < math.radians(12))


class Policy(nn.Module):
    """States (..., 4) -> scores of the two actions, (..., 2), and the discounted return to expect, (...)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.Tanh())
        self.actions = nn.Linear(width, 2)
        self.expected = nn.Linear(width, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(states)
        return self.actions(features), self.expected(features).squeeze(-1)


@torch.no_grad()
def play(policy: nn.Module, states: Tensor, longest: int, *, greedy: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Play n episodes to their ends, from these states (n, 4).

    Returns:
        States (time, n, 4), actions (time, n), and rewards (time, n): 1 while the pole stands, 0 when it has fallen.
    """
    seen: list[Tensor] = []
    done: list[Tensor] = []
    rewards: list[Tensor] = []
    going = stands(states)
    while going.any() and len(seen) < longest:
        scores, _ = policy(states)
        actions = scores.argmax(1) if greedy else Categorical(logits=scores).sample()
        seen.append(states)
        done.append(actions)
        rewards.append(going.float())
        states = move(states, actions)
        going = going & stands(states)
    return torch.stack(seen), torch.stack(done), torch.stack(rewards)


def discounted(rewards: Tensor) -> Tensor:
    """Return the discounted sums of the rewards from each time on, (time, n), scaled to at most 1."""
    returns, following = torch.empty_like(rewards), torch.zeros_like(rewards[0])
    for time in range(len(rewards) - 1, -1, -1):
        following = rewards[time] + DISCOUNT * following
        returns[time] = following
    return (1 - DISCOUNT) * returns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--batch-size", type=int, default=32, help="episodes")
    parser.add_argument("--microbatches", type=int, default=4, help="cuts of a batch: the most workers that make sense")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--episodes", type=int, default=160, help="of an epoch")
    parser.add_argument("--longest", type=int, default=LONGEST, help="steps of an episode")
    parser.add_argument("--run-dir", default="runs/reinforcement")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is in this directory")
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
    arguments = parser.parse_args()
    loader = DataLoader(Starts(arguments.episodes), batch_size=arguments.batch_size)

    run = unisono.Run(
        arguments.run_dir,
        seed=arguments.seed,
        overwrite=arguments.overwrite,
        checkpoint=unisono.Checkpoints(every_steps=arguments.checkpoint_every),
    )
    policy = Policy(width=64).to(run.device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=arguments.lr)
    run.track(policy=policy, optimizer=optimizer)
    test_loader = DataLoader(TensorDataset(torch.empty(100, 4).uniform_(-0.05, 0.05)), batch_size=25)

    for epoch in run.epochs(arguments.epochs):
        for step in run.steps(loader, microbatches=arguments.microbatches):
            for starts in step:
                states, actions, rewards = play(policy, starts, arguments.longest)
                scores, expected = policy(states)
                returns = discounted(rewards)
                gained = (returns - expected).detach()
                losses = (returns - expected) ** 2 - gained * Categorical(logits=scores).log_prob(actions)
                loss = (losses * rewards).sum(0).mean()
                loss.backward()
                step.add(returns=rewards.sum(), episodes=len(starts))
            optimizer.step()
        if run.is_main:
            print(f"epoch {epoch}: mean return {run.totals['returns'] / run.totals['episodes']:.1f}")

    def count(batch: list[Tensor]) -> dict[str, Tensor | int]:
        _, _, rewards = play(policy, batch[0], arguments.longest, greedy=True)
        return {"returns": rewards.sum(), "episodes": rewards.shape[1]}

    totals = run.evaluate(test_loader, count)
    if run.is_main:
        mean = totals["returns"] / totals["episodes"]
        print(f"test return {mean:.1f} of {arguments.longest} ({totals['episodes']:.0f} greedy episodes)")


if __name__ == "__main__":
    main()
