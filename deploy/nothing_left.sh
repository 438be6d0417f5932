#!/usr/bin/env bash
# Says what a stopped cluster has left behind: processes, shared memory, files, ports that something listens on.
#   deploy/nothing_left.sh [NAME [PORT...]]
# Exit code 1 if there is anything.
name="${1:-default}"
[ $# -gt 0 ] && shift

listens() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

left="$(
    pgrep -af "[b]aton-$name([^a-z0-9-]|-[a-z0-9_]{8}([^a-z0-9_-]|\$)|\$)" | sed 's/^/process /'
    for folder in /dev/shm /tmp; do
        find "$folder" -maxdepth 1 -regextype posix-extended -regex ".*/baton-$name(-[a-z0-9_]{8})?(\.[^/]*)?" 2>/dev/null
    done
    for port in "$@"; do
        listens "$port" && echo "listener on port $port"
    done
)"
if [ -n "$left" ]; then
    printf 'left behind by %s:\n%s\n' "$name" "$left" >&2
    exit 1
fi
echo "Nothing is left behind: no process, no shared memory, no files, no open ports."
