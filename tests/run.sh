#!/usr/bin/env bash
# Proves everything: formatting, lint, strict types, import contracts, words, generated stubs, all tests.
#   bash tests/run.sh [--all] [ARGUMENTS OF PYTEST]
# --all: every combination of parameters where pairs of them do otherwise, and a thousand seeds (an hour or more).
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/environment.sh dev
export BATON_NO_SKIP=1 OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
[ "${1:-}" = --all ] && { export BATON_TESTS=all; shift; }

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
step tests python -m pytest -n 3 "$@"
