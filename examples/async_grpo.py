"""Asynchronous GRPO: rollouts and training at once, with nothing lost and nothing twice, however often it is killed.

GRPO (group relative policy optimization; Shao et al., DeepSeekMath, 2024) answers each prompt eight times, and trains
on how much better each answer is than the mean of its group. In an asynchronous loop as in AReaL (Fu et al., 2025,
arXiv 2505.24298), rollouts go on while the model is trained, so the tokens of one rollout may be of several versions.

The task is small and can be checked: emit digits whose sum ends with the digit asked for. Generation is simulated, with
lengths and latencies as those of a language model: most answers are short and some are very long, one worker is a
straggler, requests fail now and then, and weights change in the middle of a rollout. The policy is real, and learns.

What it shows:

- each rollout has a reservation, and what it has so far is in every checkpoint: a killed run goes on with it;
- a group of eight becomes visible as a whole (`reserve_group`, `GroupSampler`); one without differences in the reward
  is filtered out;
- no batch has tokens that are older than `--max-age` versions (`Staleness`): such groups leave, and their prompts are
  asked again; writers are at most two batches ahead (`MaxAhead`);
- a training step is done with its batch or gives it back (`lease`); the death of a task reaches all others (`watch`);
- buffer, prompts, policy, optimizer and records are saved at one point in time, in the background (`save_soon`).

Run it (some ten seconds on two CPU cores; the picture is ``async_grpo.png``)::

    pip install asyncbuf matplotlib uvloop
    python examples/async_grpo.py
    python examples/async_grpo.py --kill 5    # SIGKILL, resume, and compare with an uninterrupted run
    python examples/async_grpo.py --checkpoint run --resume

uvloop is optional.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

from asyncbuf import (
    BufferClosedError,
    Checkpointer,
    GroupSampler,
    MaxAhead,
    PromptSource,
    RaggedStorage,
    ReplayBuffer,
    Staleness,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

    from asyncbuf import Batch, Slot

GROUP = 8  # answers to a prompt
GROUPS = 16  # in a batch
DIGITS = 10
CHUNK = 4  # tokens that come at once
LONGEST = 64  # tokens of an answer
TOKENS = ("state", "token", "logprob", "version")  # what is kept of each token

Rollout = dict[str, list[Any]]


@dataclass(frozen=True, kw_only=True)
class Config:
    seed: int
    prompts: int
    workers: int
    max_age: int
    latency: float
    failures: float
    checkpoint: Path
    every: int
    resume: bool
    kill: int
    output: Path


# -- model and generation ---------------------------------------------------------------------------------------------


class Policy(nn.Module):
    """States `[...]` to the logits of the next digit `[..., 10]`.

    A state is the digit that is still needed, from 0 to 9, plus 10 if the next digit is the last one of the answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(2 * DIGITS, 32), nn.Tanh(), nn.Linear(32, DIGITS))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        logprobs: torch.Tensor = self.layers(states).log_softmax(-1)
        return logprobs


class GenerationError(Exception):
    """A request that failed, as those to a server do now and then."""


class Server:
    """Stands for a server that generates tokens, and gets new weights while it does."""

    def __init__(self, config: Config, on_step: Callable[[int], None]) -> None:
        self.config = config
        self.on_step = on_step  # to tell how far it is
        self.random = random.Random(time.time_ns())  # another one after each restart
        self.failed = 0

    def load(self, policy: Policy, version: int) -> None:
        """New weights, also for the rollouts that are under way."""
        self.version = version
        self.on_step(version)
        with torch.inference_mode():
            logprobs = policy(torch.arange(2 * DIGITS))
        self.logprobs: list[list[float]] = logprobs.tolist()
        self.chances: list[list[float]] = logprobs.exp().tolist()

    async def generate(self, wanted: int, rollout: Rollout, slowness: float) -> None:
        """Adds some tokens to a rollout, all of one version."""
        await asyncio.sleep(self.config.latency * slowness * self.random.expovariate(1.0))
        if self.random.random() < self.config.failures:
            self.failed += 1
            raise GenerationError("no answer")
        for _ in range(CHUNK):
            if is_complete(rollout):
                return
            length = len(rollout["token"])
            # The longer an answer is, the longer it will go on: lengths have a heavy tail.
            is_last = self.random.random() < 1.5 / (length + 6.0) or length == LONGEST - 1
            state = (wanted - sum(rollout["token"])) % DIGITS + DIGITS * is_last
            [token] = self.random.choices(range(DIGITS), self.chances[state])
            logprob = self.logprobs[state][token]
            for name, value in zip(TOKENS, (state, token, logprob, self.version), strict=True):
                rollout[name].append(value)


