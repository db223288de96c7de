"""Policies and value functions. A sample of the dataset is the state in which an episode begins, or a transition."""

from __future__ import annotations

import copy
import math
import random
from collections import deque

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence
from torch.nn import functional as F
from torch.optim import Adam
from torch.utils.data import Dataset

import unisono
from tests.patterns.corpus import labelled, pattern, perceptron

steps_done = 0


def reward_of(states: Tensor, actions: Tensor) -> Tensor:
    """What a bandit pays: more where the action is that of the largest of three features."""
    return (states[:, :3].argmax(1) == actions).float() + 0.1 * states[:, 3]


@pattern
def moving_baseline_of_reinforce(run: unisono.Run) -> None:
    """Subtracts the running mean of the returns from the returns."""
    policy = perceptron()
    optimizer = Adam(policy.parameters(), lr=0.01)
    run.track(policy=policy, optimizer=optimizer)
    baseline = 0.0
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for states, _ in step:
            chosen = Categorical(logits=policy(states))
            actions = chosen.sample()
            returns = reward_of(states, actions)
            step.backward(-(chosen.log_prob(actions) * (returns - baseline)).mean(), weight=len(states))
            baseline = 0.9 * baseline + 0.1 * returns.mean().item()
        optimizer.step()


@pattern
def baseline_from_the_loss_of_the_step(run: unisono.Run) -> None:
    """Trains a value head along with the policy, and normalises rewards by what the last steps' losses were."""
    body, policy, value = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 1)
    model = nn.ModuleDict({"body": body, "policy": policy, "value": value})
    optimizer = Adam(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    scale = 1.0
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for states, _ in step:
            hidden = torch.tanh(body(states))
            chosen = Categorical(logits=policy(hidden))
            actions = chosen.sample()
            advantage = reward_of(states, actions) / scale - value(hidden).squeeze(1)
            gain = (chosen.log_prob(actions) * advantage.detach()).mean() + 0.01 * chosen.entropy().mean()
            step.backward(advantage.square().mean() - gain, weight=len(states))
        optimizer.step()
        scale = 0.9 * scale + 0.1 * max(0.1, abs(step.loss))


class Transitions(Dataset[tuple[Tensor, int, float, Tensor]]):
    """Of a walk on a line of eight places."""

    def __len__(self) -> int:
        return 56

    def __getitem__(self, index: int) -> tuple[Tensor, int, float, Tensor]:
        place, action = index % 8, index // 8 % 2
        after = min(7, place + 1) if action else max(0, place - 1)
        return torch.eye(8)[place], action, float(after == 7), torch.eye(8)[after]


@pattern
def target_network_copied_every_other_step(run: unisono.Run) -> None:
    """Q-learning from stored transitions; the target network is a copy that is renewed every other step."""
    online = perceptron(classes=2)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = Adam(online.parameters(), lr=0.02)
    run.track(online=online, target=target, optimizer=optimizer)
    for step in run.steps(Transitions(), batch_size=24, microbatches=6, epochs=2):
        for state, action, reward, after in step:
            wanted = reward.float() + 0.9 * target(after).max(1).values
            q = online(state).gather(1, action[:, None]).squeeze(1)
            step.backward(F.smooth_l1_loss(q, wanted), weight=len(state))
        nn.utils.clip_grad_value_(online.parameters(), 1.0)
        optimizer.step()
        if step.number % 2:
            target.load_state_dict(online.state_dict())


@pattern
def soft_update_in_the_loss_function(run: unisono.Run) -> None:
    """Moves the target network a little towards the online one whenever the loss is computed."""
    online = perceptron(classes=2)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = Adam(online.parameters(), lr=0.02)
    run.track(online=online, optimizer=optimizer)

    def compute_loss(state: Tensor, action: Tensor, reward: Tensor, after: Tensor) -> Tensor:
        for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
            slow.data.mul_(0.95).add_(fast.data, alpha=0.05)
        wanted = reward.float() + 0.9 * target(after).max(1).values
        return F.smooth_l1_loss(online(state).gather(1, action[:, None]).squeeze(1), wanted)

    for step in run.steps(Transitions(), batch_size=24, microbatches=6, epochs=2):
        for batch in step:
            step.backward(compute_loss(*batch), weight=len(batch[0]))
        optimizer.step()


@pattern
def replay_buffer_filled_in_the_loop(run: unisono.Run) -> None:
    """Acts in the states of the batch, stores what happened, and learns from a random part of all that is stored."""
    model = perceptron()
    optimizer = Adam(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    memory: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=100)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for states, _ in step:
            with torch.no_grad():
                actions = model(states).argmax(1)
            memory.extend(zip(states, actions, reward_of(states, actions), strict=True))
            drawn = random.sample(memory, len(states))
            old_states, old_actions, rewards = (torch.stack(part) for part in zip(*drawn, strict=True))
            q = model(old_states).gather(1, old_actions[:, None]).squeeze(1)
            step.backward(F.smooth_l1_loss(q, rewards), weight=len(states))
        optimizer.step()


def select_actions(model: nn.Module, states: Tensor) -> Tensor:
    """Random ones in place of the best with a probability that falls with every call."""
    global steps_done
    epsilon = 0.05 + 0.85 * math.exp(-steps_done / 20)
    steps_done += 1
    with torch.no_grad():
        best = model(states).argmax(1)
    return torch.where(torch.rand(len(states)) < epsilon, torch.randint(0, 3, (len(states),)), best)


@pattern
def exploration_that_falls_with_a_global_counter(run: unisono.Run) -> None:
    """Chooses actions at random with a probability that falls with the global ``steps_done`` of the DQN tutorial."""
    model = perceptron()
    optimizer = Adam(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for states, _ in step:
            actions = select_actions(model, states)
            q = model(states).gather(1, actions[:, None]).squeeze(1)
            step.backward(F.smooth_l1_loss(q, reward_of(states, actions)), weight=len(states))
        optimizer.step()


class RunningMeanStd:
    """Of all values so far (Welford, in batches)."""

    def __init__(self) -> None:
        self.mean, self.variance, self.count = 0.0, 1.0, 1e-4

    def update(self, values: Tensor) -> None:
        mean, variance, count = values.mean().item(), values.var(correction=0).item(), len(values)
        delta, total = mean - self.mean, self.count + count
        spread = self.variance * self.count + variance * count + delta**2 * self.count * count / total
        self.mean, self.variance, self.count = self.mean + delta * count / total, spread / total, total


@pattern
def rewards_normalised_by_running_statistics(run: unisono.Run) -> None:
    """Divides rewards by the running standard deviation of all rewards, kept in an object as in Stable Baselines."""
    policy, statistics = perceptron(), RunningMeanStd()
    optimizer = Adam(policy.parameters(), lr=0.01)
    run.track(policy=policy, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for states, _ in step:
            chosen = Categorical(logits=policy(states))
            actions = chosen.sample()
            rewards = reward_of(states, actions)
            statistics.update(rewards)
            rewards = (rewards - statistics.mean) / math.sqrt(statistics.variance + 1e-8)
            step.backward(-(chosen.log_prob(actions) * rewards).mean(), weight=len(states))
        optimizer.step()


@pattern
def stopping_a_ppo_epoch_when_the_policy_moved_too_far(run: unisono.Run) -> None:
    """Breaks out of the batches when the divergence from the old policy is larger than a target."""
    policy = perceptron()
    old = copy.deepcopy(policy).requires_grad_(False)
    optimizer = Adam(policy.parameters(), lr=0.05)
    run.track(policy=policy, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for states, _ in step:
            now, before = Categorical(logits=policy(states)), Categorical(logits=old(states))
            if kl_divergence(before, now).mean() > 0.02:
                break
            actions = before.sample()
            ratio = (now.log_prob(actions) - before.log_prob(actions)).exp()
            step.backward(-(ratio * reward_of(states, actions)).mean(), weight=len(states))
        optimizer.step()


@pattern
def coefficient_adapted_by_the_last_divergence(run: unisono.Run) -> None:
    """PPO with an adaptive KL penalty, halved or doubled after each update by the divergence of the last batch."""
    policy = perceptron()
    old = copy.deepcopy(policy).requires_grad_(False)
    optimizer = Adam(policy.parameters(), lr=0.05)
    run.track(policy=policy, old=old, optimizer=optimizer)
    beta = 1.0
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for states, _ in step:
            now, before = Categorical(logits=policy(states)), Categorical(logits=old(states))
            actions = before.sample()
            ratio = (now.log_prob(actions) - before.log_prob(actions)).exp()
            divergence = kl_divergence(before, now).mean()
            gain = (ratio * reward_of(states, actions)).mean()
            step.backward(beta * divergence - gain, weight=len(states))
        optimizer.step()
        beta *= min(2.0, max(0.5, divergence.item() / 0.01))
        if step.is_last_of_epoch:
            old.load_state_dict(policy.state_dict())


class Rollouts(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """The transitions that the policy of now makes, collected anew before each step."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy
        self.collect()

    @torch.no_grad()
    def collect(self) -> None:
        self.states = torch.randn(24, 8)
        chosen = Categorical(logits=self.policy(self.states))
        self.actions = chosen.sample()
        self.log_probs = chosen.log_prob(self.actions)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.states[index], self.actions[index], self.log_probs[index]


@pattern
def rollouts_collected_between_the_steps(run: unisono.Run) -> None:
    """Fills the dataset with new rollouts of the policy after each update; an epoch is one batch of them."""
    policy = perceptron()
    optimizer = Adam(policy.parameters(), lr=0.05)
    run.track(policy=policy, optimizer=optimizer)
    rollouts = Rollouts(policy)
    for step in run.steps(rollouts, batch_size=24, microbatches=6, epochs=5):
        for states, actions, log_probs in step:
            ratio = (Categorical(logits=policy(states)).log_prob(actions) - log_probs).exp()
            rewards = reward_of(states, actions)
            step.backward(-torch.min(ratio * rewards, ratio.clamp(0.8, 1.2) * rewards).mean(), weight=len(states))
        optimizer.step()
        rollouts.collect()
