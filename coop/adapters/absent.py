"""AbsentWeight: what stands in a module where coop serves a weight that is not there now.

Owns the name of the weight and whether its runtime still runs; promises that shape, dtype and device can be
asked, and that everything else raises a CoopError with that name: nothing is ever computed with it. Put in
place by the nn.ModuleList adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from coop.errors import ClosedError, CoopError

_MAY_BE_ASKED = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "layout", "ndim", "requires_grad", "is_leaf", "grad", "is_meta")
} | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.element_size}

_DEVICE = torch.Tensor.device.__get__


class AbsentWeight(torch.Tensor):
    """A tensor of the right shape and dtype, on the meta device and so without bytes, that refuses to be used.

    It says that it is on the CPU, where it will be when it is lent: code that asks the first parameter of a model
    where inputs belong must not send them nowhere.
    """

    coop_name: str
    coop_is_closed: bool

    @classmethod
    def of(cls, name: str, like: torch.Tensor) -> AbsentWeight:
        """The marker for the weight `name`, with the shape and dtype of `like`."""
        shape, dtype = tuple(like.shape), like.dtype
        marker = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        marker.coop_name, marker.coop_is_closed = name, False
        return marker

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _MAY_BE_ASKED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func == _DEVICE:
            return torch.device("cpu")
        marker = next(t for t in tensors_in((args, kwargs)) if isinstance(t, AbsentWeight))
        if marker.coop_is_closed:
            raise ClosedError(
                f"{marker.coop_name} is gone: the runtime that served it was closed, and the model kept none of its "
                "experts; attach it again, or load it anew"
            )
        raise CoopError(
            f"{marker.coop_name} is not in the model: coop lends it to its expert while that is called as a module, "
            "and nothing else can use, copy, save, move or cast it; close the runtime and load the model for that"
        )

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"AbsentWeight({self.coop_name!r}, {tuple(self.shape)}, {self.dtype})"


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
