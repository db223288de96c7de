"""GANs, autoencoders and diffusion models."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import spectral_norm
from torch.nn.utils.parametrizations import spectral_norm as spectral_parametrization
from torch.optim import Adam

import unisono
from tests.patterns.corpus import images, labelled, pattern, perceptron

LATENT = 4


def generator_net() -> nn.Module:
    return nn.Sequential(nn.Linear(LATENT, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))


def critic_net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


@pattern
def generator_and_discriminator_in_turn(run: unisono.Run) -> Tensor:
    """Trains the discriminator at even steps and the generator at odd ones, and keeps an EMA of the generator."""
    generator, critic = generator_net(), critic_net()
    average = copy.deepcopy(generator).requires_grad_(False)
    for_generator = Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.99))
    for_critic = Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.99))
    run.track(generator=generator, critic=critic, average=average, for_generator=for_generator, for_critic=for_critic)
    fixed = torch.randn(5, LATENT)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        trains_critic = step.number % 2 == 0
        critic.requires_grad_(trains_critic)
        generator.requires_grad_(not trains_critic)
        for x, _ in step:
            fake = generator(torch.randn(len(x), LATENT)) if len(x) > 1 else generator.eval()(torch.randn(1, LATENT))
            generator.train()
            if trains_critic:
                loss = F.softplus(-critic(x)).mean() + F.softplus(critic(fake)).mean()
            else:
                loss = F.softplus(-critic(fake)).mean()
            step.backward(loss, weight=len(x))
        if trains_critic:
            for_critic.step()
        else:
            for_generator.step()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), generator.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
    return average.eval()(fixed).detach()


@pattern
def gradient_penalty_and_both_losses(run: unisono.Run) -> None:
    """WGAN-GP with both losses in one batch: the generator's goes through a detached copy of the critic's weights."""
    generator, critic = nn.Sequential(nn.Linear(LATENT, 16), nn.Tanh(), nn.Linear(16, 8)), critic_net()
    optimizer = Adam([*generator.parameters(), *critic.parameters()], lr=0.01)
    run.track(generator=generator, critic=critic, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, _ in step:
            fake = generator(torch.randn(len(x), LATENT))
            between = torch.lerp(x, fake.detach(), torch.rand(len(x), 1)).requires_grad_(True)
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            step.backward(critic(fake.detach()).mean() - critic(x).mean() + 10 * penalty, weight=len(x))
            frozen = {name: parameter.detach() for name, parameter in critic.named_parameters()}
            step.backward(-functional_call(critic, frozen, (fake,)).mean(), weight=len(x))
        optimizer.step()


@pattern
def the_loop_of_the_dcgan_tutorial(run: unisono.Run) -> None:
    """Updates the discriminator and then the generator for every batch, as the tutorial of PyTorch does."""
    generator, critic = nn.Sequential(nn.Linear(LATENT, 16), nn.Tanh(), nn.Linear(16, 8)), critic_net()
    for_generator, for_critic = Adam(generator.parameters(), lr=0.01), Adam(critic.parameters(), lr=0.01)
    run.track(generator=generator, critic=critic, for_generator=for_generator, for_critic=for_critic)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, _ in step:
            critic.zero_grad()
            fake = generator(torch.randn(len(x), LATENT))
            F.softplus(-critic(x)).mean().backward()
            F.softplus(critic(fake.detach())).mean().backward()
            for_critic.step()
            generator.zero_grad()
            step.backward(F.softplus(-critic(fake)).mean(), weight=len(x))
            for_generator.step()


@pattern
def spectral_norm_of_both_kinds(run: unisono.Run) -> None:
    """Normalises one layer by the old spectral_norm and one by the parametrization."""
    model = nn.Sequential(
        spectral_norm(nn.Linear(8, 16)), nn.LeakyReLU(0.2), spectral_parametrization(nn.Linear(16, 3))
    )
    optimizer = Adam(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        optimizer.step()


class ImagePool:
    """Fakes of the past, as CycleGAN keeps them: half of the time an old one is given back."""

    def __init__(self, size: int = 12) -> None:
        self.size = size
        self.images: list[Tensor] = []

    def query(self, fakes: Tensor) -> Tensor:
        given = []
        for fake in fakes.detach():
            if len(self.images) < self.size:
                self.images.append(fake)
                given.append(fake)
            elif random.random() > 0.5:
                place = random.randrange(self.size)
                given.append(self.images[place])
                self.images[place] = fake
            else:
                given.append(fake)
        return torch.stack(given)


@pattern
def pool_of_past_fakes(run: unisono.Run) -> None:
    """Shows the discriminator fakes from a pool of the last ones, which the batch loop fills."""
    generator, critic, pool = nn.Linear(LATENT, 8), critic_net(), ImagePool()
    optimizer = Adam([*generator.parameters(), *critic.parameters()], lr=0.01)
    run.track(generator=generator, critic=critic, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, _ in step:
            fake = pool.query(generator(torch.randn(len(x), LATENT)))
            step.backward(F.softplus(-critic(x)).mean() + F.softplus(critic(fake)).mean(), weight=len(x))
            frozen = {name: parameter.detach() for name, parameter in critic.named_parameters()}
            fooled = F.softplus(-functional_call(critic, frozen, (generator(torch.randn(len(x), LATENT)),))).mean()
            step.backward(fooled, weight=len(x))
        optimizer.step()


class Vae(nn.Module):
    """Its KL term grows with the number of batches that it has seen."""

    def __init__(self, warmup: int = 30) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 2 * LATENT), perceptron(LATENT, 8)
        self.warmup, self.num_batches = warmup, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches += 1
        beta = min(1.0, self.num_batches / self.warmup)
        mean, log_variance = self.encode(x).chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return F.mse_loss(self.decode(drawn), x) + beta * divergence


@pattern
def annealing_by_a_counter_in_forward(run: unisono.Run) -> None:
    """Anneals the KL term of a VAE by a counter that forward increments."""
    model = Vae()
    optimizer = Adam(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, _ in step:
            step.backward(model(x), weight=len(x))
        optimizer.step()


class LossSecondMoments:
    """Samples timesteps in proportion to the root mean square of their last losses (improved diffusion)."""

    def __init__(self, num_timesteps: int = 10, kept: int = 3) -> None:
        self.losses = numpy.zeros((num_timesteps, kept))
        self.counts = numpy.zeros(num_timesteps, dtype=int)

    def sample(self, number: int) -> tuple[Tensor, Tensor]:
        weights = numpy.sqrt((self.losses**2).mean(1)) + 0.1
        chances = weights / weights.sum()
        chosen = numpy.random.choice(len(chances), number, p=chances)
        return torch.from_numpy(chosen), torch.from_numpy(1 / (len(chances) * chances[chosen])).float()

    def update(self, timesteps: Tensor, losses: Tensor) -> None:
        for timestep, loss in zip(timesteps.tolist(), losses.tolist(), strict=True):
            self.losses[timestep, self.counts[timestep] % self.losses.shape[1]] = loss
            self.counts[timestep] += 1


@pattern
def timesteps_sampled_by_their_losses(run: unisono.Run) -> None:
    """Trains a diffusion model; timesteps that had large losses are drawn more often."""
    model, sampler = perceptron(9, 8), LossSecondMoments()
    optimizer = Adam(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    kept = torch.linspace(0.99, 0.1, 10)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, _ in step:
            t, weights = sampler.sample(len(x))
            noise = torch.randn_like(x)
            noisy = kept[t].sqrt()[:, None] * x + (1 - kept[t]).sqrt()[:, None] * noise
            losses = (model(torch.cat([noisy, t[:, None] / 10], 1)) - noise).square().mean(1)
            sampler.update(t, losses.detach())
            step.backward((losses * weights).mean(), weight=len(x))
        optimizer.step()


class Augment(nn.Module):
    """Adds noise with probability p."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("p", torch.tensor(0.2))

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.rand(len(x), 1) < self.p
        return torch.where(chosen, x + torch.randn_like(x), x)


