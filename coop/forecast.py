"""Forecast: how likely each expert is to be used by the next token.

Owns the decayed frequencies and the transitions they are combined with; promises a likelihood for every
expert at any time, seeded from a profile as pseudo-counts and corrected by every token that is seen, and
moved by a priority policy where one was given. Called by the scheduler after routing; read by residency when
a victim is needed.

likelihood = (1 - w) * frequency + w * transition, both as expected uses by one token, so each row of either
sums to top-k. Design and measurements: shared wisdom is that frequency with a half-life of 16 to 32 tokens
wins over recency, and that order-1 transitions add to it; see docs/how-it-works.md.

A prompt of n tokens uses an expert with probability 1 - (1 - p)^n, nearly 1 for most. While a prompt runs,
the layers it has not reached stand at that, so that what it will need soon is kept and fetched; each layer
falls to what decoding will want as soon as it has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from coop.policy import PriorityPolicy, adjusted

if TYPE_CHECKING:
    from coop.profile import Profile
    from coop.store import LayerGeometry
    from coop.strategy import Strategy

SMOOTHING_COUNT = 0.5  # added to every expert of a profile: unseen is unlikely, not impossible


class Forecast:
    """Expected uses of each expert by one token.

    Args:
        layers, experts: the shape of the model.
        strategy: half-life, weight of the profile and of transitions.
    """

    def __init__(self, layers: int, experts: int, strategy: Strategy) -> None:
        self.likelihood = np.zeros((layers, experts))  # [layers, experts], shared with residency
        self._frequency = np.zeros((layers, experts))
        self._expected = np.zeros((layers, experts))  # before the policy
        self._policy: PriorityPolicy | None = None
        self._transitions: np.ndarray | None = None  # float32 [layers, from, to], expected uses
        self.set_strategy(strategy)

    @classmethod
    def of(cls, geometry: Sequence[LayerGeometry], strategy: Strategy) -> Forecast:
        """A forecast for a model's layers."""
        return cls(len(geometry), max(layer.num_experts for layer in geometry), strategy)

    def set_strategy(self, strategy: Strategy) -> None:
        """Use another half-life and other weights from the next token on."""
        self._decay = 0.5 ** (1.0 / strategy.half_life_tokens)
        self._prior_tokens = strategy.prior_tokens
        self._weight = strategy.transition_weight if self._transitions is not None else 0.0
        self._transition_weight = strategy.transition_weight

    def set_policy(self, policy: PriorityPolicy | None) -> None:
        """Let a signal from outside move the likelihoods, at once for every layer.

        CoopError for a bad answer; then, as for whatever the policy raises, the signal before stays in force.
        """
        expected = self._expected
        if policy is not None:
            expected = np.stack([adjusted(policy, layer, row) for layer, row in enumerate(expected)])
        self._policy = policy
        self.likelihood[:] = expected

    def seed(self, profile: Profile) -> None:
        """Start from what training saw: answer tokens, because those are what decoding repeats.

        A profile without answer tokens seeds from its prompt tokens. The weight of the prior is
        `prior_tokens` tokens of evidence, bounded by what the half-life can hold.
        """
        counts = profile.hot_answer if profile.tokens_answer else profile.hot_prompt
        smoothed = counts + SMOOTHING_COUNT
        top_k = profile.identity.top_k
        uses = smoothed / smoothed.sum(1, keepdims=True) * top_k
        held_tokens = (1.0 - self._decay**self._prior_tokens) / (1.0 - self._decay)
        self._frequency[:] = uses * held_tokens
        if profile.same_layer.size:
            seen = profile.same_layer + SMOOTHING_COUNT * uses[:, None, :] / top_k
            self._transitions = (seen / seen.sum(2, keepdims=True) * top_k).astype(np.float32)
            self._weight = self._transition_weight
        # before the first token there is no expert to come from: the frequency is all there is
        for layer, row in enumerate(self._frequency):
            self._publish(layer, row * (1.0 - self._decay))

    def begin_prompt(self, tokens: int, top_k: Sequence[int]) -> None:
        """A prompt of `tokens` enters the first layer: every expert is likely to be needed until its layer has run.

        An expert without evidence counts as used by `top_k` / experts of the tokens.
        """
        uniform = np.array(top_k)[:, None] / self.likelihood.shape[1]
        once = np.clip(np.where(self._expected > 0, self._expected, uniform), 0.0, 1.0)
        np.maximum(self.likelihood, 1.0 - (1.0 - once) ** tokens, out=self.likelihood)

    def observe(self, layer: int, expert_ids: np.ndarray) -> None:
        """Learn from one call's routing, int64 [tokens, top_k] in order: each token decays what came before it."""
        tokens = expert_ids.shape[0]
        row = self._frequency[layer]
        if tokens == 1:
            row *= self._decay
            row[expert_ids[0]] += 1.0
        else:
            age = self._decay ** np.arange(tokens - 1, -1, -1)
            row *= self._decay**tokens
            row += np.bincount(
                expert_ids.ravel(), weights=np.repeat(age, expert_ids.shape[1]), minlength=row.size
            )
        expected = row * (1.0 - self._decay)
        if self._weight:
            assert self._transitions is not None
            reuse = self._transitions[layer, expert_ids[-1]].mean(0)
            expected = (1.0 - self._weight) * expected + self._weight * reuse
        self._publish(layer, expected)

    def upcoming(self, layer: int) -> Sequence[tuple[int, np.ndarray]]:
        """What is known to be called after a layer: (layer, bool [experts] it will use), in order; here nothing is."""
        return ()

    def rank(self, layer: int) -> np.ndarray:
        """Experts of a layer, likeliest first."""
        return np.argsort(-self.likelihood[layer], kind="stable")

    def _publish(self, layer: int, expected: np.ndarray) -> None:
        self._expected[layer] = expected
        self.likelihood[layer] = expected if self._policy is None else adjusted(self._policy, layer, expected)

    def hottest(self) -> list[tuple[int, int]]:
        """(layer, expert) of every expert with any expectation, likeliest first."""
        flat = np.argsort(-self.likelihood, axis=None, kind="stable")
        count = int((self.likelihood > 0).sum())
        return [divmod(int(i), self.likelihood.shape[1]) for i in flat[:count]]
