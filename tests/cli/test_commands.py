"""The commands, in this process: what they print, and their exit statuses."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncbuf import Checkpointer, SamplerWithoutReplacement, __version__, checkpoint
from asyncbuf._cli import main as cli
from asyncbuf._cli.main import main
from asyncbuf._cli.reports import plain
from asyncbuf._disk.manifest import MANIFEST
from tests.checkpoint.looks import damage, list_ring, listed, make_chunks_small, numbered, ring, run_of
from tests.version_1.test_version_1 import DATA

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    make_chunks_small(monkeypatch)


class Terminal(io.StringIO):
    """Takes what is printed for a person."""

    def isatty(self) -> bool:
        return True


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    status = main([str(each) for each in argv])
    out, err = capsys.readouterr()
    return status, out, err


def rounded(value: Any) -> Any:
    """Without ages, which change."""
    if isinstance(value, dict):
        return {key: rounded(child) for key, child in value.items() if key != "age"}
    return [rounded(child) for child in value] if isinstance(value, list) else value


async def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpointer = await run_of(tmp_path, 2)
    status, out, err = run(capsys, "inspect", checkpointer.path(2))
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == str(checkpointer.path(2))
    assert lines[1].startswith("step 2 of a run, saved ")
    assert "shared with other checkpoints" in lines[3]
    words = [line.split() for line in lines]
    assert ["rows", "45"] in words
    assert ["x", "int64", "[]"] in words
    assert ["epoch", "value", "0", "B", "0", "B", "int", "=", "2"] in words
    status, out, _ = run(capsys, "inspect", checkpointer.path(2), "--json")
    assert status == 0
    assert rounded(json.loads(out)) == rounded(plain(checkpoint.inspect(checkpointer.path(2))))


async def test_inspect_leaves_out_what_is_long_unless_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = await Checkpointer(tmp_path).save(1, many={f"key {i}": i for i in range(30)})
    _, out, _ = run(capsys, "inspect", path)
    assert "key 19 " in out
    assert "key 20 " not in out
    assert "... 10 more" in out
    _, out, _ = run(capsys, "inspect", path, "--all")
    assert "key 29 " in out
    assert "more" not in out


@pytest.mark.parametrize("path", sorted(DATA.glob("*/checkpoint")), ids=lambda path: path.parent.name)
def test_checkpoints_of_version_1(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not (path / MANIFEST).exists():
        status, out, _ = run(capsys, "list", path)
        assert status == 0
        assert "ok" in out
        path = path / "step-000007"
    for command in (("inspect", path), ("inspect", "--all", path), ("verify", path), ("diff", path, path)):
        status, _, err = run(capsys, *command)
        assert (status, err) == (0, "")


async def test_verify_says_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpointer = await run_of(tmp_path, 3)
    one, two, three = map(checkpointer.path, (1, 2, 3))
    file = damage(two, "flip")
    status, out, err = run(capsys, "verify", one, two)
    assert (status, err) == (1, "")
    assert f"{one}: sound" in out
    assert f"{two}: DAMAGED" in out
    assert str(file) in out
    status, out, err = run(capsys, "verify", two, tmp_path / "nothing", three)
    assert status == 2
    assert f"{three}: sound" in out
    assert err.count("\n") == 1
    assert "nothing: expected a checkpoint" in err
    status, out, _ = run(capsys, "verify", two, tmp_path / "nothing", three, "--json")
    assert status == 2
    found = json.loads(out)
    assert [each.get("is_sound") for each in found] == [False, None, True]
    assert found[0] == plain(checkpoint.verify(two))
    assert found[1].keys() == {"path", "error"}


async def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpointer = await run_of(tmp_path, 2)
    one, two = map(checkpointer.path, (1, 2))
    status, out, err = run(capsys, "diff", one, two)
    assert (status, err) == (1, "")
    assert "rows (by item number): 5 added, 5 removed, 0 changed" in out
    assert "writer/cursor" in out
    status, out, _ = run(capsys, "diff", one, two, "--json")
    found = json.loads(out)
    assert (status, found["is_same"]) == (1, False)
    assert found == json.loads(json.dumps(plain(checkpoint.diff(one, two))))
    status, out, _ = run(capsys, "diff", one, one)
    assert status == 0
    assert run(capsys, "diff", one, tmp_path / "nothing")[0] == 2


async def test_diff_shows_fields_and_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("a", 0), ("b", 1)):
        buffer = ring(sampler=SamplerWithoutReplacement() if value else None)
        await buffer.extend({"x": torch.arange(5), "y": torch.full((5,), value)})
        await buffer.save(tmp_path / name)
    _, out, _ = run(capsys, "diff", tmp_path / "a", tmp_path / "b")
    words = [line.split() for line in out.splitlines()]
    assert ["y", "5"] in words
    assert ["setting", "in", "A", "in", "B"] in words


async def test_list_and_prune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpointer = await run_of(tmp_path, 4)
    status, out, _ = run(capsys, "list", tmp_path)
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["4", "3", "2", "1"]
    damage(checkpointer.path(1), "truncate")
    status, out, _ = run(capsys, "list", tmp_path)
    assert status == 1
    assert "DAMAGED" in out.splitlines()[-1]
    status, out, _ = run(capsys, "list", tmp_path, "--json")
    assert rounded(json.loads(out)) == rounded([plain(each) for each in checkpoint.list_checkpoints(tmp_path)])
    status, out, _ = run(capsys, "prune", tmp_path, "--keep", 2, "--dry-run", "--json")
    assert (status, json.loads(out)["removed"], json.loads(out)["dry_run"]) == (0, [2, 1], True)
    assert checkpointer.steps() == [1, 2, 3, 4]
    status, out, _ = run(capsys, "prune", tmp_path, "--keep", 2)
    assert status == 0
    assert out.splitlines()[0].startswith("removed: 2, 1, ")
    assert checkpointer.steps() == [3, 4]
    assert run(capsys, "list", checkpointer.path(3))[0] == 2


def test_an_empty_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "list", tmp_path)[:2] == (
        0,
        "no steps of a Checkpointer, such as step-000100 (inspect shows a single checkpoint)\n",
    )
    assert run(capsys, "list", tmp_path, "--json")[:2] == (0, "[]\n")


@pytest.mark.parametrize("command", ["inspect", "verify", "list"])
def test_errors_take_one_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, command, tmp_path / "with\nnew line")
    assert (status, out) == (2, "")
    assert err.startswith("asyncbuf: ")
    assert err.count("\n") == 1


async def test_a_damaged_checkpoint_is_no_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpointer = await run_of(tmp_path, 1)
    damage(checkpointer.path(1), "delete")
    status, _, err = run(capsys, "inspect", checkpointer.path(1))
    assert status == 1
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [(), ("look",), ("inspect",), ("prune", "x"), ("prune", "x", "--keep", "few"), ("diff", "a"), ("verify",)],
    ids=" ".join,
)
def test_wrong_usage(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: asyncbuf" in capsys.readouterr().err


def test_nothing_may_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "prune", tmp_path, "--keep", 0)
    assert status == 2
    assert "keep" in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"asyncbuf {__version__}\n"


@pytest.mark.parametrize("has_rich", [True, False])
async def test_in_a_terminal(has_rich: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich", None)
    buffer = list_ring()
    await buffer.extend([{"[red]not markup[/]": 1, "esc\x1b[31m\nape": "x"}])
    await buffer.save(tmp_path / "a")
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["inspect", str(tmp_path / "a")]) == 0
    out = terminal.getvalue()
    assert ("─" in out) is has_rich
    assert "[red]not markup[/]" in out
    assert "esc\\x1b[31m\\nape" in out


async def test_everything_fits_in_a_terminal_and_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    checkpointer = await run_of(tmp_path, 2)
    await checkpointer.save(3, only=listed(2), buffer=ring())
    one, two, three = map(checkpointer.path, (1, 2, 3))
    damage(one, "flip")
    commands = [
        ("inspect", two),
        ("verify", one, two),
        ("diff", two, three),
        ("list", tmp_path),
        ("prune", tmp_path, "--keep", "2", "--dry-run"),
    ]
    for command in commands:
        argv = [str(each) for each in command]
        status = main(argv)
        assert capsys.readouterr().out
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", Terminal())
            assert main(argv) == status


def test_letters_that_a_terminal_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, encoding="ascii"))
    (tmp_path / "ä").mkdir()
    assert main(["prune", str(tmp_path / "ä"), "--keep", "1"]) == 0
    assert main(["verify", str(DATA / "flat-p0-w1-empty" / "checkpoint")]) == 0
    assert content.getvalue().decode("ascii").startswith("removed: none")


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (BrokenPipeError(), 141)])
def test_ends_from_outside_are_quiet(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(path: object) -> None:
        raise error

    monkeypatch.setattr(checkpoint, "inspect", fail)
    monkeypatch.setattr(cli, "_forget_output", lambda: None)
    assert run(capsys, "inspect", "x") == (status, "", "")


async def test_a_file_system_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    buffer = ring()
    await buffer.extend(numbered(3))
    await buffer.save(tmp_path / "a")

    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "a"))

    monkeypatch.setattr("asyncbuf._disk.manifest.is_checkpoint", fail)
    status, _, err = run(capsys, "inspect", tmp_path / "a")
    assert status == 2
    assert err == f"asyncbuf: [Errno 13] Permission denied: '{tmp_path / 'a'}'\n"


def keys_of(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    if not isinstance(value, dict):
        return set()
    children = [keys_of(child) for key, child in value.items() if key != "libraries"]
    return set(value).union(*children)


async def test_every_key_is_documented(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    buffer = ring(prefetch=1)
    other = ring(sampler=SamplerWithoutReplacement())
    async with buffer, other:
        await buffer.extend(numbered(10))
        await other.extend(numbered(10, 1))
        await buffer.sample()
        one = await Checkpointer(tmp_path).save(1, buffer=buffer, value=[1])
        two = await Checkpointer(tmp_path).save(2, buffer=other, value=[2])
    documented = set(
        re.findall(r"`(\w+)`", (ROOT / "docs" / "inspecting.md").read_text("utf-8").partition("## JSON")[2])
    )
    commands: list[tuple[object, ...]] = [
        ("inspect", one),
        ("verify", one, tmp_path / "nothing"),
        ("diff", one, two),
        ("list", tmp_path),
        ("prune", tmp_path, "--keep", 1),
    ]
    seen: set[str] = set()
    for command in commands:
        found = keys_of(json.loads(run(capsys, *command, "--json")[1]))
        assert found <= documented, command
        seen |= found
    assert documented - seen == {"buffer", "inspect", "verify", "diff", "list", "prune"} - seen