def is_complete(rollout: Rollout) -> bool:
    return bool(rollout["state"]) and rollout["state"][-1] >= DIGITS


def item(prompt: dict[str, int], rollout: Rollout) -> dict[str, Any]:
    """What is stored of an answer, with its reward: 1 if the digits have the sum that was asked for, else 0."""
    right = sum(rollout["token"]) % DIGITS == prompt["wanted"]
    return {"prompt": prompt["id"], "reward": float(right), "oldest": min(rollout["version"]), **rollout}


def teaches(group: dict[str, Any]) -> bool:
    """Whether the rewards of a group differ: equal ones have no advantage over each other."""
    return bool(np.ptp(group["reward"]) > 0)


@dataclass
class Records:
    """What the report at the end is made from: part of each checkpoint, as is the policy."""

    trained: list[int] = field(default_factory=list)  # ids of prompts, in the order in which they were trained on
    filtered: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # of the rollouts trained on
    ages: list[int] = field(default_factory=list)  # of these: how many versions the oldest token was behind
    curve: list[float] = field(default_factory=list)  # the mean reward that the policy expects, before each step

    def trained_on(self, batch: Batch, policy: Policy) -> None:
        self.trained += batch.info["group"].tolist()
        self.lengths += batch["lengths"].flatten().tolist()
        self.ages += batch.info["age"].flatten().tolist()
        self.curve.append(expected_reward(policy))

    def state_dict(self) -> dict[str, Any]:
        return {name: list(values) for name, values in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update({name: list(values) for name, values in state.items()})


def expected_reward(policy: Policy) -> float:
    """The chance that an answer is right: that its last digit is the one that is needed, over all ten of these."""
    with torch.inference_mode():
        return float(policy(torch.arange(DIGITS, 2 * DIGITS)).exp().diagonal().mean())


def update(policy: Policy, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """A few steps of GRPO on one batch: the clipped ratio to the probabilities with which tokens were drawn."""
    reward = batch["reward"]  # [groups, members]
    advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)
    counts = torch.arange(batch["token"].shape[-1]) < batch["lengths"][..., None]  # [groups, members, steps]
    for _ in range(4):
        logprob = policy(batch["state"]).gather(-1, batch["token"][..., None])[..., 0]
        ratio = (logprob - batch["logprob"]).exp()
        gain = torch.minimum(ratio * advantage[..., None], ratio.clamp(0.8, 1.2) * advantage[..., None])
        loss = -(gain * counts).sum() / counts.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# -- the loop: all that a user writes beside model, generation and reward ---------------------------------------------


class Run:
    """Prompts, buffer and model, and the tasks that work with them."""

    def __init__(self, config: Config, server: Server) -> None:
        self.config, self.server, self.policy, self.records = config, server, Policy(), Records()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.004)
        self.source = PromptSource([number % DIGITS for number in range(config.prompts)], epochs=1)
        sampler = GroupSampler("prompt", GROUP, filter=teaches, filter_keys="reward", on_drop=self.on_drop)
        staleness = Staleness(config.max_age, version_key="oldest", id_key="prompt", on_evict=self.on_evict)
        limits: dict[str, Any] = dict(limiter=MaxAhead(2), overwrite="wait", staleness=staleness)
        storage, batch_size = RaggedStorage(1024, TOKENS), GROUPS * GROUP
        self.buffer: ReplayBuffer[Any] = ReplayBuffer(storage, sampler=sampler, batch_size=batch_size, **limits)
        parts = ("buffer", "source", "policy", "optimizer", "records")
        self.parts: dict[str, Any] = {name: getattr(self, name) for name in parts}

    def on_drop(self, id: int, cause: str) -> None:
        if cause == "filter":  # a group of which a member is too old is one of on_evict
            self.source.discard(id)
            self.records.filtered.append(id)

    def on_evict(self, ids: list[int]) -> None:
        for id in set(ids):
            self.source.put_back(id)  # to be asked again

    def left(self) -> int:
        return len(self.source) - self.source.counts.done - self.source.counts.discarded

    async def roll_out(self, slot: Slot, slowness: float) -> None:
        async with slot:
            rollout: Rollout = slot.partial or {name: [] for name in TOKENS}
            while not is_complete(rollout):
                with contextlib.suppress(GenerationError):  # ask again
                    await self.server.generate(slot.payload["wanted"], rollout, slowness)
                slot.partial = rollout  # what a checkpoint has of it
            await slot.commit([item(slot.payload, rollout)])

    async def work(self, unfinished: list[list[Slot]], slowness: float) -> None:
        while unfinished:
            await asyncio.gather(*(self.roll_out(slot, slowness) for slot in unfinished.pop(0)))
        async for id, wanted in self.source.until_done():
            slots = await self.buffer.reserve_group({"id": id, "wanted": wanted}, GROUP)
            self.source.hold(id)  # from here on it is in checkpoints by its reservation
            await asyncio.gather(*(self.roll_out(slot, slowness) for slot in slots))

    async def learn(self, saver: Checkpointer) -> None:
        while groups := min(GROUPS, self.left()):
            try:
                async with asyncio.timeout(1.0), self.buffer.lease(groups * GROUP) as batch:
                    update(self.policy, self.optimizer, batch)
                    self.records.trained_on(batch, self.policy)
                    for id in batch.info["group"].tolist():
                        self.source.done(id)
            except (TimeoutError, BufferClosedError):
                continue  # loses nothing; at the end, the filter may have left fewer groups than it waits for
            self.server.load(self.policy, await self.buffer.advance_version())
            if self.buffer.version % self.config.every == 0:
                await saver.save_soon(self.buffer.version, **self.parts)
        await saver.save(self.buffer.version, **self.parts)

    async def train(self) -> None:
        saver = Checkpointer(self.config.checkpoint)
        if self.config.resume and saver.latest() is not None:
            await saver.restore(**self.parts)
        self.server.load(self.policy, self.buffer.version)
        unfinished = [list(slots) for _, slots in groupby(self.buffer.unfinished(), lambda slot: slot.payload["id"])]
        async with self.buffer, saver, asyncio.TaskGroup() as tasks:
            self.buffer.watch(tasks.create_task(self.learn(saver)), "consumer")
            for slowness in [5.0, *[1.0] * (self.config.workers - 1)]:  # the first one is a straggler
                self.buffer.watch(tasks.create_task(self.work(unfinished, slowness)), "producer")


