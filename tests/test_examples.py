"""Every example runs to its end, with small arguments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

# "{output}" stands for a folder of the test's own.
ARGUMENTS = {
    "async_grpo.py": "--prompts 200 --output {output}",
    "exact_resume.py": "--steps 60 --kills 1 --directory {output}",
    "prioritized_dqn.py": "--steps 1200 --eval-episodes 2",
    "recurrent_dqn.py": "--steps 1200 --eval-episodes 2",
    "cartpole_dqn.py": "--steps 300 --eval-episodes 2 --no-progress --output {output}",
}

# Below the limit of the test, so that a run that hangs is reported with what it printed.
SECONDS = 150


def test_each_example_has_arguments() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(ARGUMENTS)


@pytest.mark.slow  # most of the time Python starts; .ci/run runs them beside the other tests
@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_example_runs(name: str, tmp_path: Path) -> None:
    arguments = [argument.format(output=tmp_path / "output") for argument in ARGUMENTS[name].split()]
    # In a folder of its own, so that an example that ignores --output does not write into the checkout.
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"{name} still ran after {SECONDS} s:\n{output}", pytrace=False)
    if process.returncode != 0:
        pytest.fail(f"{name} ended with exit code {process.returncode}:\n{output}", pytrace=False)
