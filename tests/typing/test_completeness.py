"""What type checkers see of the installed package, as ``pyright --verifytypes`` reports it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import asyncbuf

PACKAGE = Path(asyncbuf.__file__).parent
LEAST = 0.99

# Private classes that public ones show, each for a reason.
SHOWN = {
    "AsyncOnly",  # a base class without public methods
    "NoSyncIteration",  # likewise
    "SnapshotMethods",  # a base class of ReplayBuffer; its methods are those of the buffer
    *("WriteMethods", "DeliveryMethods", "VersionMethods", "WatchMethods"),  # likewise
    "CheckpointReader",  # Snapshot.read and Snapshot.write are for Checkpointer
    "CheckpointWriter",  # likewise
    "Transfer",  # SaveProgress has its numbers
    "_Mark",  # an attribute of Freeze that the buffer looks at
    "FromDataset",  # a base class of ReplayBuffer; its methods are those of the buffer
    "ProportionalSampler",  # the base class of PrioritizedSampler and WeightedSampler
    "_FixedStorage",  # the base class of ColumnStorage and DatasetStorage
    "_Scattered",  # the base class of ScatteredRows and ScatteredItems
    "Join",  # the base class of NStep, FrameStack and Hindsight, which JoinedSampler takes
    *("JoinedRows", "Links", "Spans", "Episodes", "Cut", "Joined", "Pieces"),  # what JoinedSampler tells them
    *("ItemKeys", "Writes"),  # what ReplayBuffer.adder makes an NStepAdder of
}

pytestmark = [
    pytest.mark.slow,  # .ci/run runs them beside the other tests
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("pyright") is None and not os.environ.get("CI"), reason="pyright is not installed"
    ),
]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--verifytypes", "asyncbuf"]
    options = ["--ignoreexternal", "--outputjson"]
    process = subprocess.run([*command, *options], cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    assert process.stdout.startswith("{"), process.stdout + process.stderr
    found: dict[str, Any] = json.loads(process.stdout)["typeCompleteness"]
    assert Path(found["packageRootDirectory"]) == PACKAGE
    return found


def public_names() -> set[str]:
    """The names that the package and its folders export."""
    modules = ["asyncbuf", *(f"asyncbuf.{info.name}" for info in pkgutil.iter_modules([str(PACKAGE)]) if info.ispkg)]
    names: set[str] = set()
    for module in modules:
        if not module.split(".")[-1].startswith("_"):
            names.update(getattr(importlib.import_module(module), "__all__", ()))
    return names


def test_public_types_are_complete(report: dict[str, Any]) -> None:
    faults = [
        f"{symbol['name']}: {fault['message'].splitlines()[0]}"
        for symbol in report["symbols"]
        if symbol["isExported"]
        for fault in symbol.get("diagnostics", ())
    ]
    assert report["completenessScore"] >= LEAST, "\n".join(faults)


def test_public_modules_have_something_public(report: dict[str, Any]) -> None:
    # To a type checker, all that a module defines whose name has no underscore is public.
    names = public_names()
    defined = {symbol["name"].rpartition(".")[::2] for symbol in report["symbols"] if symbol["isExported"]}
    modules = {module["name"] for module in report["modules"]} - {
        *("asyncbuf.testing", "asyncbuf.integrations.dcp", "asyncbuf.__main__")
    }
    packages = {module for module in modules if (PACKAGE.parent / module.replace(".", "/")).is_dir()}
    with_public_names = {module for module, name in defined if name in names}
    internal = modules - packages - with_public_names
    assert not internal, f"expected names that begin with an underscore, found {sorted(internal)}"


def test_public_types_are_not_private(report: dict[str, Any]) -> None:
    shown = {
        symbol["name"].rpartition(".")[2]
        for symbol in report["symbols"]
        if symbol["category"] == "class" and not symbol["isExported"]
    }
    private = shown - public_names() - SHOWN
    assert not private, f"expected in an __all__, because a public signature names them: {sorted(private)}"
