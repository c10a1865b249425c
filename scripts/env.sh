# Sourced by the other scripts: a virtual environment in .venv with coop and its tools, made once.
#
# Uses $PYTHON (default python3) to make it; sets PATH so that `python` is the environment's. Installs again
# only when pyproject.toml, the constraints, the kernels' sources or the Python change. pip's own settings are respected.

coop_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$coop_root"

coop_make_env() {
    local base="${PYTHON:-python3}"
    if ! command -v "$base" >/dev/null; then
        echo "error: no $base here; install Python 3.11 or newer, or set PYTHON=/path/to/python" >&2
        return 2
    fi
    if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "error: $("$base" --version 2>&1) is too old; coop needs 3.11 or newer: set PYTHON=/path/to/python" >&2
        return 2
    fi
    if ! "$base" -c 'import ensurepip, venv' 2>/dev/null; then
        echo "error: $base cannot make virtual environments; install its venv package (such as python3-venv)" >&2
        return 2
    fi
    "$base" -m venv .venv
}

coop_env() {
    local stamp=.venv/.coop-installed want
    if [ ! -x .venv/bin/python ]; then
        coop_make_env || return
    fi
    want="$(cat pyproject.toml constraints-ci.txt coop/kernels/*.cpp coop/kernels/*.inc | cksum) $(.venv/bin/python --version) $coop_root"
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$want" ]; then
        echo "installing coop and its tools into .venv (downloads the first time)" >&2
        .venv/bin/python -m pip install --quiet --disable-pip-version-check \
            -c constraints-ci.txt -e '.[dev]' || return
        echo "$want" >"$stamp"
    fi
    export VIRTUAL_ENV="$coop_root/.venv" PATH="$coop_root/.venv/bin:$PATH"
}

# Run one named phase and say how long it took; its exit code passes through.
coop_phase() {
    local name="$1" start=$SECONDS code=0
    shift
    echo "== $name" >&2
    "$@" || code=$?
    echo "== $name: $((SECONDS - start)) s$([ "$code" -eq 0 ] || echo ", exit code $code")" >&2
    coop_times+=("$(printf '%6d s  %s' "$((SECONDS - start))" "$name")")
    return "$code"
}
coop_times=()

coop_env