@pattern
def adaptive_discriminator_augmentation(run: unisono.Run) -> None:
    """Raises or lowers the probability of augmentation by the signs of the discriminator's outputs since the last."""
    critic, augment = critic_net(), Augment()
    optimizer = Adam(critic.parameters(), lr=0.02)
    run.track(critic=critic, augment=augment, optimizer=optimizer)
    sum_of_signs, num_signs, target = 0.0, 0, 0.3
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, _ in step:
            logits = critic(augment(x))
            sum_of_signs += logits.sign().sum().item()
            num_signs += len(logits)
            fakes = critic(augment(torch.randn_like(x)))
            step.backward(F.softplus(-logits).mean() + F.softplus(fakes).mean(), weight=len(x))
        optimizer.step()
        if step.is_last_of_epoch:
            augment.p.add_(0.2 * (sum_of_signs / num_signs - target)).clamp_(0, 0.8)
            sum_of_signs, num_signs = 0.0, 0


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.ModuleList(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = F.relu(block(x))
        return self.head(x.mean((2, 3)))


@pattern
def progressive_growing(run: unisono.Run) -> None:
    """Adds a block to the model, and its parameters to the optimizer, at the beginning of the second epoch."""
    model = Growing()
    optimizer = Adam(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(images(), batch_size=24, microbatches=6, epochs=2):
        if step.epoch == 1 and not model.blocks:
            block = nn.Conv2d(4, 4, 3, padding=1)
            model.blocks.append(block)
            optimizer.add_param_group({"params": list(block.parameters()), "lr": 0.005})
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        optimizer.step()


@pattern
def latents_from_a_shared_bank(run: unisono.Run) -> None:
    """Takes its noise from a bank of latents drawn once, one piece after the other, for runs that can be compared."""
    generator = nn.Sequential(nn.Linear(LATENT, 16), nn.Tanh(), nn.Linear(16, 8))
    optimizer = Adam(generator.parameters(), lr=0.01)
    run.track(generator=generator, optimizer=optimizer)
    bank, state = torch.randn(512, LATENT), {"next": 0}

    def next_latents(number: int) -> Tensor:
        start = state["next"]
        state["next"] = (start + number) % (len(bank) - 24)
        return bank[start : start + number]

    def moments(x: Tensor) -> Any:
        return torch.stack([x.mean(0), x.square().mean(0)])

    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, _ in step:
            step.backward(F.mse_loss(moments(generator(next_latents(len(x)))), moments(x)), weight=len(x))
        optimizer.step()
