"""Double DQN on CartPole-v1: several collectors and one learner around one `ReplayBuffer`, on one event loop.

What it shows:

- each environment is a coroutine that awaits `buffer.extend(...)`;
- the learner is a coroutine that takes `async for batch in buffer`, from batches made ready ahead of time;
- a limiter, `SampleToInsertRatio`, keeps one update to a fixed number of environment steps: neither side starves;
- a truncated step is stored as not terminated, with its true next observation, so that it still bootstraps;
- the whole run is saved in the background while it goes on (`--checkpoint DIR --every N`), once more on Ctrl-C, and
  taken up again (`--resume`).

Run it (less than a minute on two CPU cores)::

    pip install asyncbuf gymnasium matplotlib rich uvloop
    python examples/cartpole_dqn.py --seed 0

It ends early once the greedy policy is good, and saves the learning curve as ``cartpole_dqn.png``. uvloop is
optional.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import sys
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

from asyncbuf import Checkpointer, RandomSampler, ReplayBuffer, SampleToInsertRatio, StopSignal, TensorStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from asyncbuf import Batch

ENV_ID = "CartPole-v1"
COLUMNS = (
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TextColumn("{task.fields[rate]:.0f} steps/s, episode return {task.fields[episode]:.0f}"),
    TextColumn("{task.fields[queued]} batches queued"),
)


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
    steps_per_update: int = 2
    hidden: int = 128
    learning_rate: float = 5e-4
    gamma: float = 0.99
    n_step: int = 3
    polyak: float = 0.01
    max_grad_norm: float = 10.0
    final_epsilon: float = 0.05
    solved_return: float = 490.0

    @property
    def warmup(self) -> int:
        """Environment steps before the first update."""
        return max(1, min(1_000, self.steps // 4))

    @property
    def updates(self) -> int:
        """Updates in the whole run, if it does not end early."""
        return max(1, (self.steps - self.warmup) // self.steps_per_update)

    def epsilon(self, step: int) -> float:
        """The share of random actions: linear from 1 to `final_epsilon` over the first fifth of the run."""
        return max(self.final_epsilon, 1.0 - (1.0 - self.final_epsilon) * step / (0.2 * self.steps))

    def seed_for(self, *purpose: int) -> int:
        """An independent seed for each purpose, so that no two environments ever play the same episodes."""
        return int(np.random.SeedSequence((self.seed, *purpose)).generate_state(1)[0])


def q_network(hidden: int) -> nn.Sequential:
    """Observations `[..., 4]` to action values `[..., 2]`, where 1 is the most that any policy could get."""
    first, last = nn.Linear(4, hidden), nn.Linear(hidden, 2)
    with torch.no_grad():
        # The reach of position, velocity, angle and angular velocity: else the angle hardly counts at first.
        first.weight.div_(torch.tensor([2.4, 2.0, 0.21, 2.0]))
    # Start from "never falls", so that only falling has to be learned: that takes far fewer updates.
    nn.init.ones_(last.bias)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), last)


class Agent:
    """Double DQN (van Hasselt et al., 2016) with multi-step returns and a Polyak-averaged target network."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.online = q_network(config.hidden)
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
            future = batch["discount"] * next_value * ~batch["terminated"]
            # In units of 1 / (1 - gamma), the return of an episode without end: values lie between 0 and 1.
            wanted = (1 - self.config.gamma) * batch["reward"] + future
        value = self.online(batch["obs"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
        loss = nn.functional.smooth_l1_loss(value, wanted)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.online.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        with torch.no_grad():
            for average, parameter in zip(self.target.parameters(), self.online.parameters(), strict=True):
                average.lerp_(parameter, self.config.polyak)


@dataclass
class Run:
    """Everything that changes during training, apart from the buffer."""

    config: Config
    agent: Agent
    best: nn.Sequential
    resumed_at: int = 0
    exit_code: int = 0
    updates: int = 0
    taken: list[int] = field(default_factory=list)
    best_return: float = float("-inf")
    episodes: list[tuple[int, float]] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """No environment has taken a step."""
        self.share_steps(0)

    def share_steps(self, steps: int) -> None:
        """Counts steps in equal shares, so that it does not matter how many environments there were."""
        self.taken = [self.share_of(index, steps) for index in range(self.config.envs)]

    def share_of(self, index: int, steps: int) -> int:
        """How many of so many steps are those of one environment."""
        return len(range(index, steps, self.config.envs))

    @property
    def steps(self) -> int:
        """Environment steps taken and stored, of all environments together."""
        return sum(self.taken)

    @property
    def finished(self) -> bool:
        """Whether all updates are made, or the last three evaluations were all good."""
        recent = [mean for _, mean in self.evaluations[-3:]]
        solved = len(recent) == 3 and min(recent) >= self.config.solved_return
        return solved or self.updates >= self.config.updates

    def parts(self) -> tuple[nn.Module | torch.optim.Optimizer, ...]:
        """What has a state of its own."""
        return self.agent.online, self.agent.target, self.best, self.agent.optimizer

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds beside the buffer, but for the environments: those start new episodes."""
        return {
            "parts": [part.state_dict() for part in self.parts()],
            "exploration": self.agent.rng.bit_generator.state,
            "counts": (self.steps, self.updates),
            "curves": (self.best_return, self.episodes, self.evaluations),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        for part, part_state in zip(self.parts(), state["parts"], strict=True):
            part.load_state_dict(part_state)
        self.agent.rng.bit_generator.state = state["exploration"]
        self.resumed_at, self.updates = state["counts"]
        self.share_steps(self.resumed_at)
        self.best_return, episodes, evaluations = state["curves"]
        self.episodes, self.evaluations = list(episodes), list(evaluations)


def evaluate(network: nn.Module, episodes: int, seed: int) -> NDArray[np.float64]:
    """Plays greedy episodes side by side, one per environment; their returns `[episodes]`."""
    # A setting of the thread for matrix products, so the one of the main thread is not enough.
    torch.set_num_threads(1)
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


Step = tuple["NDArray[np.float32]", int, float]


def multi_step(
    steps: list[Step], starts: int, next_obs: NDArray[np.float32], terminated: bool, gamma: float
) -> dict[str, NDArray[Any]]:
    """Items `[starts]`: one from each of the first steps to `next_obs`, which is where all of `steps` led.

    `reward` sums the discounted rewards on the way; `discount` is what the value of `next_obs` counts for.
    """
    observations, actions, rewards = zip(*steps, strict=True)
    weights = gamma ** np.arange(len(steps) + 1, dtype=np.float32)
    returns = [weights[: len(steps) - start] @ np.array(rewards[start:]) for start in range(starts)]
    return {
        "obs": np.stack(observations[:starts]),
        "action": np.array(actions[:starts], dtype=np.int64),
        "reward": np.array(returns, dtype=np.float32),
        "discount": weights[::-1][:starts].copy(),
        "next_obs": np.repeat(next_obs[None], starts, axis=0),
        "terminated": np.full(starts, terminated),
    }


async def collect(run: Run, buffer: ReplayBuffer, index: int) -> None:
    """One environment: acts, stores what happened, starts again when an episode ends."""
    config = run.config
    share = run.share_of(index, config.steps)
    pending: list[Step] = []
    episode_return = 0.0
    with gym.make(ENV_ID) as env:
        observation, _ = env.reset(seed=config.seed_for(1, index))
        while run.taken[index] + len(pending) < share:
            action = run.agent.act(observation, config.epsilon(run.steps))
            next_observation, reward, terminated, truncated, _ = env.step(action)
            pending.append((observation, action, float(reward)))
            observation = next_observation
            episode_return += float(reward)
            ended = terminated or truncated
            if ended or len(pending) == config.n_step:
                # The last steps of an episode have no n_step steps after them: they are stored all at once.
                starts = len(pending) if ended else 1
                # Waits here while the environments are ahead of the learner.
                await buffer.extend(multi_step(pending, starts, observation, terminated, config.gamma))
                run.taken[index] += starts
                del pending[:starts]
            if ended:
                run.episodes.append((run.steps, episode_return))
                observation, _ = env.reset()
                episode_return = 0.0
        if pending:  # The run ends amid an episode, as if it were truncated.
            await buffer.extend(multi_step(pending, len(pending), observation, False, config.gamma))
            run.taken[index] += len(pending)


async def assess(run: Run) -> None:
    """Plays greedy episodes with the averaged network, and keeps a copy of it if it is the best so far."""
    config, network = run.config, run.agent.target
    # In a thread, because it is long. The learner, which alone changes the network, waits meanwhile.
    returns = await asyncio.to_thread(evaluate, network, config.eval_episodes, config.seed_for(2))
    mean = float(returns.mean())
    run.evaluations.append((run.steps, mean))
    if mean >= run.best_return:
        run.best_return = mean
        run.best.load_state_dict(network.state_dict())


async def learn(
    run: Run,
    buffer: ReplayBuffer,
    saver: Checkpointer | None,
    stop: StopSignal | None,
    show: Callable[[], None],
) -> None:
    """Updates the agent batch by batch, and now and then plays greedy episodes to keep the best network."""
    config = run.config
    async for batch in buffer if stop is None else stop.iterate(buffer):
        # Before the update, because a run that is resumed may have been finished already.
        if run.finished:
            return
        run.agent.update(batch)
        run.updates += 1
        if run.updates % max(1, config.updates // 40) == 0 or run.finished:
            await assess(run)
        if run.updates % 100 == 0 or run.finished:
            show()
        if saver is not None and (run.updates % config.every == 0 or run.finished):
            # Between two updates, so that weights, optimizer and buffer belong together. Written in the background.
            await saver.save_soon(run.updates, buffer=buffer, run=run)
    if saver is not None:  # a signal came
        await saver.save(run.updates, buffer=buffer, run=run)


def make_buffer(config: Config) -> ReplayBuffer:
    """The buffer that collectors and learner share. Its limiter keeps both at the same pace."""
    # One update to so many steps. The environments may be ahead by some steps each, and the batches that are made ready
    # by as many as there are.
    ratio = config.batch_size / config.steps_per_update
    middle = ratio * config.warmup
    error_buffer = middle - config.batch_size * (config.prefetch + 1), middle + ratio * config.envs * config.n_step
    return ReplayBuffer(
        TensorStorage(config.capacity),
        sampler=RandomSampler(),
        batch_size=config.batch_size,
        prefetch=config.prefetch,
        workers=config.workers,
        limiter=SampleToInsertRatio(ratio, config.warmup, error_buffer),
        generator=torch.Generator().manual_seed(config.seed),
    )


async def train(config: Config, progress: Progress) -> Run:
    """Runs the collectors and the learner until the learner is done."""
    torch.manual_seed(config.seed_for(3))  # the initial weights
    agent = Agent(config)
    run = Run(config, agent, best=copy.deepcopy(agent.target))
    buffer = make_buffer(config)
    saver = None if config.checkpoint is None else Checkpointer(config.checkpoint)
    if saver is not None and config.resume and saver.latest() is not None:
        await saver.restore(buffer=buffer, run=run)
    started = time.perf_counter()
    bar = progress.add_task("train", total=config.steps, rate=0.0, episode=0.0, queued=0)

    def show() -> None:
        rate = (run.steps - run.resumed_at) / (time.perf_counter() - started)
        episode = float(np.mean([episode for _, episode in run.episodes[-20:]] or [0.0]))
        queued = buffer.stats().queued
        progress.update(bar, completed=run.steps, rate=rate, episode=episode, queued=queued)

    async with contextlib.AsyncExitStack() as stack:
        stop = None
        if saver is not None:
            await stack.enter_async_context(saver)  # its end waits for what is being written
            stop = stack.enter_context(saver.on_signal())  # the first Ctrl-C or SIGTERM lets it save once more and end
        await stack.enter_async_context(buffer)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        collectors = [tasks.create_task(collect(run, buffer, index)) for index in range(config.envs)]
        await learn(run, buffer, saver, stop, show)
        run.exit_code = 0 if stop is None else stop.exit_code
        for collector in collectors:
            collector.cancel()
    return run


def split(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Horizontal and vertical positions; a run of a few steps may have none."""
    return [step for step, _ in points], [value for _, value in points]


def plot(run: Run, path: Path) -> None:
    """Saves the learning curve: training episodes, and greedy evaluations."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")  # without pyplot it needs no display
    axes = figure.add_subplot(xlabel="environment steps", ylabel="episode return", title=ENV_ID)
    axes.plot(*split(run.episodes), ".", markersize=4, alpha=0.4, label="training episodes")
    axes.plot(*split(run.evaluations), "o-", markersize=4, label="greedy evaluation (mean)")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The loop of uvloop where it is installed, else that of asyncio."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def parse_arguments() -> Config:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Double DQN on CartPole-v1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30_000, help="environment steps in all")
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--prefetch", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--eval-episodes", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path(), help="directory for the picture")
    parser.add_argument("--checkpoint", type=Path, help="directory for checkpoints of the whole run")
    parser.add_argument("--every", type=int, default=1_000, help="updates between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--no-progress", dest="progress", action="store_false")
    return Config(**vars(parser.parse_args()))


def main() -> None:
    """Trains, plays the final episodes, draws the curve."""
    config = parse_arguments()
    torch.set_num_threads(1)
    started = time.perf_counter()
    with (
        Progress(*COLUMNS, disable=not config.progress) as progress,
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        run = runner.run(train(config, progress))
    if run.exit_code:
        print(f"saved after {run.updates} updates; --resume goes on from there")
        sys.exit(run.exit_code)
    returns = evaluate(run.best, config.eval_episodes, config.seed_for(4))
    seconds = time.perf_counter() - started
    rate = (run.steps - run.resumed_at) / seconds
    path = config.output / "cartpole_dqn.png"
    plot(run, path)
    print(
        f"seed {config.seed}: mean return {returns.mean():.1f} over {config.eval_episodes} episodes, "
        f"{run.steps} steps in {seconds:.1f} s ({rate:.0f} steps/s), curve: {path}"
    )


if __name__ == "__main__":
    main()
