"""`baton doctor`: checks a live cluster end to end."""

import argparse
import json
import os
import random
import ssl
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path

import psutil
from cryptography import x509

from baton import Client, Completion
from baton.request import API_KEY, Options, credentials
from cli.bench.schedule import PROMPT_IDS
from cli.status import COLD_STATES, state_with_advice
from cli.terminal import COLORS, Subparsers, add_command, show
from deploy.local.client import call_operator, find_cluster
from deploy.local.key_file import KeyFile
from deploy.local.state import ClusterState, StateFile, command_line, load_secret
from deploy.plan.byte_size import format_bytes
from wire.errors import BatonError, Unauthenticated
from wire.ids import release
from wire.journal import Kind
from wire.pb import cluster_pb2
from wire.pb import inference_pb2 as pb
from wire.pools import Role
from wire.tier import FAR_TIERS, Tier
from wire.trust.key_ring import bearer

DESCRIPTION = """\
Looks at a cluster that serves, and sends it a few short requests of random tokens, two for each worker at most. Each
line is a check: what was found and, where that is wrong, what to do.

The exit status is 0 if nothing is wrong, 1 if anything is or no cluster answers; what was skipped counts as neither."""
OTHER_API_KEY = "BATON_OTHER_API_KEY"
OTHER_KEY = "a key of another tenant than BATON_API_KEY's, which must find nothing of its prompts (default: $%s)"
TIMEOUT_S = 60.0
HTTP_TIMEOUT_S = 5.0
PROMPT_LEN = 200
NUM_TOKENS = 8
MIN_FREE_SHARE = 0.05
MAX_SILENCE_S = 5.0
MAX_CLOCK_DIFFERENCE_S = 5.0
DAMAGE = ("corrupt", "forged")


class Verdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    WRONG = "wrong"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """The result of a check, in words. advice: the way out, or what a skipped check needs."""

    verdict: Verdict
    found: str
    advice: str = ""


def ok(found: str) -> Finding:
    return Finding(Verdict.OK, found)


def wrong(found: str, advice: str) -> Finding:
    return Finding(Verdict.WRONG, found, advice)


def skipped(found: str, advice: str) -> Finding:
    return Finding(Verdict.SKIPPED, found, advice)


@dataclass(frozen=True)
class Probe:
    """A prompt that one worker computed, with block names under a root of no tenant.

    found: prompt tokens that the worker read from a tier. num_fetched: blocks that a decode worker fetched afterwards.
    """

    worker_id: str
    role: str
    token_ids: tuple[int, ...]
    found: str
    num_fetched: int


