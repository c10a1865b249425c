"""Profile drift: whether a profile is still right for some traffic, judged by what it would cost.

Owns the verdict and its limits; promises that chance is not taken for drift, and that the verdict names the numbers
behind it. `python -m coop.profile drift` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coop.divergence import chance, clumping, jensen_shannon, use_counts
from coop.errors import ProfileError
from coop.profile import MAX_DENSE_EXPERTS, MAX_SAMPLE_TOKENS, Profile
from coop.profile_compare import counts_of_one_kind, overlap
from coop.rehearsal import SHARES, first_tokens_hit_rate
from coop.routes import Routes

MIN_TOKENS = 256  # fewer tell nothing: a text or two
MAX_LOSS = 0.02  # of the hit rate, that a seed may cost and still be right
RIGHT, SHIFTED, DRIFTED, UNKNOWN = "right", "shifted", "drifted", "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What a profile is held against.

    kind: of the profile's tokens that are compared, answer or prompt.
    counts: int64 [layers, experts] of all its tokens, so many.
    seed: a profile made of it; sample: uint16 [tokens, layers, top_k] to replay.
    """

    kind: str
    tokens: int
    counts: NDArray[np.int64]
    seed: Profile
    sample: NDArray[np.uint16]


def traffic_of_profile(profile: Profile, other: Profile) -> Traffic:
    """Another profile as the traffic. Raises ProfileError if both saw nothing of one kind."""
    kind, _, counts = counts_of_one_kind(profile, other)
    tokens = getattr(other, f"tokens_{kind}")
    return Traffic(kind=kind, tokens=tokens, counts=counts, seed=other, sample=other.sample)


def traffic_of_routes(profile: Profile, routes: Routes) -> Traffic:
    """Recorded routes as the traffic: its first half makes the seed, its second is replayed. Raises ProfileError."""
    identity = profile.identity
    mine = (profile.num_layers, identity.num_experts, identity.top_k)
    other = (routes.ids.shape[1], routes.num_experts, routes.ids.shape[2])
    if mine != other:
        raise ProfileError(
            f"layers x experts x top-k are {list(mine)} in the profile, {list(other)} in the routes: another model's"
        )
    if not routes.is_distinct:
        raise ProfileError("the routes name an expert twice for one token, which no router does")
    kind = "answer" if profile.tokens_answer else "prompt"
    half = len(routes.ids) // 2
    first, second = routes.ids[:half], routes.ids[half:]
    counts = use_counts(first, identity.num_experts)
    seed = replace(
        profile,
        hot_answer=counts,
        tokens_answer=half,
        same_layer=_follows(first, profile),
    )
    return Traffic(
        kind=kind,
        tokens=len(routes.ids),
        counts=use_counts(routes.ids, identity.num_experts),
        seed=seed,
        sample=second[:MAX_SAMPLE_TOKENS].astype(np.uint16),
    )


def _follows(ids: NDArray[np.int64], profile: Profile) -> NDArray[np.int32]:
    """From an expert of one token to one of the next, int32 [layers, experts, experts]."""
    table = np.zeros_like(profile.same_layer)
    if profile.identity.num_experts <= MAX_DENSE_EXPERTS:
        for layer in range(profile.num_layers):
            np.add.at(table[layer], (ids[:-1, layer, :, None], ids[1:, layer, None, :]), 1)
    return table


