"""The command as a process of its own, which knows nothing of the program that wrote a checkpoint."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncbuf
from asyncbuf import ListStorage, ReplayBuffer
from tests.checkpoint.looks import damage, make_chunks_small, numbered, ring
from tests.version_1.cases import Phase, Settings, Step

if TYPE_CHECKING:
    import pytest

ROOT = Path(asyncbuf.__file__).parents[1]
COMMAND = [sys.executable, "-m", "asyncbuf"]
# The commands run one after the other in one process: to import torch takes longer than all the rest.
IN_TURN = """
import contextlib, io, json, sys
from asyncbuf._cli.main import main

found = []
for argv in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(argv)
    found.append([status, out.getvalue(), err.getvalue()])
print(json.dumps([found, sorted(name for name in sys.modules if name.startswith("tests"))]))
"""


def run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False, encoding="utf-8", **options
    )


async def test_types_of_the_user_are_not_needed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        buffer = ReplayBuffer(ListStorage(10), batch_size=2, prefetch=1, collate_fn=lambda items: items)
        async with buffer:
            await buffer.extend([Step(Settings(0.5, (1, 2)), Phase.WARM if name == "a" else Phase.COLD)] * 3)
            await buffer.sample()
            await buffer.save(tmp_path / name)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    commands = [["inspect", a, "--json"], ["verify", a, b], ["diff", a, b, "--json"], ["inspect", a]]
    process = run(sys.executable, "-c", IN_TURN, json.dumps(commands))
    assert process.returncode == 0, process.stderr
    found, loaded = json.loads(process.stdout)
    assert loaded == []
    assert [(status, err) for status, _, err in found] == [(0, ""), (0, ""), (1, ""), (0, "")]
    info = json.loads(found[0][1])
    fields = [(leaf["path"], leaf["kind"]) for leaf in info["parts"][0]["buffer"]["fields"]]
    assert fields == [
        ("<Step>/obs<Settings>/rate", "float"),
        ("<Step>/obs<Settings>/sizes[]", "int"),
        ("<Step>/reward<Phase>", "str"),
    ]
    difference = json.loads(found[2][1])["parts"][0]["rows"]
    assert (difference["changed"], difference["fields"]) == (3, [{"path": "<Step>/reward<Phase>", "rows": 3}])


async def save(path: Path) -> None:
    buffer = ring()
    await buffer.extend(numbered(45))
    await buffer.save(path)


def test_statuses_and_pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_chunks_small(monkeypatch)
    asyncio.run(save(tmp_path / "a"))
    file = damage(tmp_path / "a", "flip")
    process = run(*COMMAND, "verify", str(tmp_path / "a"))
    assert process.returncode == 1
    assert str(file) in process.stdout
    assert process.stderr == ""
    process = run(*COMMAND, "inspect", str(tmp_path))
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr == f"asyncbuf: {tmp_path}: expected a checkpoint, found a directory with 'a'\n"
    # The reader is gone before anything is written.
    with subprocess.Popen(
        [*COMMAND, "inspect", str(tmp_path / "a"), "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as broken:
        assert broken.stdout is not None
        assert broken.stderr is not None
        broken.stdout.close()
        assert broken.stderr.read() == b""
        assert broken.wait(50) == 141
