#!/usr/bin/env bash
# Proves everything: formatting, lint, strict types, import contracts, words, generated stubs, all tests.
#   bash tests/run.sh [--all | --changed] [ARGUMENTS OF PYTEST]
# --all: every combination of parameters where pairs of them do otherwise, a thousand seeds (an hour or more), and then the tests that
# need more than this machine may have: rest for Ray's head, clients of others, the page in a browser, the image, a real model.
# --changed: only tests whose sources have changed since they last passed here (tests/changed.py).
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/environment.sh dev
export BATON_NO_SKIP=1 OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
which=
case "${1:-}" in --all | --changed) which="$1" && shift ;; esac
[ "$which" = --all ] && export BATON_TESTS=all

step() {
    echo "== $1" >&2
    shift
    "$@" || { echo "FAILED: $*" >&2; exit 1; }
}

stubs_are_current() {
    local before
    before="$(mktemp -d)"
    cp -r wire/pb "$before/pb"
    bash wire/generate.sh
    diff -r --exclude=__pycache__ "$before/pb" wire/pb
    local same=$?
    rm -rf "$before"
    return $same
}

kernels_are_compiled() {
    python - <<'PYTHON'
from kernels.cpu.library import ISA_TO_FEATURES, NoKernels, load_library

for isa in ISA_TO_FEATURES:
    try:
        load_library(isa)
    except NoKernels as error:
        print(f"without {isa}: {error}")
PYTHON
}

step formatting ruff format --check --quiet .
step lint ruff check --quiet .
step types mypy
step imports lint-imports
step words python tests/docs/words.py
step stubs stubs_are_current
step kernels kernels_are_compiled
# Notes the test files that pass, unless arguments choose among the tests.
run_tests() {
    local status=0
    [ $# -eq 0 ] || { python -m pytest -n 3 "$@"; return; }
    mkdir -p .pytest_cache
    python -m tests.changed "${which:---all}" >.pytest_cache/changed.txt || return
    if [ "$which" = --changed ]; then
        set -- @.pytest_cache/changed.txt
        [ -s .pytest_cache/changed.txt ] || { echo "each test has passed with the sources that it has now" >&2; return 0; }
    fi
    python -m pytest -n 3 "$@" || status=$?
    [ $status -gt 1 ] || python -m tests.changed --passed
    return $status
}

step tests run_tests "$@"
[ "$which" = --all ] || exit 0
for more in head page clients real_model image; do step "$more" bash "tests/$more.sh"; done
