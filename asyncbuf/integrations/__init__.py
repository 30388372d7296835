"""Optional dependencies, each alone in its file."""

from __future__ import annotations

from asyncbuf._plain.registry import when_imported


def _register_tensordict() -> None:
    from asyncbuf.integrations import _tensordict

    _tensordict.register()


when_imported("tensordict", _register_tensordict)
