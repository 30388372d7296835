"""Recurrent DQN on CartPole-v1 without velocities: the network must remember where the cart and the pole were.

What it shows:

- steps of several environments are stored as they come; ``SliceSampler`` draws pieces of episodes, ``[slices, steps]``,
  never across an episode's end;
- ``burn_in``: the first steps of a slice only warm the recurrent network up (Kapturowski et al., 2019), but where the
  slice begins with its episode, they count, too;
- short episodes come padded, with a mask (``strict_length=False``);
- ``NStep`` joins three-step returns to every step of a slice.

Run it (less than two minutes on two CPU cores)::

    pip install asyncbuf gymnasium
    python examples/recurrent_dqn.py --seed 0
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

from asyncbuf import JoinedSampler, NStep, ReplayBuffer, SliceSampler, TensorStorage

if TYPE_CHECKING:
    from asyncbuf import Batch

ENV_ID = "CartPole-v1"
SEEN = [0, 2]  # the positions of cart and pole; 1 and 3 are their velocities
GAMMA = 0.99
BURN_IN, LENGTH, SLICES = 8, 24, 16
STEPS_PER_UPDATE = 4
WARMUP = 1_000


class Network(nn.Module):
    """Observations `[batch, time, 2]` to action values `[batch, time, 2]`, where 1 is the most that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 64)
        self.memory = nn.GRU(2, 64, batch_first=True)
        self.hidden = nn.Linear(128, 64)
        self.last = nn.Linear(64, 2)
        nn.init.ones_(self.last.bias)  # "never falls": so only falling has to be learned

    def forward(self, obs: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Values, and the state after the last step, `[1, batch, 64]`."""
        obs = obs / torch.tensor([2.4, 0.21])  # the reach of each number
        remembered, after = self.memory(obs, state)
        found = torch.cat([torch.relu(self.first(obs)), remembered], -1)
        return self.last(torch.relu(self.hidden(found))), after


class Learner:
    """Double DQN over slices, with a Polyak-averaged target network."""

    def __init__(self) -> None:
        self.online = Network()
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=1e-3, fused=True)

    def update(self, batch: Batch[Any], share: float) -> None:
        """One step on slices `[slices, steps]`, at some share of the run: steps become shorter with it."""
        info, steps = batch.info, torch.arange(BURN_IN + LENGTH)
        values = self.online(batch["obs"])[0]
        with torch.no_grad():
            best = values.argmax(2, keepdim=True)
            following = self.target(batch["obs"])[0].gather(2, best).squeeze(2)
            # The step from which the value comes must be in the slice, unless the pole has fallen before.
            ahead = steps + info["steps"]
            inside = ahead.clamp(max=len(steps) - 1)
            is_known = (ahead < len(steps)) & info["mask"].gather(1, inside) | (info["discount"] == 0)
            wanted = (1 - GAMMA) * batch["reward"] + info["discount"] * following.gather(1, inside)
            counts = info["mask"] & is_known & (~info["burn_in"] | info["is_start"][:, None])
        found = values.gather(2, batch["action"][..., None]).squeeze(2)
        losses = nn.functional.smooth_l1_loss(found, wanted, reduction="none")
        self.optimizer.param_groups[0]["lr"] = 1e-3 * (1 - 0.9 * share)
        self.optimizer.zero_grad()
        ((losses * counts).sum() / counts.sum().clamp(min=1)).backward()
        nn.utils.clip_grad_norm_(self.online.parameters(), 10.0)
        self.optimizer.step()
        with torch.no_grad():
            for average, parameter in zip(self.target.parameters(), self.online.parameters(), strict=True):
                average.lerp_(parameter, 0.01)


def make_buffer(seed: int) -> ReplayBuffer:
    """Slices of episodes, with three-step returns."""
    keys: dict[str, Any] = {"end_key": ("terminated", "truncated"), "trajectory_key": "env"}
    slices = SliceSampler(slice_len=LENGTH, burn_in=BURN_IN, strict_length=False, **keys)
    return ReplayBuffer(
        TensorStorage(50_000),
        sampler=JoinedSampler(slices, NStep(3, GAMMA, next_keys=()), **keys),
        batch_size=SLICES * (BURN_IN + LENGTH),
        prefetch=2,
        min_size=WARMUP,
        generator=torch.Generator().manual_seed(seed),
    )


async def collect(buffer: ReplayBuffer, learner: Learner, steps: int, seed: int, paces: asyncio.Semaphore) -> None:
    """Eight environments that step together, each with a state of the network of its own."""
    rng, count = np.random.default_rng(seed), 8
    envs = [gym.make(ENV_ID) for _ in range(count)]
    observations = np.stack([env.reset(seed=seed * 1000 + index)[0][SEEN] for index, env in enumerate(envs)])
    state = torch.zeros(1, count, 64)
    for step in range(0, steps, count):
        if step >= WARMUP:
            for _ in range(count):
                await paces.acquire()  # so many steps for each update
        epsilon = max(0.05, 1 - 0.95 * step / (0.2 * steps))
        with torch.inference_mode():
            values, state = learner.online(torch.from_numpy(observations)[:, None], state)
        is_random = rng.random(count) < epsilon
        actions = np.where(is_random, rng.integers(2, size=count), values[:, 0].argmax(1).numpy())
        played = [env.step(int(action)) for env, action in zip(envs, actions, strict=True)]
        await buffer.extend(
            {
                "obs": observations,
                "action": actions,
                "reward": np.array([float(each[1]) for each in played], np.float32),
                "terminated": np.array([each[2] for each in played]),
                "truncated": np.array([each[3] for each in played]),
                "env": np.arange(count),
            }
        )
        observations = np.stack([each[0][SEEN] for each in played])
        state = state.clone()
        for index, each in enumerate(played):
            if each[2] or each[3]:
                observations[index] = envs[index].reset()[0][SEEN]
                state[:, index] = 0
    await buffer.finish()


def evaluate(network: Network, episodes: int, seed: int) -> float:
    """The mean return of greedy episodes, which are played side by side."""
    envs = gym.make_vec(ENV_ID, num_envs=episodes)
    observations, _ = envs.reset(seed=seed)
    returns, playing = np.zeros(episodes), np.ones(episodes, dtype=np.bool_)
    state: torch.Tensor | None = None
    while playing.any():
        with torch.inference_mode():
            values, state = network(torch.from_numpy(observations[:, SEEN])[:, None], state)
        observations, rewards, terminated, truncated, _ = envs.step(values[:, 0].argmax(1).numpy())
        returns += rewards * playing
        playing &= ~(terminated | truncated)
    envs.close()
    return float(returns.mean())


async def train(seed: int, steps: int, episodes: int) -> tuple[Network, int]:
    """The best of the averaged networks, and how many updates were made."""
    torch.manual_seed(seed)
    learner, updates = Learner(), max(1, (steps - WARMUP) // STEPS_PER_UPDATE)
    best, best_return, good = copy.deepcopy(learner.target), 0.0, 0
    update = 0
    paces = asyncio.Semaphore(STEPS_PER_UPDATE)
    buffer = make_buffer(seed)
    async with buffer, asyncio.TaskGroup() as tasks:
        collector = tasks.create_task(collect(buffer, learner, steps, seed, paces))
        for update in range(1, updates + 1):
            learner.update(await buffer.sample(), update / updates)
            for _ in range(STEPS_PER_UPDATE):
                paces.release()
            if update % 200 == 0 or update == updates:
                mean = await asyncio.to_thread(evaluate, learner.target, episodes, seed)
                print(f"update {update}: mean return {mean:.1f}")
                good = good + 1 if mean >= 490 else 0
                if mean >= best_return:
                    best, best_return = copy.deepcopy(learner.target), mean
                if good == 2:
                    break
        collector.cancel()
    return best, update


def main() -> None:
    """Trains, and plays the final episodes."""
    parser = argparse.ArgumentParser(description="recurrent DQN on CartPole-v1 without velocities")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40_000, help="environment steps in all")
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
