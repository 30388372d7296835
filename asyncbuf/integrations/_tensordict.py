"""TensorDict as a container of leaves (needs the ``tensordict`` extra)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensorclass,
)

from asyncbuf._plain.registry import (
    Codec,
    Container,
    add_codec,
    register_container,
    register_family,
    register_leaf,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


def _flatten(value: TensorDictBase, batched: bool) -> tuple[tuple[Hashable, ...], Sequence[Any], Hashable]:
    keys = tuple(value.keys())
    size = tuple(value.batch_size)
    return keys, [value.get(key) for key in keys], size[1:] if batched else size


def _unflatten(
    kind: Any,
    keys: tuple[Any, ...],
    children: Sequence[Any],
    aux: Any,
    batch: int | None,
) -> TensorDict:
    size = tuple(aux) if batch is None else (batch, *aux)
    return TensorDict(dict(zip(keys, children, strict=True)), batch_size=size)


def _unflatten_class(kind: Any, keys: tuple[Any, ...], children: Sequence[Any], aux: Any, batch: int | None) -> Any:
    return kind.from_tensordict(_unflatten(None, keys, children, aux, batch))


def _encode(value: TensorDictBase) -> dict[str, Any]:
    keys, children, size = _flatten(value, False)
    # Tensors of a checkpoint are on the CPU; a TensorDict that says where it is must say so.
    device = None if value.device is None else "cpu"
    names = list(value.names) if any(name is not None for name in value.names) else None
    return {"data": dict(zip(keys, children, strict=True)), "batch_size": size, "device": device, "names": names}


def _decode(plain: dict[str, Any]) -> TensorDict:
    return TensorDict(
        plain["data"], batch_size=plain["batch_size"], device=plain.get("device"), names=plain.get("names")
    )


def _encode_data(value: Any) -> dict[str, Any]:
    return {"data": value.data, "batch_size": tuple(value.batch_size)}


def _decode_data(plain: dict[str, Any]) -> Any:
    return NonTensorData(plain["data"], batch_size=plain["batch_size"])


def _encode_stack(value: Any) -> dict[str, Any]:
    return {"stack": list(value.tensordicts), "dim": value.stack_dim}


def _decode_stack(plain: dict[str, Any]) -> Any:
    stack: Any = NonTensorStack  # type checkers take it for an abstract class
    return stack(*plain["stack"], stack_dim=plain["dim"])


def register() -> None:
    """Make trees take TensorDicts apart and let them into checkpoints."""
    register_container(TensorDictBase, Container("tensordict", _flatten, _unflatten, keeps_type=False))
    register_family(Container("tensorclass", _flatten, _unflatten_class), is_tensorclass)
    add_codec(TensorDictBase, Codec("tensordict", _encode, _decode, subclasses=True, takes_apart=True))
    for kind in (NonTensorData, NonTensorStack):
        register_leaf(kind)
    # The one is no TensorDict, the other would lose what it holds as one.
    add_codec(NonTensorData, Codec("tensordict.NonTensorData", _encode_data, _decode_data, takes_apart=True))
    add_codec(NonTensorStack, Codec("tensordict.NonTensorStack", _encode_stack, _decode_stack, takes_apart=True))
