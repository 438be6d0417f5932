#!/usr/bin/env bash
# Opens the page in a real headless Chromium: installs Debian's chromium where it is missing and this is root, then playwright and
# axe-core into an environment of their own in the user's cache. With --pictures it makes the pictures in docs/. Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = --pictures ]; then
  shift
  export BATON_PAGE_SHOTS="$PWD/docs"
fi
if ! command -v chromium > /dev/null; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "tests/page.sh: there is no chromium, and only root may install it: apt-get install chromium" >&2
    exit 1
  fi
  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core > /dev/null
fi
venv="${BATON_PAGE_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/baton-page}"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check playwright
if [ ! -e "$venv/node_modules/axe-core/axe.min.js" ]; then
  if ! command -v npm > /dev/null; then
    echo "tests/page.sh: npm is missing, which fetches axe-core" >&2
    exit 1
  fi
  npm install --silent --no-audit --no-fund --prefix "$venv" axe-core
fi
BATON_PAGE_VENV="$venv" exec "${PYTHON:-python}" -m pytest -m page tests/page "$@"
