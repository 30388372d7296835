"""The example of asynchronous GRPO: killed again and again, it loses nothing and trains on nothing twice."""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "async_grpo.py"
_WHITE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def lines_of_code(source: str) -> int:
    """Lines with code: no blank ones, comments and docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for t in tokens if t.type not in _WHITE for line in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node):
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(lines)


def killed(folder: Path, kills: int, *options: str, seconds: float) -> dict[str, Any]:
    """The numbers of a run that was killed so often and of one that was left alone."""
    command = [sys.executable, str(EXAMPLE), f"--kill={kills}", f"--output={folder}", *options]
    ended = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert not ended.returncode, ended.stdout + ended.stderr
    assert ended.stdout.count("was killed") == kills
    found: dict[str, Any] = json.loads((folder / "async_grpo.json").read_text())
    return found


def test_the_loop_of_a_user_is_short() -> None:
    text = EXAMPLE.read_text("utf-8")
    start, stop = text.index("# -- the loop"), text.index("# -- what came of it")
    assert 0 < start < stop
    assert lines_of_code(text[start:stop]) <= 60


def check(found: dict[str, Any], prompts: int) -> None:
    for numbers in (found["left_alone"], found["killed"]):
        assert sorted(numbers["trained"] + numbers["filtered"]) == list(range(prompts))
        assert numbers["closes"]
        assert len(numbers["lengths"]) == 8 * len(numbers["trained"])
        assert numbers["oldest"] <= 4


def test_killed_three_times(tmp_path: Path) -> None:
    check(killed(tmp_path, 3, "--prompts=100", "--latency=0.01", seconds=50), 100)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_last_prompts_may_be_filtered_out(seed: int, tmp_path: Path) -> None:
    # A new policy is seldom right, so many groups are refused: the learner waits for one that never comes.
    check(killed(tmp_path, 1, "--prompts=2", f"--seed={seed}", seconds=50), 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_three_hundred_times_with_the_lengths_of_an_undisturbed_run(tmp_path: Path) -> None:
    lengths: dict[str, list[int]] = {"left_alone": [], "killed": []}
    for seed in range(6):
        folder = tmp_path / str(seed)
        folder.mkdir()
        # Nothing is too old: rollouts that are long are so more often, and would be missing in both.
        options = ("--prompts=400", f"--seed={seed}", "--max-age=1000", "--every=1")
        found = killed(folder, 50, *options, seconds=200)
        for name, seen in lengths.items():
            numbers = found[name]
            assert sorted(numbers["trained"] + numbers["filtered"]) == list(range(400))
            assert numbers["closes"]
            assert not numbers["asked_again"]
            seen += numbers["lengths"]
    assert min(map(len, lengths.values())) > 10_000
    assert ks_p_value(*lengths.values()) > 1e-3


def ks_p_value(first: list[int], second: list[int]) -> float:
    """Of the two-sample test of Kolmogorov and Smirnov. For lengths, which have ties, it is too careful."""
    values = np.union1d(first, second)
    parts = [np.searchsorted(np.sort(sample), values, side="right") / len(sample) for sample in (first, second)]
    distance = np.abs(parts[0] - parts[1]).max()
    size = len(first) * len(second) / (len(first) + len(second))
    terms = np.arange(1, 101)
    series = 2 * ((-1.0) ** (terms - 1) * np.exp(-2 * terms**2 * size * distance**2)).sum()
    return float(np.clip(series, 0, 1)) if distance > 0.0 else 1.0


def test_the_test_tells_samples_apart() -> None:
    random = np.random.default_rng(0)
    lengths = random.geometric(0.1, 30_000)
    assert ks_p_value(list(lengths[:10_000]), list(lengths[10_000:20_000])) > 0.05
    assert ks_p_value(list(lengths[:10_000]), list(random.geometric(0.12, 10_000))) < 1e-3
