"""The generators that belong to no object, as a part of a training run."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from asyncbuf._plain.state import fields
from asyncbuf.errors import CheckpointMismatchError


class GlobalGenerators:
    """The generators that belong to no object: of torch (CPU and CUDA), numpy and ``random``.

    Args:
        elastic: whether states of CUDA devices that are not here are left out.
    """

    def __init__(self, *, elastic: bool = False) -> None:
        self._elastic = elastic

    def state_dict(self) -> dict[str, Any]:
        """The states of all of them."""
        version, internal, gauss = random.getstate()
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "numpy": np.random.get_state(legacy=False),
            "python": [version, np.array(internal), gauss],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all of them.

        Raises:
            CheckpointMismatchError: there were more CUDA devices than there are here.
            CheckpointCorruptError: it is not the state of these generators.
        """
        cpu, cuda, numpy, python = fields(state, "rng", torch=torch.Tensor, cuda=list, numpy=dict, python=list)
        here = torch.cuda.device_count() if cuda and torch.cuda.is_available() else 0
        if len(cuda) > here and not self._elastic:
            raise CheckpointMismatchError(
                f"rng: expected at most {here} CUDA devices, as there are here; the checkpoint has {len(cuda)} "
                "(elastic=True leaves out the others)"
            )
        torch.set_rng_state(cpu)
        for device, saved in enumerate(cuda[:here]):
            torch.cuda.set_rng_state(saved, device)
        np.random.set_state(numpy)
        version, internal, gauss = python
        random.setstate((version, tuple(internal.tolist()), gauss))
