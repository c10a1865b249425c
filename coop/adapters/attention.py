"""Attention of a decode step in two kernel calls, and the decoder layer around it, where they are the usual kind.

Owns the classes that stand in front of a model's own attention and decoder layers, weights and cache shared; promises
that they are used only where they compute what the model's own do (tried on numbers, once for each kind), and only
for one new token of each sequence without a mask; all else is the model's own. Called through `coop.adapters.dense`.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks as _hooks_of_all_modules
from torch.nn.modules.module import _global_forward_pre_hooks as _pre_hooks_of_all_modules

from coop import kernels
from coop.adapters.linear import QuickLinear, RoundedLinear, dtype_of, epsilon_of
from coop.errors import CoopError

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
EXPERTS = ("mlp", "block_sparse_moe")
_IMPLEMENTATIONS = ("sdpa", "eager")
_TRIAL_TOKENS = 5
_ROUNDINGS = 16  # of the type, at the scale of the output: the two sum in different orders


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of one attention module. `epsilon` is of its heads' norms, 0.0 without; those may be of all at once."""

    width: int
    scale: float
    is_normed_whole: bool
    epsilon: float


class QuickAttention(nn.Module):
    """In front of a model's own attention class, whose forward it calls for all but a plain decode step."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """[sequences, tokens, width] -> (the same, None for attention weights, which nobody computes)."""
        if args or not _is_plain_step(self, hidden_states, kwargs):
            return self.__dict__["_coop_plain"].forward(self, hidden_states, *args, **kwargs)
        hidden, _ = _attend(self, hidden_states, kwargs)
        return hidden.view(hidden_states.shape), None


class QuickLayer(nn.Module):
    """In front of a decoder layer: norm, attention, sum, norm, experts, sum."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """[sequences, tokens, width] -> the same."""
        inner = self._modules["self_attn"]
        if args or _is_layer_watched(self) or not _is_plain_step(inner, hidden_states, kwargs):
            return self.__dict__["_coop_plain"].forward(self, hidden_states, *args, **kwargs)
        hidden, normed = _attend(inner, hidden_states, kwargs, self)
        experts: Any = self._modules[self.__dict__["_coop_experts"]]
        return hidden.view(hidden_states.shape) + experts(normed.view(hidden_states.shape))


def replace_attention(model: nn.Module) -> int:
    """Put these classes in front of every module that they can stand for; returns how many."""
    tried: dict[tuple[Any, ...], bool] = {}
    replaced = 0
    for module in list(model.modules()):
        heads = _heads_of(module)
        if heads is not None:
            module.__dict__["_coop_heads"] = heads
            names = (*PROJECTIONS, *(name for name in ("q_norm", "k_norm") if name in module._modules))
            module.__dict__["_coop_parts"] = {name: type(module._modules[name]) for name in names}
            if any(_is_watched(module._modules[name]) for name in names):
                continue
            kind = (type(module), heads, *(part.out_features for part in _parts(module, PROJECTIONS)))
            replaced += _replace(module, QuickAttention, kind, tried)
    for module in list(model.modules()):
        name = _experts_of_layer(module)
        if name:
            module.__dict__["_coop_experts"] = name
            inner = module._modules["self_attn"].__dict__
            kind = (type(module), inner["_coop_plain"], inner["_coop_heads"])
            replaced += _replace(module, QuickLayer, kind, tried)
    return replaced


def _replace(
    module: nn.Module, quick: type[nn.Module], kind: tuple[Any, ...], tried: dict[tuple[Any, ...], bool]
) -> bool:
    plain = type(module)
    module.__dict__["_coop_plain"] = plain
    module.__class__ = type(plain.__name__, (quick, plain), {"__module__": plain.__module__})
    if kind not in tried:
        tried[kind] = _is_same(module, plain)
    if not tried[kind]:
        module.__class__ = plain
    return tried[kind]


def _parts(module: nn.Module, names: tuple[str, ...]) -> list[Any]:
    return [module._modules.get(name) for name in names]


def _heads_of(module: Any) -> Heads | None:
    """The shape of an attention module; None for any other module, and for kinds that are known to differ."""
    parts = _parts(module, PROJECTIONS)
    if not all(type(part) in (QuickLinear, RoundedLinear) for part in parts) or not hasattr(module, "config"):
        return None
    query, key, value, output = parts
    width, scale = getattr(module, "head_dim", None), getattr(module, "scaling", None)
    if not isinstance(width, int) or not isinstance(scale, float) or dtype_of(query) not in kernels.TYPES:
        return None
    has_whole_heads = not any(part.out_features % width for part in (query, key)) and not width % 16
    fits = has_whole_heads and query.out_features % key.out_features == 0 and width <= kernels.MOST_HEAD_WIDTH
    same = value.out_features == key.out_features and output.in_features == query.out_features
    if not fits or not same or getattr(module, "sliding_window", None):
        return None
    norm = module._modules.get("q_norm")
    if norm is None:
        return Heads(width, scale, False, 0.0)
    norm_width, epsilon = norm.weight.shape[0], epsilon_of(norm)
    is_known = epsilon > 0 and "_coop_plain" in norm.__dict__ and norm_width in (width, query.out_features)
    return Heads(width, scale, norm_width != width, epsilon) if is_known else None


def _experts_of_layer(module: Any) -> str:
    """The name of what follows attention in a decoder layer that can be replaced; "" for any other module."""
    norms = _parts(module, NORMS)
    inner = module._modules.get("self_attn")
    if not isinstance(inner, QuickAttention) or not all(
        n is not None and "_coop_plain" in n.__dict__ for n in norms
    ):
        return ""
    return next((name for name in EXPERTS if name in module._modules), "")


def _is_plain_step(attention: Any, hidden: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    sequences, tokens, _ = hidden.shape
    angles = kwargs.get("position_embeddings")
    return bool(
        tokens == 1
        and sequences <= kernels.MOST_ROWS
        and angles is not None
        and _cache_of(kwargs) is not None
        and kwargs.get("attention_mask") is None
        and not kwargs.get("output_attentions")
        and not attention.training
        and not _is_touched(attention)
        and getattr(attention.config, "_attn_implementation", "") in _IMPLEMENTATIONS
        and not torch.is_grad_enabled()
        and kernels.takes(hidden)
        and hidden.dtype == dtype_of(attention.q_proj) == angles[0].dtype
        and angles[0].shape[-1] == attention.__dict__["_coop_heads"].width
        and angles[0].is_contiguous()
        and angles[1].is_contiguous()
    )


def _is_touched(attention: nn.Module) -> bool:
    """Whether a part that the kernels pass by is another class than it was, is patched, or has somebody listening."""
    own = attention.__dict__["_coop_parts"]
    parts = attention._modules
    return bool(
        _hooks_of_all_modules
        or _pre_hooks_of_all_modules
        or any(type(parts.get(name)) is not kind or _is_watched(parts[name]) for name, kind in own.items())
    )


def _is_watched(module: Any) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _is_layer_watched(layer: nn.Module) -> bool:
    """Whether somebody listens to a module of a decoder layer that would be passed by."""
    return any(_is_watched(layer._modules[name]) for name in ("self_attn", *NORMS))


def _attend(
    attention: Any, hidden: torch.Tensor, kwargs: dict[str, Any], layer: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of attention, [sequences, width]; of a whole layer's first half, with the sum and the norm behind it."""
    library = kernels.loaded()
    block = _block_of(attention, layer, hidden.dtype)
    rows = hidden.view(hidden.shape[0], -1)
    cosine, sine = (angle.view(-1, block.head_width) for angle in kwargs["position_embeddings"])
    query, key, value = library.attention_begin(block, rows, cosine, sine)
    keys, values = _cache_of(kwargs).update(key, value, attention.layer_idx)
    if not keys.dtype == values.dtype == query.dtype or not kernels.takes(keys):
        raise CoopError(f"the cache holds {keys.dtype} on {keys.device}, the model computes in {query.dtype}")
    return library.attention_end(block, query, keys, values, rows if layer is not None else None)


