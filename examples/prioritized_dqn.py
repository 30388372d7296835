"""Prioritized three-step double DQN on CartPole-v1, in one file.

What it shows:

- steps are stored as they come, one item each; the sampler makes three-step returns when it draws
  (``JoinedSampler`` and ``NStep``), so an episode that ends, or is cut off, needs no care;
- rows are drawn in proportion to their errors (``PrioritizedSampler``), weights correct for that, and
  ``await buffer.update_priority(...)`` tells the new errors;
- ``beta`` grows with the draws, by a function.

Run it (about a minute on two CPU cores)::

    pip install asyncbuf gymnasium
    python examples/prioritized_dqn.py --seed 0
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import time
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from asyncbuf import JoinedSampler, NStep, PrioritizedSampler, ReplayBuffer, TensorStorage

if TYPE_CHECKING:
    from asyncbuf import Batch

ENV_ID = "CartPole-v1"
GAMMA = 0.99
STEPS_PER_UPDATE = 2
WARMUP = 1_000


def q_network() -> nn.Sequential:
    """Observations `[..., 4]` to action values `[..., 2]`, where 1 is the most that any policy could get."""
    first, last = nn.Linear(4, 128), nn.Linear(128, 2)
    with torch.no_grad():
        first.weight.div_(torch.tensor([2.4, 2.0, 0.21, 2.0]))  # the reach of each number
    nn.init.ones_(last.bias)  # "never falls": so only falling has to be learned
    return nn.Sequential(first, nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), last)


class Learner:
    """Double DQN (van Hasselt et al., 2016) with a Polyak-averaged target network."""

    def __init__(self) -> None:
        self.online = q_network()
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=5e-4, fused=True)

    def update(self, batch: Batch[Any]) -> torch.Tensor:
        """One step on a batch; its absolute errors, `[batch]`."""
        with torch.no_grad():
            best = self.online(batch["next_obs"]).argmax(1, keepdim=True)
            value = self.target(batch["next_obs"]).gather(1, best).squeeze(1)
            # In units of 1 / (1 - gamma), the return of an episode without end. The discount is 0 after a fall,
            # and not after the time limit.
            wanted = (1 - GAMMA) * batch["reward"] + batch.info["discount"] * value
        found = self.online(batch["obs"]).gather(1, batch["action"][:, None]).squeeze(1)
        losses = nn.functional.smooth_l1_loss(found, wanted, reduction="none")
        self.optimizer.zero_grad()
        (losses * batch.info["weights"]).mean().backward()
        nn.utils.clip_grad_norm_(self.online.parameters(), 10.0)
        self.optimizer.step()
        with torch.no_grad():
            for average, parameter in zip(self.target.parameters(), self.online.parameters(), strict=True):
                average.lerp_(parameter, 0.01)
        errors: torch.Tensor = (found - wanted).detach().abs()
        return errors


def make_buffer(seed: int, updates: int) -> ReplayBuffer:
    """Three-step batches, drawn by priority."""
    prioritized = PrioritizedSampler(alpha=0.6, beta=lambda draws: min(1.0, 0.4 + 0.6 * draws / updates))
    ends = ("terminated", "truncated")
    return ReplayBuffer(
        TensorStorage(100_000),
        sampler=JoinedSampler(prioritized, NStep(3, GAMMA), end_key=ends, trajectory_key="env"),
        batch_size=128,
        prefetch=1,
        min_size=WARMUP,
        generator=torch.Generator().manual_seed(seed),
    )


async def collect(buffer: ReplayBuffer, learner: Learner, steps: int, seed: int, paces: asyncio.Semaphore) -> None:
    """Four environments that take turns. Each step is stored as it is."""
    rng = np.random.default_rng(seed)
    envs = [gym.make(ENV_ID) for _ in range(4)]
    observations = [env.reset(seed=seed * 1000 + index)[0] for index, env in enumerate(envs)]
    for step in range(steps):
        if step >= WARMUP:
            await paces.acquire()  # so many steps for each update
        index, epsilon = step % len(envs), max(0.05, 1 - 0.95 * step / (0.2 * steps))
        observation = observations[index]
        with torch.inference_mode():
            action = int(learner.online(torch.from_numpy(observation)).argmax())
        if rng.random() < epsilon:
            action = int(rng.integers(2))
        following, reward, terminated, truncated, _ = envs[index].step(action)
        await buffer.add(
            {
                "obs": observation,
                "action": action,
                "reward": float(reward),
                "next_obs": following,
                "terminated": terminated,
                "truncated": truncated,
                "env": index,
            }
        )
        observations[index] = envs[index].reset()[0] if terminated or truncated else following
    await buffer.finish()


def evaluate(network: nn.Module, episodes: int, seed: int) -> float:
    """The mean return of greedy episodes, which are played side by side."""
    envs = gym.make_vec(ENV_ID, num_envs=episodes)
    observations, _ = envs.reset(seed=seed)
    returns, playing = np.zeros(episodes), np.ones(episodes, dtype=np.bool_)
    while playing.any():
        with torch.inference_mode():
            actions = network(torch.from_numpy(observations)).argmax(1).numpy()
        observations, rewards, terminated, truncated, _ = envs.step(actions)
        returns += rewards * playing
        playing &= ~(terminated | truncated)
    envs.close()
    return float(returns.mean())


async def train(seed: int, steps: int, episodes: int) -> tuple[nn.Module, int]:
    """The best of the averaged networks, and how many updates were made."""
    torch.manual_seed(seed)
    learner, updates = Learner(), max(1, (steps - WARMUP) // STEPS_PER_UPDATE)
    best, best_return, good = copy.deepcopy(learner.target), 0.0, 0
    update = 0
    paces = asyncio.Semaphore(STEPS_PER_UPDATE)
    buffer = make_buffer(seed, updates)
    async with buffer, asyncio.TaskGroup() as tasks:
        collector = tasks.create_task(collect(buffer, learner, steps, seed, paces))
        for update in range(1, updates + 1):
            batch = await buffer.sample()
            await buffer.update_priority(batch, learner.update(batch))
            for _ in range(STEPS_PER_UPDATE):
                paces.release()
            if update % 400 == 0 or update == updates:
                mean = await asyncio.to_thread(evaluate, learner.target, episodes, seed)
                print(f"update {update}: mean return {mean:.1f}")
                good = good + 1 if mean >= 490 else 0
                if mean >= best_return:
                    best, best_return = copy.deepcopy(learner.target), mean
                if good == 3:
                    break
        collector.cancel()
    return best, update


def main() -> None:
    """Trains, and plays the final episodes."""
    parser = argparse.ArgumentParser(description="prioritized three-step double DQN on CartPole-v1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30_000, help="environment steps in all")
    parser.add_argument("--eval-episodes", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    best, updates = asyncio.run(train(arguments.seed, arguments.steps, arguments.eval_episodes))
    mean = evaluate(best, arguments.eval_episodes, arguments.seed + 10_000)
    seconds = time.perf_counter() - started
    print(f"seed {arguments.seed}: mean return {mean:.1f} after {updates} updates, {seconds:.1f} s")


if __name__ == "__main__":
    main()