# -- what came of it --------------------------------------------------------------------------------------------------


def report(run: Run) -> dict[str, Any]:
    """The numbers by which runs are compared."""
    stats, counts, records = run.buffer.stats(), run.source.counts, run.records
    settled = [*records.trained, *records.filtered]
    return {
        "lost": len(set(range(len(run.source))) - set(settled)),
        "twice": len(settled) - len(set(settled)),
        "closes": stats.ledger.closes and counts.handed_out == len(settled) + counts.put_back,
        "trained": sorted(records.trained),
        "filtered": sorted(records.filtered),
        "asked_again": counts.put_back,
        "oldest": max(records.ages, default=0),
        "reward": expected_reward(run.policy),
        "lengths": records.lengths,
        "ledger": str(stats.ledger),
    }


def is_sound(found: dict[str, Any], config: Config) -> bool:
    """Whether each prompt was trained on or filtered out, once, and no batch was too old."""
    return found["closes"] and not found["lost"] and not found["twice"] and found["oldest"] <= config.max_age


def show(found: dict[str, Any]) -> None:
    """Prints the books."""
    print(found["ledger"])
    print(
        f"prompts: {len(found['trained'])} trained on + {len(found['filtered'])} filtered out, {found['lost']} lost, "
        f"{found['twice']} twice; {found['asked_again']} groups were evicted as stale, and their prompts asked again"
    )
    lengths = found["lengths"] or [0]
    print(
        f"rollouts: {np.mean(lengths):.1f} tokens on average, {max(lengths)} at most; no batch was older than "
        f"{found['oldest']} version(s); mean reward of the policy: {found['reward']:.3f}"
    )