def _block_of(attention: Any, layer: Any, dtype: torch.dtype) -> kernels.AttentionBlock:
    """What stays between calls; made anew when a weight has moved."""
    heads: Heads = attention.__dict__["_coop_heads"]
    linear = _parts(attention, PROJECTIONS)
    norms = _parts(attention, ("q_norm", "k_norm")) + (_parts(layer, NORMS) if layer is not None else [])
    owner = layer if layer is not None else attention
    stored = [part.stored for part in linear]
    stored += [norm._parameters["weight"] for norm in norms if norm is not None]
    stored += [part.bias for part in linear if part.bias is not None]
    epsilons = [epsilon_of(norm) for norm in norms if norm is not None]
    places = [*(tensor.data_ptr() for tensor in stored), *epsilons]
    found: tuple[list[float], kernels.AttentionBlock] | None = owner.__dict__.get("_coop_block")
    if found is not None and found[0] == places:
        return found[1]
    block = kernels.AttentionBlock()
    for name, part in zip(("query", "key", "value", "output"), linear, strict=True):
        job = part.job(dtype)
        assert job is not None
        job.columns = part.in_features
        setattr(block, name, job)
    addresses = [norm.weight.data_ptr() if norm is not None else None for norm in norms]
    block.query_norm, block.key_norm = addresses[:2]
    if layer is not None:
        block.norm, block.next_norm = addresses[2:]
        block.epsilon, block.next_epsilon = (epsilon_of(norm) for norm in norms[2:])
    block.head_width, block.scale = heads.width, heads.scale
    block.head_epsilon = epsilons[0] if norms[0] is not None else 0.0
    block.type, block.is_normed_whole = kernels.type_of(dtype), heads.is_normed_whole
    owner.__dict__["_coop_block"] = (places, block)
    return block