def judge(profile: Profile, traffic: Traffic) -> dict[str, Any]:
    """The facts and the verdict as JSON values."""
    counts = getattr(profile, f"hot_{traffic.kind}")
    longer = max((traffic.sample, profile.sample), key=len)
    clumps = clumping(longer, profile.identity.num_experts)
    divergence = jensen_shannon(counts, traffic.counts)
    expected, limit = chance(counts, traffic.counts, 1.0 if np.isnan(clumps) else clumps)
    top = -(-counts.shape[1] // 4)
    facts: dict[str, Any] = {
        "tokens": traffic.kind,
        "tokens_profile": getattr(profile, f"tokens_{traffic.kind}"),
        "tokens_traffic": traffic.tokens,
        "clumping": None if np.isnan(clumps) else clumps,
        "divergence_bits": float(divergence.mean()),
        "by_chance_bits": float(expected.mean()),
        "by_chance_bits_p95": float(limit.mean()),
        "top_overlap": float(
            np.mean([overlap(a, b, top) for a, b in zip(counts, traffic.counts, strict=True)])
        ),
        "top": top,
        "layers": [
            {"layer": i, "divergence_bits": float(d), "by_chance_bits_p95": float(c)}
            for i, (d, c) in enumerate(zip(divergence, limit, strict=True))
        ],
        "hit_rates": _rates(profile, traffic) if len(traffic.sample) else {},
    }
    facts["loss"] = max(
        (rates["traffic"] - rates["profile"] for rates in facts["hit_rates"].values()), default=None
    )
    facts["verdict"], facts["reason"] = _verdict(facts)
    return facts


def _rates(profile: Profile, traffic: Traffic) -> dict[str, dict[str, float]]:
    """Of the first tokens of answers, seeded from the profile, from the traffic itself, and cold."""
    num_experts = profile.identity.num_experts
    seeds = (("profile", profile), ("traffic", traffic.seed), ("cold", None))
    return {
        f"at_{round(100 * share)}": {
            name: first_tokens_hit_rate(traffic.sample, num_experts, share, seed) for name, seed in seeds
        }
        for share in SHARES
    }


def _verdict(facts: dict[str, Any]) -> tuple[str, str]:
    apart = (
        f"{facts['divergence_bits']:.4f} bits apart, where chance alone gives {facts['by_chance_bits']:.4f} and, "
        f"one time in twenty, {facts['by_chance_bits_p95']:.4f}"
    )
    fewest = min(facts["tokens_profile"], facts["tokens_traffic"])
    if fewest < MIN_TOKENS:
        return UNKNOWN, f"cannot tell: {fewest} tokens are too few, {MIN_TOKENS} are needed"
    if facts["divergence_bits"] <= facts["by_chance_bits_p95"]:
        return RIGHT, f"the profile is right for this traffic: {apart}"
    if facts["loss"] is None:
        return UNKNOWN, f"the use has changed ({apart}), and no routing sample says what that costs"
    cost = f"{100 * max(0.0, facts['loss']):.1f} points of hit rate in the first tokens of an answer"
    if facts["loss"] <= MAX_LOSS:
        return SHIFTED, f"the use has shifted ({apart}), but the profile still serves: it costs {cost}"
    return DRIFTED, f"the profile is not right for this traffic any more: {apart}; it costs {cost}"


def render_drift(facts: dict[str, Any]) -> str:
    """The facts as text, the verdict last."""
    unknown = "unknown, taken as 1: the routing sample is too short"
    clumps = unknown if facts["clumping"] is None else f"{facts['clumping']:.1f}"
    worst = max(facts["layers"], key=lambda layer: layer["divergence_bits"] - layer["by_chance_bits_p95"])
    beyond = sum(layer["divergence_bits"] > layer["by_chance_bits_p95"] for layer in facts["layers"])
    lines = [
        f"{facts['tokens']} tokens: {facts['tokens_profile']:,} in the profile, {facts['tokens_traffic']:,} of traffic",
        f"tokens that tell as much as one independent token: {clumps}",
        f"layers that differ by more than chance: {beyond} of {len(facts['layers'])}, most in layer {worst['layer']} "
        f"({worst['divergence_bits']:.4f} bits)",
        f"of the {facts['top']} hottest experts of a layer, {100 * facts['top_overlap']:.0f}% are the same",
    ]
    for name, rates in facts["hit_rates"].items():
        lines.append(
            f"hit rate of first tokens with {name.removeprefix('at_')}% of the experts in memory: seeded from the "
            f"profile {100 * rates['profile']:.1f}%, from the traffic itself {100 * rates['traffic']:.1f}%, "
            f"cold {100 * rates['cold']:.1f}%"
        )
    return "\n".join([*lines, f"verdict: {facts['reason']}"])
