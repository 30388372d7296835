"""Kill a training run again and again; it ends with the same weights, from the same batches, bit for bit.

A small Q-network learns from recorded CartPole transitions, which flow into the `ReplayBuffer` while it trains. The run
happens twice: once undisturbed and without a single checkpoint, and once saving a checkpoint every few steps while its
parent process kills it with SIGKILL at random moments and starts it anew. Each process chains a digest over everything
that it gets from the buffer (rows, noise and all), and the chain is part of the checkpoint. At every step of every
process the digest must be that of the undisturbed run, and so must the weights in the end.

No setting matters for that: try `--prefetch 0`, `--prefetch 16 --workers 4`, `--sampler random`.

Run it (half a minute on two CPU cores, most of it for starting Python)::

    pip install asyncbuf gymnasium uvloop
    python examples/exact_resume.py --kills 3

uvloop is optional.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import hashlib
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from asyncbuf import Batch, RandomSampler, ReplayBuffer, SamplerWithoutReplacement, TensorStorage
from asyncbuf.checkpoint.checkpointer import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH_SIZE = 32
CAPACITY = 512  # small enough that the buffer wraps around
WRITES_PER_STEP = 4
SAMPLERS = {"without-replacement": SamplerWithoutReplacement, "random": RandomSampler}


@dataclass(frozen=True)
class Config:
    seed: int
    steps: int
    kills: int
    every: int
    prefetch: int
    workers: int
    sampler: str
    directory: Path | None
    child: Path | None
    save: bool


# -- the run ----------------------------------------------------------------------------------------------------------


def record(count: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Transitions `[count, ...]` of a random policy: the same in every process."""
    env = gym.make("CartPole-v1")
    rng = np.random.default_rng(seed)
    rows = []
    obs, _ = env.reset(seed=seed)
    for action in rng.integers(2, size=count):
        next_obs, reward, terminated, truncated, _ = env.step(action)
        rows.append((obs, action, np.float32(reward), next_obs, terminated))
        obs = env.reset()[0] if terminated or truncated else next_obs
    env.close()
    columns = map(np.stack, zip(*rows, strict=True))
    return dict(zip(("obs", "action", "reward", "next_obs", "terminated"), columns, strict=True))


