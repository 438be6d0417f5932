#!/usr/bin/env bash
# From nothing to a served prompt: environment, Ray, Redis, a prefill and a decode worker, one streamed generation with
# its timeline, a clean stop. --chat serves SmolLM2 (`baton pull`, 93 MB) in place of the demo model, and ends in a conversation; without
# a terminal it asks three questions. --keep leaves the cluster running. Arguments after -- go to `baton up`.
set -euo pipefail
cd "$(dirname "$0")/.."

keep=no chat=no
while [ "${1:-}" = --keep ] || [ "${1:-}" = --chat ]; do
    [ "$1" = --keep ] && keep=yes || chat=yes
    shift
done
[ "${1:-}" = -- ] && shift

. deploy/environment.sh ""

name=quickstart
question="Rooms: Ben 19, Anna 48, Clara 77, David 12, Emma 55. Question: which room has Clara?"
answer=" 77."

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
stop() { baton down --name "$name" || true; }
trap stop EXIT

if [ "$chat" = yes ]; then
    say "\$ baton pull smollm2"
    if baton pull smollm2; then
        set -- --model smollm2 "$@"
    else
        echo "Without it the demo model serves, which answers from facts in its prompt." >&2
        chat=no
    fi
fi

say "\$ baton up --prefill 1 --decode 1 $*"
baton up --name "$name" --prefill 1 --decode 1 --grpc-port 0 "$@"

if [ "$chat" = yes ]; then
    question="The capital of France is"
fi
say "\$ baton generate --temperature 0 \"$question\""
baton generate --name "$name" --temperature 0 --max-tokens 40 "$question"
# The demo model knows the answer, and only from the prompt: asked again, the prompt is a hit and the answer the same.
if [ $# -eq 0 ] && [ "$(baton generate --name "$name" --temperature 0 "$question" 2>/dev/null)" != "$answer" ]; then
    echo "quickstart: the answer should have been$answer" >&2
    exit 1
fi

http="$(python -c "import sys; from deploy.local.state import StateFile; print(StateFile(sys.argv[1]).read().addresses.http)" "$name")"
if [ -n "$http" ] && [ $# -eq 0 ]; then
    body='{"messages": [{"role": "user", "content": "'"$question"'"}], "temperature": 0}'
    say "\$ curl http://$http/v1/chat/completions -H 'Content-Type: application/json' -d '$body'"
    curl --fail-with-body -sS "http://$http/v1/chat/completions" -H "Content-Type: application/json" -d "$body"
    body='{"prompt": "'"$question"'", "temperature": 0, "stream": true, "stream_options": {"include_usage": true}}'
    say "\$ curl -N http://$http/v1/completions -H 'Content-Type: application/json' -d '$body'"
    curl --fail-with-body -sSN "http://$http/v1/completions" -H "Content-Type: application/json" -d "$body"
fi

if [ "$chat" = yes ] && [ -t 0 ]; then
    say "\$ baton chat --temperature 0"
    echo "An empty line ends the conversation."
    baton chat --name "$name" --temperature 0
elif [ "$chat" = yes ]; then
    questions="What is the capital of France?\nWhy is the sky blue? Answer in one sentence.\nWho wrote Romeo and Juliet?\n"
    say "\$ printf \"$questions\" | baton chat --temperature 0"
    printf '%b' "$questions" | baton chat --name "$name" --temperature 0
fi

say "\$ baton status --check"
baton status --name "$name" --check

trap - EXIT
if [ "$keep" = yes ]; then
    say "The cluster is running. Ask it with: . .venv/bin/activate; baton generate --name $name ...; end it with: baton down --name $name"
    exit 0
fi

# shellcheck disable=SC2207
ports=($(python -c "import sys; from deploy.local.state import StateFile; print(*StateFile(sys.argv[1]).read().ports)" "$name"))
say "\$ baton down"
baton down --name "$name"
bash deploy/nothing_left.sh "$name" "${ports[@]}"
