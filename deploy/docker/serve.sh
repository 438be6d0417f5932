#!/usr/bin/env bash
# Serves in the foreground, as a container does: `baton up` with the arguments given, then the logs of all processes until SIGTERM or
# SIGINT, which end the cluster. The exit status is 0 after a signal, 1 after a crash, and that of `baton up` where it fails.
set -uo pipefail

child='' is_told=no
pass_on() {
    is_told=yes
    [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}
trap pass_on TERM INT

# Runs a command to its end, and passes a signal on to it.
await() {
    "$@" &
    child=$!
    [ "$is_told" = no ] || kill -TERM "$child"
    wait "$child"
    status=$?
    while kill -0 "$child" 2>/dev/null; do # a signal has ended the wait alone
        wait "$child"
        status=$?
    done
    child=''
}

await baton up --host 0.0.0.0 "$@"
if [ "$is_told" = no ]; then
    [ "$status" = 0 ] || exit "$status"
    baton logs --follow &
    await baton status --watch >/dev/null # the end of the cluster ends it, with the reason on stderr
fi
trap '' TERM INT
baton down && [ "$is_told" = yes ] # a signal may have come when `up` was all but done
status=$?
wait
exit "$status"
