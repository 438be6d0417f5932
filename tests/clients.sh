#!/usr/bin/env bash
# Runs clients that people have, and the programs that people build agents with, unmodified, against the HTTP and gRPC ports of real
# clusters that it starts: installs them into environments of their own first (BATON_CLIENTS_VENV names their folder, .venv-clients),
# which takes minutes and 3 GB. A client or program that cannot be installed, for want of Node 20's npm too, or that does not start
# fails it. Arguments go to pytest: `-k programs` runs the programs alone.
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${BATON_CLIENTS_VENV:-$PWD/.venv-clients}"
install() {
  local venv="$1"
  shift
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade "$@"
}
starts() {
  local home
  home="$(mktemp -d)"
  HOME="$home" timeout 60 "$1" --version > "$home/version" 2>&1 && rm -r "$home" && return
  echo "$1 does not start; npm brings the binaries of programs as optional dependencies, for some platforms only:" >&2
  cat "$home/version" >&2
  rm -r "$home"
  return 1
}
install "$venv" 'openai>=3.4' anthropic litellm 'pydantic-ai-slim[openai]' inspect-ai 'lm-eval[api]' transformers schemathesis
install "$venv/older" langchain-openai instructor anthropic # these two take no newer openai
npm install --silent --no-audit --no-fund --prefix "$venv" openai ai @ai-sdk/openai-compatible zod @bufbuild/buf
# Programs have the versions that docs/api.md names: a newer one may send other fields.
install "$venv/aider" aider-chat==0.86.2
npm install --silent --no-audit --no-fund --prefix "$venv/programs" @anthropic-ai/claude-code@2.1.197 @openai/codex@0.171.0 \
  opencode-ai@1.18.33 @qwen-code/qwen-code@0.15.10 cline@3.0.65
for program in aider/bin/aider programs/node_modules/.bin/{claude,codex,opencode,qwen,cline}; do starts "$venv/$program"; done
"${PYTHON:-python}" -m cli pull smollm2
BATON_NO_SKIP=1 BATON_CLIENTS_VENV="$venv" exec "${PYTHON:-python}" -m pytest -m clients tests/clients "$@"