def add_noise(data: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The generator is seeded from the ticket of the batch, so the noise is the same whichever worker adds it."""
    noise = 0.01 * torch.randn(data["obs"].shape, generator=generator)
    return {**data, "obs": data["obs"] + noise}


def chained(digest: str, batch: Batch) -> str:
    """The digest of a batch and of all batches before it."""
    chain = hashlib.blake2b(digest.encode(), digest_size=16)
    chain.update(f"{batch.number} {batch.epoch} {batch.last}".encode())
    chain.update(batch.indices.numpy().tobytes())
    for name, tensor in sorted(batch.data.items()):
        chain.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        chain.update(np.ascontiguousarray(tensor.numpy()).tobytes())
    return chain.hexdigest()


def weights_digest(*networks: nn.Module) -> str:
    chain = hashlib.blake2b(digest_size=16)
    for network in networks:
        for tensor in network.state_dict().values():
            chain.update(tensor.numpy().tobytes())
    return chain.hexdigest()


def learn(online: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """One step of Q-learning, and one of the target network towards the online one."""
    with torch.no_grad():
        wanted = batch["reward"] + 0.99 * target(batch["next_obs"]).amax(1) * ~batch["terminated"]
    value = online(batch["obs"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
    loss = nn.functional.smooth_l1_loss(value, wanted)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    with torch.no_grad():
        for average, parameter in zip(target.parameters(), online.parameters(), strict=True):
            average.lerp_(parameter, 0.01)


async def train(config: Config, directory: Path) -> None:
    """Goes on from the latest checkpoint, if there is one, and prints the digest of each step, then of the weights."""
    recording = record((config.steps + BATCH_SIZE) * WRITES_PER_STEP, config.seed)
    torch.manual_seed(config.seed)  # the initial weights
    online = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    buffer = ReplayBuffer(
        TensorStorage(CAPACITY),
        sampler=SAMPLERS[config.sampler](),
        batch_size=BATCH_SIZE,
        prefetch=config.prefetch,
        workers=config.workers,
        transform=add_noise,
        generator=torch.Generator().manual_seed(config.seed),
    )
    checkpointer = Checkpointer(directory)
    parts: dict[str, Any] = {"buffer": buffer, "online": online, "target": target, "optimizer": optimizer}
    step, digest = 0, ""
    if checkpointer.latest() is not None:
        restored = await checkpointer.restore(**parts)
        step, digest = restored.step, restored.values["digest"]
    async with buffer:
        while step < config.steps:
            # The buffer knows how much of the recording it has seen; nothing else has to be saved for that.
            start = buffer.write_count
            stop = start + WRITES_PER_STEP * (BATCH_SIZE if start == 0 else 1)
            await buffer.extend({name: column[start:stop] for name, column in recording.items()})
            batch = await buffer.sample()
            digest = chained(digest, batch)
            learn(online, target, optimizer, batch)
            step += 1
            if config.save and step % config.every == 0:
                await checkpointer.save(step, **parts, digest=digest)
            print(step, digest, flush=True)
    print("weights", weights_digest(online, target))


# -- the parent: starts it, kills it, compares ------------------------------------------------------------------------


def start(config: Config, directory: Path, *, save: bool) -> subprocess.Popen[str]:
    names = ("seed", "steps", "every", "prefetch", "workers", "sampler")
    options = [f"--{name}={getattr(config, name)}" for name in names] + ["--save"] * save
    command = [sys.executable, __file__, f"--child={directory}", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def killed(child: subprocess.Popen[str], at: int, delay: float) -> list[str]:
    """Kills a child some time after it has done a step, perhaps in the middle of a save: what it has printed."""
    with child:
        assert child.stdout is not None
        lines = []
        for line in child.stdout:
            lines.append(line.strip())
            word, _ = line.split()
            if word == "weights" or int(word) >= at:
                break
        time.sleep(delay)
        child.kill()  # SIGKILL: nothing in the child gets a chance to tidy up
        return lines + [line.strip() for line in child.stdout]


def compare(config: Config, directory: Path) -> bool:
    """Whether both runs are equal."""
    rng = random.Random(config.seed)
    moments = sorted(rng.randint(1, max(1, config.steps * 9 // 10)) for _ in range(config.kills))
    reference = start(config, directory / "undisturbed", save=False)
    printed = []
    for at in moments:
        printed.append(killed(start(config, directory / "killed", save=True), at, rng.random() * 0.05))
        latest = Checkpointer(directory / "killed").latest()
        step = " ".join(printed[-1][-1:]).split(" ")[0] or "no step"
        print(f"process {len(printed)} was killed after {step}; latest checkpoint: {latest}")
    survivor = start(config, directory / "killed", save=True)
    expected, last = (child.communicate()[0].splitlines() for child in (reference, survivor))
    printed.append(last)
    equal = [bool(lines) and set(lines) <= set(expected) for lines in printed]
    print(f"undisturbed: step {', '.join(expected[-2:])}")
    print(f"     killed: step {', '.join(last[-2:])}")
    print(
        f"{sum(equal)} of {len(equal)} processes saw the batches of the undisturbed run, {sum(map(len, printed))} lines"
    )
    return all(equal) and expected[-2:] == last[-2:]


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed, else asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def parse_arguments() -> Config:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400, help="updates of the network")
    parser.add_argument("--kills", type=int, default=3, help="how often the second run is killed")
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--prefetch", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sampler", choices=SAMPLERS, default="without-replacement")
    parser.add_argument("--directory", type=Path, help="a new folder for the checkpoints, else a temporary one")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help=argparse.SUPPRESS)
    return Config(**vars(parser.parse_args()))


def main() -> None:
    config = parse_arguments()
    torch.set_num_threads(1)
    if config.child is not None:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(train(config, config.child))
    with contextlib.ExitStack() as stack:
        directory = config.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if directory.exists() and any(directory.iterdir()):
            sys.exit(f"{directory}: expected a new or empty folder, found files in it")
        same = compare(config, directory)
    print("equal, bit for bit" if same else "NOT EQUAL")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
