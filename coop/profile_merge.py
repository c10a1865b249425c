"""Profile merge: several profiles of one model as one, their counts added as pseudo-counts.

Owns nothing; promises whole numbers that still sum to tokens times top-k, and refuses profiles of different models
by the name of what differs. `python -m coop.profile merge` writes the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coop.errors import ProfileError
from coop.profile import MAX_SAMPLE_TOKENS, Profile, ProfileIdentity

MAX_FACTOR = (
    64  # of the profile that is multiplied least: whole factors hit any wanted share within 1 % by then
)
MAX_ERROR = 0.01
_COUNTS = ("hot_prompt", "hot_answer", "train_prompt", "train_answer")
_TOKENS = ("tokens_prompt", "tokens_answer", "train_tokens_prompt", "train_tokens_answer")
_MAX_INT32 = np.iinfo(np.int32).max


def merge(profiles: Sequence[Profile], shares: Sequence[float] | None = None) -> Profile:
    """One profile of all.

    Args:
        profiles: of one model: architecture, layers, experts, top-k, router weights and tokenizer agree.
        shares: how much of the merged tokens each makes up, in any unit; None: every token counts once.

    Timings are the fastest of those on the hardware and with the row counts of the first. Rows per expert are the
    largest of each. Raises ProfileError naming what differs, or for shares that cannot be had.
    """
    first = profiles[0]
    factors = [1] * len(profiles) if shares is None else _factors(profiles, shares)
    return Profile(
        identity=_common_identity(profiles),
        step=max(profile.step for profile in profiles),
        is_refreshed=all(profile.is_refreshed for profile in profiles),
        **{name: _sum(profiles, name, factors) for name in (*_COUNTS, *_TOKENS)},
        recent_answer=_sum(profiles, "recent_answer", factors).astype(np.float32),
        same_layer=_capped(profiles, "same_layer", factors),
        next_layer=_capped(profiles, "next_layer", factors),
        rows=np.max([profile.rows for profile in profiles], axis=0),
        sample=_sample(profiles, factors),
        row_counts=first.row_counts,
        fingerprint=first.fingerprint,
        **_timings(profiles),
        warmups=sum(profile.warmups for profile in profiles),
        warmup_seconds=sum(profile.warmup_seconds for profile in profiles),
        warmup_next=0,
        train_seconds=sum(profile.train_seconds for profile in profiles),
    )


def _common_identity(profiles: Sequence[Profile]) -> ProfileIdentity:
    """What all agree in, with every digest that any of them knows; no adapter's digest where adapters differ."""
    first = profiles[0]
    for index, profile in enumerate(profiles[1:], start=2):
        try:
            profile.check(replace(first.identity, adapter_digest=""))
        except ProfileError as exc:
            raise ProfileError(f"profile {index} cannot be merged with profile 1: {exc}") from exc
    known = {
        name: sorted({getattr(profile.identity, name) for profile in profiles} - {""})
        for name in ("router_digest", "adapter_digest", "tokenizer_digest")
    }
    for name in ("router_digest", "tokenizer_digest"):
        if len(known[name]) > 1:
            raise ProfileError(f"the {name.replace('_', ' ')}s of the profiles differ")
    has_one_adapter = len({profile.identity.adapter_digest for profile in profiles}) == 1
    known["adapter_digest"] = known["adapter_digest"] if has_one_adapter else []
    return replace(first.identity, **{name: (values or [""])[0] for name, values in known.items()})


def _factors(profiles: Sequence[Profile], shares: Sequence[float]) -> list[int]:
    """Whole numbers to multiply each profile's counts by, so that its tokens make up its share of all."""
    if len(shares) != len(profiles):
        raise ProfileError(f"{len(shares)} weights for {len(profiles)} profiles")
    if not all(np.isfinite(share) and share > 0 for share in shares):
        raise ProfileError("weights must be numbers above 0")
    kind = "tokens_answer" if all(profile.tokens_answer for profile in profiles) else "tokens_prompt"
    tokens = [getattr(profile, kind) for profile in profiles]
    if not all(tokens):
        raise ProfileError("weights need tokens of one kind, answer or prompt, in every profile")
    wanted = np.array(shares) / np.array(tokens)
    wanted /= wanted.min()
    if wanted.max() * MAX_FACTOR * max(tokens) > 2**39:
        raise ProfileError("the profiles' sizes and weights are too far apart to be merged")
    # as small as will do: evidence should not look like more than it is
    for smallest in range(1, MAX_FACTOR + 1):
        factors = np.round(wanted * smallest)
        if np.abs(factors / (wanted * smallest) - 1).max() <= MAX_ERROR:
            break
    return [int(factor) for factor in factors]


def _sum(profiles: Sequence[Profile], name: str, factors: Sequence[int]) -> Any:
    return sum(getattr(profile, name) * factor for profile, factor in zip(profiles, factors, strict=True))


def _capped(profiles: Sequence[Profile], name: str, factors: Sequence[int]) -> Any:
    wide = [getattr(profile, name).astype(np.int64) for profile in profiles]
    total = sum(counts * factor for counts, factor in zip(wide, factors, strict=True))
    return np.minimum(total, _MAX_INT32).astype(np.int32)


def _sample(profiles: Sequence[Profile], factors: Sequence[int]) -> Any:
    """The latest tokens of each sample, as many as its share of all tokens; each stays in order."""
    tokens = np.array(
        [
            factor * max(1, profile.tokens_answer or profile.tokens_prompt)
            for profile, factor in zip(profiles, factors, strict=True)
        ]
    )
    room = np.floor(MAX_SAMPLE_TOKENS * tokens / tokens.sum()).astype(int)
    parts = [
        profile.sample[max(0, len(profile.sample) - n) :] for profile, n in zip(profiles, room, strict=True)
    ]
    return np.concatenate(parts)


def _timings(profiles: Sequence[Profile]) -> dict[str, Any]:
    first = profiles[0]
    alike = [profile for profile in profiles if profile.fingerprint == first.fingerprint]
    timed = [profile for profile in alike if np.array_equal(profile.row_counts, first.row_counts)]
    return {
        "compute_ms": np.fmin.reduce([profile.compute_ms for profile in timed]),
        "load_ms": np.fmin.reduce([profile.load_ms for profile in alike]),
    }
