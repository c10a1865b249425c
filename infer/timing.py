"""Clock and memory readings of one generation, whatever engine runs it.

Owns nothing; promises NaN where there is no number, and needs no torch, so that an engine without it is not
charged for it. Called by `infer.engine` and `infer.arms`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Wall-clock of one generation: to the first token, then between tokens. NaN where there was none."""

    ttft_ms: float
    tokens_per_s: float
    token_ms_p50: float
    token_ms_p99: float

    @classmethod
    def of(cls, started_s: float, token_times_s: Sequence[float]) -> Timing:
        """`token_times_s` on the clock of `started_s`. Tokens per second count the tokens after the first."""
        if not token_times_s:
            return cls(ttft_ms=math.nan, tokens_per_s=math.nan, token_ms_p50=math.nan, token_ms_p99=math.nan)
        ttft_ms = (token_times_s[0] - started_s) * 1e3
        gaps_ms = np.diff(np.asarray(token_times_s)) * 1e3  # [new_tokens - 1]
        if gaps_ms.size == 0 or gaps_ms.sum() <= 0:
            return cls(ttft_ms=ttft_ms, tokens_per_s=math.nan, token_ms_p50=math.nan, token_ms_p99=math.nan)
        p50, p99 = np.percentile(gaps_ms, [50, 99])
        return cls(
            ttft_ms=ttft_ms,
            tokens_per_s=float(gaps_ms.size / gaps_ms.sum() * 1e3),
            token_ms_p50=float(p50),
            token_ms_p99=float(p99),
        )


def rss_bytes() -> int:
    """The memory that this process has resident now, mapped files included; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
    except (OSError, StopIteration):
        return 0


def peak_rss_bytes() -> int:
    """The most memory this process has had resident, in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