def _cache_of(kwargs: dict[str, Any]) -> Any:
    """The cache, whose name changes in transformers 5.40."""
    return kwargs.get("cache") if kwargs.get("cache") is not None else kwargs.get("past_key_values")


@torch.no_grad()
def _is_same(module: Any, plain: type[nn.Module]) -> bool:
    """Whether one decode step gives what the model's own class gives, on some numbers."""
    from transformers import DynamicCache

    is_layer = isinstance(module, QuickLayer)
    attention = module.self_attn if is_layer else module
    dtype, width = dtype_of(attention.q_proj), attention.q_proj.in_features
    source = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _TRIAL_TOKENS + 1, width, generator=source).to(dtype)
    turns = torch.randn(1, _TRIAL_TOKENS + 1, attention.head_dim // 2, generator=source).repeat(1, 1, 2)
    cosine, sine = turns.cos().to(dtype), turns.sin().to(dtype)
    cache, name = DynamicCache(), _cache_name(plain)
    experts = module._modules[module.__dict__["_coop_experts"]] if is_layer else None
    was_training = module.training

    def step(forward: Any, tokens: slice, cache: Any) -> Any:
        angles = (cosine[:, tokens].contiguous(), sine[:, tokens].contiguous())
        given = {"position_embeddings": angles, "attention_mask": None, name: cache}
        result = forward(module, hidden[:, tokens], **given)
        return result if is_layer else result[0]

    try:
        module.eval()
        if is_layer:
            module._modules[module.__dict__["_coop_experts"]] = nn.Softsign()  # no expert is read for a trial
        before, last = slice(0, _TRIAL_TOKENS), slice(_TRIAL_TOKENS, None)
        step(plain.forward, before, cache)
        expected = step(plain.forward, last, copy.deepcopy(cache))
        got = step(type(module).forward, last, cache)
        error = (got - expected).abs().max() / expected.abs().max()
        return bool(got.shape == expected.shape and error <= _ROUNDINGS * torch.finfo(dtype).eps)
    except Exception:  # whatever a class of its own kind makes of this: it stays as it is
        return False
    finally:
        module.train(was_training)
        if is_layer:
            module._modules[module.__dict__["_coop_experts"]] = experts


def _cache_name(plain: type[nn.Module]) -> str:
    parameters = inspect.signature(inspect.unwrap(plain.forward)).parameters
    return "cache" if "cache" in parameters else "past_key_values"
