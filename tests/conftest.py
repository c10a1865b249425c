"""Fixtures for all tests: no network, no progress bars, nothing written in the home."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

# one folder for the whole run, so that only the first attach measures the machine
_caches = tempfile.TemporaryDirectory(prefix="coop-caches-")
os.environ["XDG_CACHE_HOME"] = _caches.name
