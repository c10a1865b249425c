#!/usr/bin/env bash
# The tests that need a GPU, and a table of what its copies reach. Exits with 3 where there is no GPU.
#
#   bash scripts/device_check.sh
#
# Takes less than five minutes once the environment is there.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

if ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no GPU: torch finds no CUDA device here, so nothing was checked" >&2
    exit 3
fi
coop_phase tests python -m pytest -m gpu tests "$@"
coop_phase copies python scripts/measure_copies.py

printf '%s\n' "all good:" "${coop_times[@]}" >&2
