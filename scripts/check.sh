#!/usr/bin/env bash
# Everything that must be true of the code: format, lint, types, tests. Options go to pytest.
#
#   bash scripts/check.sh              without the tests that take longer than a minute
#   bash scripts/check.sh -m slow      only those
#   bash scripts/check.sh -k profile   some
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

coop_phase format ruff format --check .
coop_phase lint ruff check .
coop_phase types mypy
coop_phase tests python -m pytest -m "not slow" "$@"

printf '%s\n' "all good:" "${coop_times[@]}" >&2
