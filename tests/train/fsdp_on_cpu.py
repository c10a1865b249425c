"""The training command with FSDP2 on CPUs, for a test: accelerate 1.15 drops FSDP there, gloo and torch do not.

Owns one patch: several CPU processes are taken for accelerators, so that accelerate shards over them. Started by
tests/train/test_launch.py through `accelerate launch`.
"""

from __future__ import annotations

import sys
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType

_init = PartialState.__init__


def _init_as_accelerators(self: PartialState, cpu: bool = False, **kwargs: Any) -> None:
    _init(self, cpu, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


if __name__ == "__main__":
    PartialState.__init__ = _init_as_accelerators  # type: ignore[method-assign]
    from train.finetune import main

    sys.exit(main())
