"""`baton key`: makes, lists and revokes the keys of callers."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from cli.terminal import Subparsers, add_command, render
from deploy.deadlines import KEYS_IN_COMMAND_S
from deploy.local.client import call_operator, find_cluster
from deploy.local.key_file import KeyFile
from deploy.local.state import ClusterPhase, StateFile
from wire.errors import BatonError, InvalidRequest, Unavailable
from wire.pb import cluster_pb2
from wire.trust.key_ring import Allowance, Key, KeyList, Scope, make_key, page_key

DESCRIPTION = """\
Keys of callers. From the first key on, each call shows one as `authorization: Bearer KEY`, and calls without one are
refused. The keys are kept, without their secrets, in a file that outlives the cluster; a cluster that runs goes by a
change when the command returns. Streams that are open go on to their end."""
CREATE = "Makes a key and prints it, this once: only a digest of it is kept."
PAGE = """\
Prints where the page of a cluster that runs is, and a key of the operator that opens it, as long as this cluster runs,
also where no key was made."""
LOCK_S = 10.0
LIMITS: dict[str, tuple[Callable[[str], Any], str]] = {
    "requests_per_minute": (int, "requests that may begin in a minute"),
    "tokens_per_minute": (int, "tokens of prompts and answers in a minute"),
    "max_open_requests": (int, "requests at a time"),
    "arena_share": (float, "part of each tier, above 0 to 1, beyond which the tenant's blocks there go first"),
    "weight": (float, "weight of its requests beside other tenants', whose are 1 by default"),
}


def add_parser(commands: Subparsers) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "key", help="make, list and revoke keys of callers", description=DESCRIPTION
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    create = add_command(verbs, "create", "make a key", CREATE, run_create)
    create.add_argument("--tenant", type=str, required=True, help="whose blocks and request ids it shares")
    scopes = [scope.value for scope in Scope]
    create.add_argument("--scope", action="append", choices=scopes, help="what it opens (default: generate)")
    for name, (kind, text) in LIMITS.items():
        create.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=f"{text} (default: no bound)")
    add_command(verbs, "page", "print the key of the page", PAGE, run_page)
    add_command(verbs, "list", "list the keys", "Lists the keys, without their secrets.", run_list)
    revoke = add_command(verbs, "revoke", "end a key", "Ends a key, by its id, for good.", run_revoke)
    revoke.add_argument("id", metavar="ID", type=str, help="as `baton key list` shows it")


def run_create(args: argparse.Namespace) -> int:
    scopes = [Scope(name) for name in dict.fromkeys(args.scope or [Scope.GENERATE.value])]
    allowance = Allowance(**{name: getattr(args, name) for name in LIMITS})

    def add(listed: KeyList) -> KeyList:
        key, text = make_key(args.tenant, scopes, allowance, {one.id for one in listed.keys})
        _show(text)  # before it is valid: no key stays that was not seen
        return KeyList((*listed.keys, key))

    _change(args.name, add)
    _put_in_force(args.name)
    return 0


def run_page(args: argparse.Namespace) -> int:
    state = find_cluster(args.name)
    where = f"{state.http_url.removesuffix('/v1')}/ui" if state.http_url else "no page: the cluster has no gateway"
    print(where, file=sys.stderr)
    print(page_key(state.token))
    return 0


def run_list(args: argparse.Namespace) -> int:
    listed = KeyFile.of(StateFile(args.name).name).read().keys
    if not listed:
        runs = "no cluster of that name runs" if StateFile(args.name).read() is None else "calls need none"
        print(f"{args.name} has no keys, and {runs}", file=sys.stderr)
        return 0
    rows = [(key.id, key.tenant, " ".join(scope.value for scope in key.scopes), _describe(key)) for key in listed]
    print(render(("id", "tenant", "scopes", "limits"), rows))
    return 0


def run_revoke(args: argparse.Namespace) -> int:
    _change(args.name, lambda listed: _without(listed, args.id))
    _put_in_force(args.name)
    return 0


def _show(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError:
        print("no key was made: it could not be printed", file=sys.stderr)
        raise


def _without(listed: KeyList, key_id: str) -> KeyList:
    if all(key.id != key_id for key in listed.keys):
        raise InvalidRequest("id", "no key has it: see `baton key list`")
    return KeyList(tuple(replace(key, is_revoked=key.is_revoked or key.id == key_id) for key in listed.keys))


def _change(cluster: str, change: Callable[[KeyList], KeyList]) -> None:
    file = KeyFile.of(StateFile(cluster).name)
    with StateFile(cluster).lock(LOCK_S):
        file.write(change(file.read()))


def _put_in_force(cluster: str) -> None:
    """Has a running cluster reread the file, and says so. Raises Unavailable if it has not yet."""
    state = StateFile(cluster).read()
    if state is None or state.phase is not ClusterPhase.RUNNING or not state.is_alive:
        print(f"in force from the next start: no cluster named {cluster} runs", file=sys.stderr)
        return
    try:
        call_operator(state, "ReloadKeys", cluster_pb2.ReloadKeysRequest(), KEYS_IN_COMMAND_S)
    except BatonError as error:
        advice = "the cluster goes by it as soon as it can"
        raise Unavailable(f"written, and not in force yet: {error.message}: {advice}") from error
    print("in force", file=sys.stderr)


def _describe(key: Key) -> str:
    limits = ((one.name.replace("_", " "), getattr(key.allowance, one.name)) for one in fields(Allowance))
    return "revoked" if key.is_revoked else ", ".join(f"{name} {bound}" for name, bound in limits if bound is not None)
