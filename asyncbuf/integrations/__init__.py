"""Optional dependencies, each alone in its file."""

from __future__ import annotations

from asyncbuf._plain.registry import when_imported


def _tensordict() -> None:
    from asyncbuf.integrations import tensordict

    tensordict.register()


when_imported("tensordict", _tensordict)
