"""Lender: puts an expert's weights into its own module while it is called, and takes them out again.

Owns the hooks on every served expert and router of one model; promises that a weight is in the module exactly
while coop holds it resident, whether the call returns, raises or is interrupted, that nothing of it is copied,
and that an expert which would change or keep its weights is refused. Made by `attach_modulelist`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import nn

from coop.adapters.absent import AbsentWeight, tensors_in
from coop.errors import CoopError
from coop.ids import ExpertId
from coop.scheduler import Scheduler

Routes = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module keeps one tensor: the module's table of parameters or of buffers, and the name in it."""

    table: dict[str, Any]
    name: str


@dataclass(frozen=True, slots=True)
class ModuleExpert:
    """One expert that is a module: `places` by the name of the tensor within the expert, in slot order."""

    id: ExpertId
    name: str
    module: nn.Module
    places: Mapping[str, Place]
    absent: Mapping[str, AbsentWeight]

    def install(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Put these tensors where the module looks for its own."""
        for name, place in self.places.items():
            place.table[place.name] = weights[name]

    def has(self, weights: Mapping[str, torch.Tensor]) -> bool:
        """Whether the module still has exactly these tensors."""
        return all(place.table[place.name] is weights[name] for name, place in self.places.items())


@dataclass(frozen=True, slots=True)
class _Loan:
    """Weights that are out: `end` gives the lease back, `version` counts writes to them."""

    expert: ModuleExpert
    weights: Mapping[str, torch.Tensor]
    end: ExitStack
    version: int

    @property
    def is_changed(self) -> bool:
        """Whether the expert wrote to its weights or put others in their place."""
        return not self.expert.has(self.weights) or _version(self.weights) != self.version


class Lender:
    """The hooks of one attached model.

    Args:
        experts: every served expert; they give up their weights here.
        scheduler: who holds the weights.
    """

    def __init__(self, experts: Sequence[ModuleExpert], scheduler: Scheduler) -> None:
        self._experts, self._scheduler = experts, scheduler
        self._loans: list[_Loan] = []  # one, or none: experts of a model run one at a time
        self._handles = []
        self._owner = get_ident()
        for expert in experts:
            expert.install(expert.absent)
            hooks = (partial(self._borrow, expert), partial(self._give_back, expert))
            self._handles.append(expert.module.register_forward_pre_hook(hooks[0], prepend=True))
            self._handles.append(expert.module.register_forward_hook(hooks[1], always_call=True))

    def listen(self, layer: int, router: nn.Module, block: nn.Module, routes: Routes) -> None:
        """Ask for what `router` chooses before it is called, and give back what was not when `block` returns."""
        announce, end = partial(self._announce, layer, routes), partial(self._end_announcement)
        self._handles.append(router.register_forward_hook(announce))
        self._handles.append(block.register_forward_hook(end, always_call=True))

    def settle(self) -> None:
        """Take back what an interrupted call left in a module (an interrupt skips even `always_call` hooks)."""
        here = get_ident()
        if self._loans and self._owner != here:
            raise CoopError("this model is running in another thread: one at a time")
        self._owner = here
        while self._loans:
            self._return(self._loans.pop())

    def close(self) -> None:
        """Remove the hooks; from now on the experts say that their runtime was closed."""
        self.settle()
        self._scheduler.end_announcement()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for expert in self._experts:
            for marker in expert.absent.values():
                marker.coop_is_closed = True

    # hooks

    def _borrow(self, expert: ModuleExpert, module: nn.Module, args: Any) -> None:
        self.settle()
        if any(part.training for part in module.modules()):
            raise CoopError(
                f"{expert.name} is in training mode: coop serves inference only, call model.eval()"
            )
        with ExitStack() as stack:
            lent = stack.enter_context(self._scheduler.lend(expert.id))
            weights = {name: lent[name].view(expert.absent[name].shape) for name in expert.places}
            expert.install(weights)
            self._loans.append(_Loan(expert, weights, stack.pop_all(), _version(weights)))

    def _give_back(self, expert: ModuleExpert, module: nn.Module, args: Any, result: Any) -> None:
        if not self._loans or self._loans[-1].expert is not expert:
            return  # it never got its weights
        loan = self._loans.pop()
        is_changed = loan.is_changed
        self._return(loan)
        if is_changed:
            raise CoopError(
                f"{expert.name} changes its own weights or buffers while it runs: coop serves what stays as it is"
            )
        slot = {_address(weight) for weight in loan.weights.values()}
        for tensor in tensors_in(result):
            if tensor.requires_grad:
                raise CoopError(
                    f"{expert.name} gives a result that needs gradients: coop serves inference only, call the "
                    "model under torch.inference_mode() or torch.no_grad()"
                )
            if tensor.layout is torch.strided and _address(tensor) in slot:
                raise CoopError(
                    f"{expert.name} returns a view of its own weights, which go after the call: return a .clone()"
                )

    def _return(self, loan: _Loan) -> None:
        is_changed = loan.is_changed
        loan.expert.install(loan.expert.absent)
        loan.end.close()
        if is_changed:
            self._scheduler.residency.evict(loan.expert.id)  # the next call reads it from the file again

    def _announce(self, layer: int, routes: Routes, router: nn.Module, args: Any, output: Any) -> None:
        self.settle()
        ids = routes(output)
        chosen = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
        if chosen.ndim != 2 or chosen.dtype.kind not in "iu":
            raise CoopError(
                f"layer {layer}: routes answered {chosen.dtype} {chosen.shape}, not whole numbers [tokens, k]"
            )
        self._scheduler.is_prefill = chosen.shape[0] > 1
        self._scheduler.announce(layer, chosen.astype(np.int64))

    def _end_announcement(self, block: nn.Module, args: Any, output: Any) -> None:
        self._scheduler.end_announcement()


def _version(weights: Mapping[str, torch.Tensor]) -> int:
    return sum(weight._version for weight in weights.values())


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