class Live:
    """A cluster that serves, and facts that several checks need, asked once. other_key: another tenant's key, or ""."""

    def __init__(self, state: ClusterState, other_key: str = "") -> None:
        self.state = state
        self.other_key = other_key
        self._prompt = random.Random().choices(PROMPT_IDS, k=PROMPT_LEN)
        self.status: cluster_pb2.ClusterStatus = call_operator(
            state, "GetStatus", cluster_pb2.GetStatusRequest(check=True), TIMEOUT_S
        )

    def command(self, verb: str, flags: str = "") -> str:
        return f"`{command_line(verb, self.state.name)}{flags}`"

    @property
    def http_address(self) -> str:
        """Returns the gateway's address; "" without a gateway, or if its clients need a certificate."""
        wants_certificate = self.state.tls is not None and self.state.tls.client_ca is not None
        return "" if wants_certificate else self.state.addresses.http

    def fetch(self, path: str) -> tuple[bytes, str]:
        """Returns a page of the gateway, and its Date. With TLS, trusts only the cluster's certificate.

        Raises OSError, which names the page.
        """
        tls = self.state.tls
        secured = [] if tls is None else [urllib.request.HTTPSHandler(context=_trusting(tls.certificate))]
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), *secured)
        url = f"{self.state.http_url.removesuffix('/v1')}{path}"
        request = urllib.request.Request(url, headers=dict(credentials(None)))
        try:
            with opener.open(request, timeout=HTTP_TIMEOUT_S) as answer:
                return answer.read(1 << 20), answer.headers["Date"] or ""
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror or error}, from {url}") from error

    def ask(self, api_key: str | None = None) -> Completion:
        """Sends the prompt, drawn for this command, as a client. Raises BatonError."""
        with Client(self.state.addresses.local, timeout_s=TIMEOUT_S, api_key=api_key) as client:
            plain: Options = {"temperature": 0, "repetition_penalty": 1, "ignore_eos": True, "max_tokens": NUM_TOKENS}
            return client.generate(self._prompt, **plain)

    @cached_property
    def first(self) -> Completion:
        return self.ask()

    @cached_property
    def probes(self) -> list[Probe]:
        """Has each worker that takes work compute the prompt, whose blocks are cached. Raises BatonError."""
        _ = self.first
        return [self._probe(one.worker_id, one.role) for one in self.status.workers if one.state == "ready"]

    def _probe(self, worker_id: str, role: str) -> Probe:
        prompt = pb.TokenIds(ids=self._prompt)
        request = cluster_pb2.ProbeRequest(worker_id=worker_id, prompt=prompt, max_tokens=NUM_TOKENS)
        answer = call_operator(self.state, "Probe", request, TIMEOUT_S)
        counts = {span.name: span.counts for span in answer.timeline.spans}
        own, last = (counts.get(Kind.FETCH.at(place), {}) for place in (role, Role.DECODE.value))
        found = ", ".join(f"{own[f'tokens_{tier}']} tokens in {tier}" for tier in Tier if own.get(f"tokens_{tier}"))
        num_fetched = sum(last.get(f"blocks_{tier}", 0) for tier in Tier if tier is not Tier.DEVICE)
        return Probe(worker_id, role, tuple(answer.token_ids), found, num_fetched)


def check_workers(live: Live) -> Finding:
    status, events = live.status, f"the last events of {live.command('status')} tell why"
    told = ", ".join(f"{pool.role} {pool.num_ready} of {pool.size}" for pool in status.pools)
    if any(pool.num_ready < pool.size for pool in status.pools):
        return wrong(f"ready: {told}", events)
    if silent := [one.worker_id for one in status.workers if one.engine_silent_s > MAX_SILENCE_S]:
        return wrong(f"engines are silent: {', '.join(silent)}", f"one that hangs is replaced by itself; {events}")
    return ok(f"ready: {told}")


def check_books(live: Live) -> Finding:
    """Reports the violated invariants of `baton status --check`."""
    if problems := [one for one in live.status.problems if " pool has " not in one]:
        check = live.command("status", " --check")
        return wrong("; ".join(problems), f"if {check} still says so in a minute, report a bug")
    return ok("pages, references and holds add up in every process")


def check_ports(live: Live) -> Finding:
    """Calls the clients' ports; the operator's port has answered before. Raises BatonError or OSError."""
    state = live.state
    for address in state.addresses.local.split(","):
        with Client(address, timeout_s=TIMEOUT_S) as client:
            client.list_models()
    if live.http_address:
        live.fetch("/ready")
    addresses = {"gRPC": state.addresses.public, "HTTP": live.http_address, "operator": state.addresses.operator}
    told = ", ".join(f"{name} {address}" for name, address in addresses.items() if address)
    if ip_address(state.addresses.public.partition(":")[0]).is_loopback:
        return ok(f"{told}: all answer, on this machine only")
    return ok(f"{told}: all answer; other machines reach gRPC (docs/security.md)")


def check_versions(live: Live) -> Finding:
    """Compares the versions of this command and the gateway."""
    own = release()
    if not live.http_address:
        return skipped(f"this command is {own}; no gateway tells the cluster's release", "nothing")
    served = str(json.loads(live.fetch("/version")[0])["version"])
    if served != own:
        return wrong(f"the cluster runs {served}, this command is {own}", "start the cluster anew with this release")
    return ok(f"gateway and this command are {own}")


def check_files(live: Live) -> Finding:
    """Checks the permissions of the secret and the state file, which has the operator's token. Raises ConfigError."""
    load_secret()
    paths = (StateFile(live.state.name).path, Path(live.state.run_dir))
    if open_to := " ".join(str(path) for path in paths if path.stat().st_mode & 0o077):
        return wrong(f"others can read {open_to}", f"`chmod go= {open_to}`, and start the cluster anew")
    return ok("secret, operator's token and run folder are private to their user")


