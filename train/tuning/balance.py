"""Balance: the load-balancing loss that is in force.

Owns the decision from recipe and model; promises that a coefficient which no code would apply is refused and that
a stray key of a checkpoint's config never turns a loss on. `train.run` shows it, `train.trainer` applies it.

The loss is that of the model's own code, equations 4-6 of the Switch Transformer (arXiv 2101.03961), pooled over
layers: experts * sum over e of (share of assignments to e) * (mean router probability of e).
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from coop.adapters.transformers import find_experts
from coop.errors import RecipeError
from train.schema import Recipe


def has_aux_loss(model: nn.Module) -> bool:
    """Whether the code of the model's family computes a load-balancing loss."""
    base = _base(model)
    config = base.config.get_text_config()
    module = sys.modules[type(base).__module__]
    return hasattr(module, "load_balancing_loss_func") and hasattr(config, "router_aux_loss_coef")


def aux_loss_coefficient(model: nn.Module, recipe: Recipe) -> float:
    """The weight of the load-balancing loss, 0 for none. Raises RecipeError for one that cannot be applied."""
    asked = recipe.moe.aux_loss_coef
    if not has_aux_loss(model):
        if asked:
            raise RecipeError(
                f"moe.aux_loss_coef: the code of {type(_base(model)).__name__} has no load-balancing loss; "
                "set it to 0 or null"
            )
        return 0.0
    return float(_base(model).config.get_text_config().router_aux_loss_coef if asked is None else asked)


def apply_aux_loss(model: nn.Module, recipe: Recipe) -> float:
    """The coefficient for TRL, with what TRL's loss reads from the model's config put there."""
    coefficient = aux_loss_coefficient(model, recipe)
    config = _base(model).config.get_text_config()
    if coefficient and not hasattr(config, "num_experts"):
        # TRL 1.16 reads this name, which GraniteMoeConfig and PhimoeConfig lack
        config.num_experts = find_experts(model)[0].num_experts
    return coefficient


def describe_aux_loss(model: nn.Module, recipe: Recipe) -> str:
    """One line: the coefficient in force, where it comes from, and what its gradient reaches."""
    coefficient = aux_loss_coefficient(model, recipe)
    if not coefficient:
        reason = "moe.aux_loss_coef" if has_aux_loss(model) else "the model's code has none"
        return f"load-balancing loss: off ({reason})"
    source = "the model's config" if recipe.moe.aux_loss_coef is None else "moe.aux_loss_coef"
    reach = (
        "it moves the router and what lies before it"
        if "router" in recipe.tune.groups
        else "the router is frozen: it moves only trained weights before a router"
    )
    return f"load-balancing loss: coefficient {coefficient:g} ({source}); {reach}"


def _base(model: nn.Module) -> Any:
    wrapped: Any = model
    return wrapped.get_base_model() if hasattr(model, "get_base_model") else model
