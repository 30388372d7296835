"""Double DQN on CartPole-v1: several collectors and one learner around a single `ReplayBuffer`, on one event loop.

What it shows:

- each environment is a coroutine that awaits `buffer.extend(...)`;
- the learner is a coroutine that takes `async for batch in buffer`, from batches made ready ahead of time;
- a condition variable keeps one update to a fixed number of environment steps, so that neither side starves the other;
- a truncated step is stored as not terminated, with its true next observation, so that it still bootstraps;
- the whole run can be saved while it goes on (`--checkpoint DIR --every N`) and taken up again (`--resume`).

Run it (about a minute on two CPU cores)::

    pip install asyncbuf gymnasium matplotlib rich uvloop
    python examples/cartpole_dqn.py --seed 0

The learning curve is saved as ``cartpole_dqn.png``. uvloop is optional.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch
from matplotlib.figure import Figure
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from asyncbuf import Checkpointer, RandomSampler, ReplayBuffer, TensorStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from asyncbuf import Batch

ENV_ID = "CartPole-v1"


@dataclass(frozen=True, kw_only=True)
class Config:
    """The command line options, then the hyperparameters that are not on the command line."""

    seed: int
    steps: int
    envs: int
    batch_size: int
    prefetch: int
    workers: int
    eval_episodes: int
    output: Path
    progress: bool
    checkpoint: Path | None
    every: int
    resume: bool

    capacity: int = 100_000
    steps_per_update: int = 1
    hidden: int = 128
    learning_rate: float = 1e-3
    gamma: float = 0.99
    polyak: float = 0.005
    max_grad_norm: float = 10.0
    final_epsilon: float = 0.05
    solved_return: float = 490.0

    @property
    def warmup(self) -> int:
        """Environment steps before the first update."""
        return max(1, min(1_000, self.steps // 4))

    @property
    def updates(self) -> int:
        """Updates in the whole run."""
        return max(1, (self.steps - self.warmup) // self.steps_per_update)

    def epsilon(self, step: int) -> float:
        """The share of random actions: linear from 1 to `final_epsilon` over the first fifth of the run."""
        return max(self.final_epsilon, 1.0 - (1.0 - self.final_epsilon) * step / (0.2 * self.steps))

    def seed_for(self, *purpose: int) -> int:
        """An independent seed for each purpose, so that no two environments ever play the same episodes."""
        return int(np.random.SeedSequence((self.seed, *purpose)).generate_state(1)[0])


class Agent:
    """Double DQN (van Hasselt et al., 2016) with a Polyak-averaged target network."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.online = nn.Sequential(
            nn.Linear(4, config.hidden), nn.ReLU(),
            nn.Linear(config.hidden, config.hidden), nn.ReLU(),
            nn.Linear(config.hidden, 2),
        )  # fmt: skip
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=config.learning_rate, fused=True)
        self.rng = np.random.default_rng(config.seed_for(0))

    def act(self, observation: NDArray[np.float32], epsilon: float) -> int:
        """The epsilon-greedy action for one observation `[4]`."""
        if self.rng.random() < epsilon:
            return int(self.rng.integers(2))
        with torch.inference_mode():
            return int(self.online(torch.from_numpy(observation)).argmax())

    def update(self, batch: Batch) -> None:
        """One gradient step on one batch, then one step of the target network towards the online one."""
        with torch.no_grad():
            next_action = self.online(batch["next_obs"]).argmax(1, keepdim=True)
            next_value = self.target(batch["next_obs"]).gather(1, next_action).squeeze(1)
            # Only a terminal state is worth nothing: an episode cut off by the time limit would have gone on.
            wanted = batch["reward"] + self.config.gamma * next_value * ~batch["terminated"]
        value = self.online(batch["obs"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
        loss = nn.functional.smooth_l1_loss(value, wanted)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.online.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        with torch.no_grad():
            for average, parameter in zip(self.target.parameters(), self.online.parameters(), strict=True):
                average.lerp_(parameter, self.config.polyak)


class Pace:
    """Keeps the collectors and the learner at one update to `steps_per_update` environment steps."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.steps = 0
        self.updates = 0
        self.changed = asyncio.Condition()

    async def claim_step(self) -> bool:
        """Waits until one more environment step is due; False once all steps are taken."""
        config = self.config
        # Each environment may be one step ahead, otherwise they would take turns with the learner one by one.
        lead = config.warmup + max(config.envs, config.steps_per_update)
        async with self.changed:
            await self.changed.wait_for(
                lambda: self.steps >= config.steps or self.steps < lead + self.updates * config.steps_per_update
            )
            if self.steps >= config.steps:
                return False
            self.steps += 1
            self.changed.notify_all()
            return True

    async def claim_update(self) -> None:
        """Waits until one more update is due."""
        config = self.config
        async with self.changed:
            await self.changed.wait_for(
                lambda: self.steps >= min(config.steps, config.warmup + self.updates * config.steps_per_update)
            )
            self.updates += 1
            self.changed.notify_all()


@dataclass
class Run:
    """Everything that changes during training, apart from the buffer."""

    config: Config
    agent: Agent
    pace: Pace
    episodes: list[tuple[int, float]] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    best_return: float = float("-inf")
    best: nn.Module = field(default_factory=nn.Identity)

    def __post_init__(self) -> None:
        self.best = copy.deepcopy(self.agent.target)

    @property
    def solved(self) -> bool:
        """Whether the last three evaluations were all good."""
        recent = [mean for _, mean in self.evaluations[-3:]]
        return len(recent) == 3 and min(recent) >= self.config.solved_return

    def parts(self, buffer: ReplayBuffer) -> dict[str, Any]:
        """What a checkpoint is made of, beside the plain values."""
        agent = self.agent
        modules = {"online": agent.online, "target": agent.target, "best": self.best}
        return {"buffer": buffer, "optimizer": agent.optimizer, **modules}

    def values(self) -> dict[str, Any]:
        """The plain values of a checkpoint."""
        return {
            "steps": self.pace.steps,
            "updates": self.pace.updates,
            "episodes": self.episodes,
            "evaluations": self.evaluations,
            "best_return": self.best_return,
            "exploration": self.agent.rng.bit_generator.state,
        }

    async def resume(self, checkpointer: Checkpointer, buffer: ReplayBuffer) -> None:
        """Goes on from the newest checkpoint. Only the environments start new episodes."""
        values = (await checkpointer.restore(**self.parts(buffer))).values["values"]
        self.pace.steps, self.pace.updates = values["steps"], values["updates"]
        self.episodes, self.evaluations = values["episodes"], values["evaluations"]
        self.best_return = values["best_return"]
        self.agent.rng.bit_generator.state = values["exploration"]


def evaluate(network: nn.Module, episodes: int, seed: int) -> NDArray[np.float64]:
    """Plays greedy episodes side by side, one per environment; their returns `[episodes]`."""
    envs = gym.make_vec(ENV_ID, num_envs=episodes)
    observations, _ = envs.reset(seed=seed)
    returns = np.zeros(episodes)
    playing = np.ones(episodes, dtype=np.bool_)
    while playing.any():
        with torch.inference_mode():
            actions = network(torch.from_numpy(observations)).argmax(1).numpy()
        observations, rewards, terminated, truncated, _ = envs.step(actions)
        returns += rewards * playing
        # A finished environment starts a new episode by itself; only the first one counts.
        playing &= ~(terminated | truncated)
    envs.close()
    return returns


async def collect(run: Run, buffer: ReplayBuffer, index: int) -> None:
    """One environment: acts, stores what happened, starts again when an episode ends."""
    env = gym.make(ENV_ID)
    observation, _ = env.reset(seed=run.config.seed_for(1, index))
    episode_return = 0.0
    while await run.pace.claim_step():
        action = run.agent.act(observation, run.config.epsilon(run.pace.steps))
        next_observation, reward, terminated, truncated, _ = env.step(action)
        await buffer.extend(
            {
                "obs": observation[None],
                "action": np.array([action]),
                "reward": np.array([reward], dtype=np.float32),
                "next_obs": next_observation[None],
                "terminated": np.array([terminated]),
            }
        )
        observation = next_observation
        episode_return += float(reward)
        if terminated or truncated:
            run.episodes.append((run.pace.steps, episode_return))
            observation, _ = env.reset()
            episode_return = 0.0
    env.close()


async def learn(run: Run, buffer: ReplayBuffer, checkpointer: Checkpointer | None, report: Callable[[], None]) -> None:
    """Updates the agent batch by batch, and now and then plays greedy episodes to keep the best network."""
    config, pace = run.config, run.pace
    async for batch in buffer:
        await pace.claim_update()
        run.agent.update(batch)
        if pace.updates % 100 == 0 or pace.updates == config.updates:
            report()
        if pace.updates % max(1, config.updates // 40) == 0 or pace.updates == config.updates:
            # In a thread, because it is long. The network stands still meanwhile: only this coroutine changes it.
            returns = await asyncio.to_thread(evaluate, run.agent.target, config.eval_episodes, config.seed_for(2))
            run.evaluations.append((pace.steps, float(returns.mean())))
            if returns.mean() >= run.best_return:
                run.best_return = float(returns.mean())
                run.best.load_state_dict(run.agent.target.state_dict())
        if checkpointer is not None and pace.updates % config.every == 0:
            # Between two updates, so that weights, optimizer and buffer belong together. Collectors go on meanwhile.
            await checkpointer.save(pace.updates, values=run.values(), **run.parts(buffer))
        if pace.updates == config.updates or run.solved:
            return


async def train(config: Config, progress: Progress) -> Run:
    """Runs the collectors and the learner until all steps are taken and learned from."""
    torch.manual_seed(config.seed_for(3))  # the initial weights
    run = Run(config, Agent(config), Pace(config))
    buffer = ReplayBuffer(
        TensorStorage(config.capacity),
        sampler=RandomSampler(),
        batch_size=config.batch_size,
        prefetch=config.prefetch,
        workers=config.workers,
        min_size=config.warmup,
        generator=torch.Generator().manual_seed(config.seed),
    )
    started = time.perf_counter()
    bar = progress.add_task("train", total=config.steps, rate=0.0, episode=float("nan"), queued=0)

    def report() -> None:
        recent = [episode for _, episode in run.episodes[-20:]]
        progress.update(
            bar,
            completed=run.pace.steps,
            rate=run.pace.steps / (time.perf_counter() - started),
            episode=sum(recent) / max(1, len(recent)),
            queued=buffer.stats().queued,
        )

    checkpointer = None if config.checkpoint is None else Checkpointer(config.checkpoint)
    if checkpointer is not None and config.resume and checkpointer.latest() is not None:
        await run.resume(checkpointer, buffer)
    async with buffer, asyncio.TaskGroup() as tasks:
        collectors = [tasks.create_task(collect(run, buffer, index)) for index in range(config.envs)]
        await learn(run, buffer, checkpointer, report)
        for collector in collectors:
            collector.cancel()
    report()
    return run


def plot(run: Run, path: Path) -> None:
    """Saves the learning curve: training episodes, and greedy evaluations."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="environment steps", ylabel="episode return", title=ENV_ID)
    axes.plot(*np.array(run.episodes).T, ".", markersize=3, alpha=0.4, label="training episodes")
    axes.plot(*np.array(run.evaluations).T, "o-", markersize=4, label="greedy evaluation (mean)")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed, else asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def parse_arguments() -> Config:
    """Reads the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--prefetch", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--eval-episodes", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path())
    parser.add_argument("--checkpoint", type=Path, help="directory for checkpoints of the whole run")
    parser.add_argument("--every", type=int, default=5_000, help="updates between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    parser.add_argument("--no-progress", dest="progress", action="store_false")
    return Config(**vars(parser.parse_args()))


def main() -> None:
    config = parse_arguments()
    torch.set_num_threads(1)
    started = time.perf_counter()
    numbers = "{task.fields[rate]:.0f} steps/s, return {task.fields[episode]:.0f}, {task.fields[queued]} batches queued"
    columns = [BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn(numbers)]
    with (
        Progress(*columns, disable=not config.progress) as progress,
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        run = runner.run(train(config, progress))
    returns = evaluate(run.best, config.eval_episodes, config.seed_for(4))
    seconds = time.perf_counter() - started
    path = config.output / "cartpole_dqn.png"
    plot(run, path)
    print(
        f"seed {config.seed}: mean return {returns.mean():.1f} over {config.eval_episodes} episodes, "
        f"{run.pace.steps} steps in {seconds:.1f} s ({run.pace.steps / seconds:.0f} steps/s), curve: {path}"
    )


if __name__ == "__main__":
    main()