def check_clocks(live: Live) -> Finding:
    """Compares this clock with the gateway's, and with the validity of the cluster's certificates, if any."""
    now = datetime.now(UTC)
    date = live.fetch("/health")[1] if live.http_address else ""
    off_s = abs((parsedate_to_datetime(date) - now).total_seconds()) if date else 0.0
    if off_s > MAX_CLOCK_DIFFERENCE_S:
        return wrong(f"the gateway's clock differs by {off_s:.0f} s", "let NTP set the clocks: logs go by them")
    ends = []
    for whose, pem in _certificates(live.state).items():
        certificate = x509.load_pem_x509_certificate(pem)
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            return wrong(f"{whose} certificates are not valid by this clock", "set the clock, or renew them")
        ends.append(f"{whose} certificates are good until {certificate.not_valid_after_utc:%Y-%m-%d}")
    if not date and not ends:
        return skipped("no gateway and no certificate to compare this clock with", "nothing")
    return ok("; ".join([*(["the gateway's clock agrees"] if date else []), *ends]))


def _certificates(state: ClusterState) -> dict[str, bytes]:
    """Reads the certificates of the nodes' authority and of the clients' ports, if any."""
    record, found = Path(state.run_dir, "authority.json"), {}
    if record.exists():
        found["the nodes'"] = json.loads(record.read_bytes())["certificate_pem"].encode()
    if state.tls is not None:
        found["the ports'"] = Path(state.tls.certificate).read_bytes()
    return found


def check_memory(live: Live) -> Finding:
    machine = psutil.virtual_memory()
    told = f"{format_bytes(machine.available)} of {format_bytes(machine.total)} are available"
    if machine.available < MIN_FREE_SHARE * machine.total:
        return wrong(told, "end other programs, or `baton up` with less --pool-bytes and --arena-bytes")
    return ok(told)


def check_tiers(live: Live) -> Finding:
    """Looks for unreachable tiers, and for damaged or forged blocks."""
    far = [tier for tier in live.status.tiers if tier.tier in FAR_TIERS and tier.state not in ("", "off")]
    bad = [f"{one.tier} {state_with_advice(one)}" for one in far if one.state in COLD_STATES]
    bad += [f"{one.tier} had {one.counts[name]} {name} blocks" for one in far for name in DAMAGE if one.counts[name]]
    if bad:
        return wrong("; ".join(bad), "requests go on without; mend the server or folder, and who may write there")
    told = ", ".join(f"{one.tier} {one.state}, {one.counts['hits']} blocks read from it so far" for one in far)
    return ok(told or "none outside of the nodes' memory")


def check_hand_off(live: Live) -> Finding:
    """Checks that decode workers fetch KV from prefill workers. Raises BatonError."""
    probes = [one for one in live.probes if one.role == Role.PREFILL.value]
    if not probes:
        advice = f"nothing, or {live.command('scale', ' --prefill 1')}"
        return skipped("no prefill worker: prompts are computed where they are decoded", advice)
    if lost := ", ".join(one.worker_id for one in probes if not one.num_fetched):
        return wrong(f"decode computed again what {lost} had computed", f"see the tiers of {live.command('status')}")
    return ok("decode fetched " + ", ".join(f"{one.num_fetched} blocks of {one.worker_id}" for one in probes))


def check_tokens(live: Live) -> Finding:
    """Compares the answers of all workers to one prompt, computed without cached KV. Raises BatonError."""
    if not live.probes:
        return skipped("no worker takes work now", f"see {live.command('status')}")
    first = live.probes[0]
    if others := ", ".join(one.worker_id for one in live.probes if one.token_ids != first.token_ids):
        found = f"{others} and {first.worker_id} differ over one prompt"
        return wrong(found, "a GPU in bf16 may; on a CPU a node's memory is bad: drain its workers, and look again")
    return ok(f"{len(live.probes)} workers give the same {len(first.token_ids)} tokens")