def plot(run: Run, path: Path) -> None:
    """Saves the learning curve, and how old the batches were."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")  # without pyplot it needs no display
    axes = figure.add_subplot(xlabel="training step", ylabel="mean reward of the policy", title="asynchronous GRPO")
    axes.plot([*run.records.curve, expected_reward(run.policy)], color="C0")
    axes.set_ylim(0, 1)
    ages = np.array(run.records.ages)
    steps = len(run.records.curve)
    by_step = np.array_split(ages, np.arange(1, steps) * GROUPS * GROUP)
    other = axes.twinx()
    other.plot([values.mean() for values in by_step if len(values)], ".", color="C1", markersize=4)
    other.set_ylabel("mean age of a batch [versions]", color="C1")
    other.set_ylim(0, run.config.max_age)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


# -- killing and resuming ---------------------------------------------------------------------------------------------

# Processes are forked from one that has imported everything: so they start in a fraction of a second.
processes = multiprocessing.get_context("forkserver")


def child(config: Config, parent: Connection) -> None:
    """A process that trains, sends its steps, then the numbers of the end."""
    parent.send(report(trained(config, parent.send)))


def start(config: Config) -> tuple[ForkServerProcess, Connection]:
    received, sent = processes.Pipe(duplex=False)
    process = processes.Process(target=child, args=(config, sent))
    process.start()
    sent.close()
    return process, received


def killed(config: Config, at: int, delay: float) -> int:
    """Kills a process some time after it has come to a step: the last step that it has told of."""
    process, received = start(config)
    step = 0
    while step < at and isinstance(found := received.recv(), int):
        step = found
    time.sleep(delay)
    process.kill()  # SIGKILL: nothing in it gets a chance to tidy up
    process.join()
    return step


def finished(process: ForkServerProcess, received: Connection) -> dict[str, Any]:
    """The numbers of a process that is left alone."""
    while isinstance(found := received.recv(), int):
        pass
    process.join()
    return dict(found)


def compare(config: Config) -> bool:
    """Kills and resumes a run; whether it has settled the same prompts as one that was left alone, each once."""
    processes.set_forkserver_preload(["torch._dynamo", "matplotlib.figure", "asyncbuf"])
    left_alone = replace(config, checkpoint=config.checkpoint / "left_alone")
    resumed = replace(config, checkpoint=config.checkpoint / "killed", resume=True)
    rng = random.Random(config.seed)
    steps = config.prompts // (3 * GROUPS)  # there are more than that, however many groups are filtered out
    expected = finished(*start(left_alone))
    for number in range(1, config.kill + 1):
        at = steps * number // config.kill
        step = killed(resumed, at, 0.3 * rng.random())
        latest = Checkpointer(resumed.checkpoint).latest()
        print(f"process {number} was killed after step {step}; latest checkpoint: {latest}", flush=True)
    found = finished(*start(resumed))
    for name, numbers in (("left alone", expected), (f"killed {config.kill} times", found)):
        print(f"\n{name}:")
        show(numbers)
    config.output.mkdir(parents=True, exist_ok=True)
    (config.output / "async_grpo.json").write_text(json.dumps({"left_alone": expected, "killed": found}))
    settled = [sorted(numbers["trained"] + numbers["filtered"]) for numbers in (expected, found)]
    return settled[0] == settled[1] and is_sound(expected, config) and is_sound(found, config)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed, else asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def trained(config: Config, on_step: Callable[[int], None]) -> Run:
    """A run to its end."""
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)  # the initial weights
    run = Run(config, Server(config, on_step))
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run.train())
    return run


def once(config: Config) -> bool:
    """Trains, and shows what came of it; whether that is sound."""
    started = time.perf_counter()
    run = trained(config, lambda step: print(f"step {step}", flush=True))
    found = report(run)
    path = config.output / "async_grpo.png"
    plot(run, path)
    show(found)
    print(f"{time.perf_counter() - started:.1f} s, {run.server.failed} failed requests, curve: {path}")
    return is_sound(found, config)


def parse_arguments(directory: Path) -> Config:
    parser = argparse.ArgumentParser(description="asynchronous GRPO, with simulated generation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=1200, help="how many prompts, each of which is trained on once")
    parser.add_argument("--workers", type=int, default=32, help="how many groups are generated at once")
    parser.add_argument("--max-age", type=int, default=4, help="how many versions behind a token may be")
    parser.add_argument("--latency", type=float, default=0.02, help="seconds for four tokens, on average")
    parser.add_argument("--failures", type=float, default=0.002, help="the share of requests that fail")
    parser.add_argument("--checkpoint", type=Path, help="directory for checkpoints, else a temporary one")
    parser.add_argument("--every", type=int, default=2, help="training steps between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument(
        "--kill", type=int, default=0, help="kill it so often, and compare it with an uninterrupted run"
    )
    parser.add_argument(
        "--output", type=Path, default=Path(), help="directory for the picture, or the numbers of --kill"
    )
    arguments = parser.parse_args()
    arguments.checkpoint = arguments.checkpoint or directory
    return Config(**vars(arguments))


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        config = parse_arguments(Path(directory))
        if not config.resume and config.checkpoint.exists() and any(config.checkpoint.iterdir()):
            sys.exit(f"{config.checkpoint}: expected a new or empty folder, or --resume, found files in it")
        if config.kill:
            is_good = compare(config)
            print("\nthe same prompts, each once" if is_good else "\nNOT THE SAME")
        else:
            is_good = once(config)
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