def check_cache(live: Live) -> Finding:
    """Sends a prompt twice, as one tenant, and expects cached tokens. Raises BatonError."""
    one, other = live.first, live.ask()
    told = ", ".join(f"{tokens} from {tier}" for tier, tokens in other.usage.cached_tokens.items())
    if one.choices[0].token_ids != other.choices[0].token_ids:
        return wrong("the same prompt twice, and other tokens", "see the tokens of each worker, below")
    if not told:
        return wrong("the same prompt twice, and nothing found", f"are pools full? See {live.command('status')}")
    return ok(f"the same prompt again: {told} of {PROMPT_LEN} tokens")


def check_tenants(live: Live) -> Finding:
    """Checks that no probe under a foreign namespace root, and no request with another tenant's API key, finds a block.

    Both send a tenant's prompt. Raises BatonError.
    """
    leaks = [f"{one.worker_id}: {one.found}" for one in live.probes if one.found]
    listed = KeyFile.of(live.state.name).read().keys
    known = {key.id: key.tenant for key in listed if not key.is_revoked}
    own, other = (known.get(_id_of(text), "") for text in (os.environ.get(API_KEY, ""), live.other_key))
    if live.other_key and other in ("", own):
        create = live.command("key create", " --tenant OTHER")
        return wrong("the other key is of no other tenant", f"give one that {create} prints")
    if live.other_key:
        cached = live.ask(live.other_key).usage.cached_tokens
        leaks += [f"{other}: {tokens} tokens in {tier}" for tier, tokens in cached.items()]
    if leaks:
        return wrong(
            f"a stranger found KV of a tenant: {'; '.join(leaks)}", "stop the cluster, and report it: SECURITY.md"
        )
    told = f"under other names nothing of it is found, in no tier, at {len(live.probes)} workers"
    return ok(f"{told}; nor by a key of {other}" if other else told)


CHECKS: dict[str, Callable[[Live], Finding]] = {
    "workers": check_workers,
    "ports": check_ports,
    "versions": check_versions,
    "clocks": check_clocks,
    "memory": check_memory,
    "files": check_files,
    "books": check_books,
    "tiers": check_tiers,
    "cache": check_cache,
    "tenants": check_tenants,
    "hand-off": check_hand_off,
    "tokens": check_tokens,
}


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "doctor", "prove that a cluster does what it should", DESCRIPTION, run)
    parser.add_argument("--json", action="store_true", help="print one object, for scripts")
    parser.add_argument("--other-key", type=str, metavar="KEY", help=OTHER_KEY % OTHER_API_KEY)
    parser.add_argument("--color", choices=COLORS, default="auto", help="of the table (default: auto)")


def run(args: argparse.Namespace) -> int:
    live = Live(find_cluster(args.name), args.other_key or os.environ.get(OTHER_API_KEY, ""))
    findings = {name: _find(check, live) for name, check in CHECKS.items()}
    num_wrong = sum(finding.verdict is Verdict.WRONG for finding in findings.values())
    if args.json:
        print(json.dumps({"ok": not num_wrong, "checks": {name: asdict(one) for name, one in findings.items()}}))
    else:
        rows = [(str(one.verdict), name, one.found, one.advice) for name, one in findings.items()]
        show(("", "check", "found", "what to do" if any(row[-1] for row in rows) else ""), rows, args.color)
    return 1 if num_wrong else 0


def _find(check: Callable[[Live], Finding], live: Live) -> Finding:
    """Runs a check; an error within it counts as a failed check."""
    try:
        return check(live)
    except Unauthenticated:
        create = live.command("key create", " --tenant NAME")
        return wrong("calls want a key here", f"give one in {API_KEY}: {create} prints it")
    except BatonError as error:
        return wrong(error.message, f"see {live.command('status')}")
    except OSError as error:
        return wrong(f"no answer ({error.strerror or error})", f"see {live.command('status')}, and the logs it names")


def _trusting(certificate: str) -> ssl.SSLContext:
    """Returns the settings of a client that trusts this file's certificate under any host name. Raises OSError."""
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    context.verify_flags = ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _id_of(key: str) -> str:
    return key.split("-")[1] if bearer([f"Bearer {key}"]) else ""
