"""`baton roll`: gives the workers of a live cluster other settings, a model folder or a release, one by one."""

import argparse
from pathlib import Path

from cli.terminal import DEFAULT_NAME, Subparsers
from cli.up import add_settings_parser, by_flags
from deploy.deadlines import ORDER_IN_COMMAND_S
from deploy.local.client import call_operator, find_cluster
from deploy.plan.model import inspect_model, require_folders
from deploy.processes.atomic_file import AtomicFile
from deploy.roll.revisions import FILE, read_revisions, rolled
from wire.errors import Unavailable
from wire.pb import cluster_pb2
from wire.typed_reader import to_message

DESCRIPTION = """\
Replaces the workers of a cluster that serves, one by one: a worker with the new settings starts, and once it takes
requests an old one finishes or hands over its own, and ends. No request fails. Settings that neither the file nor a
flag names stay as they are; without any, the same settings start in the installed release.

Workers' settings are rolled (worker, batch, speculation, and the model's as long as tokenizer, chat template, context,
block size and window stay the same); any other is refused by name, and nothing changes. If the first new worker of a
pool does not start, or three in a row later, the old settings serve on."""


def add_parser(commands: Subparsers) -> None:
    parser = add_settings_parser(commands, "roll", "change settings of workers, one worker at a time", DESCRIPTION)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    state = find_cluster(getattr(args, "name", DEFAULT_NAME))
    known = read_revisions(AtomicFile(Path(state.run_dir) / FILE))
    if not known:
        raise Unavailable("this cluster was started by a release that cannot roll: `baton down` and `baton up` do")
    present = known[0]
    with by_flags(args) as given:
        config = present.config.changed(getattr(args, "config", None), {**given, "name": state.name})
        require_folders(config.model.path, config.speculation.draft)
        guessing, kernels = config.speculation, config.worker.cpu_kernels
        model = inspect_model(config.model, present.model.device, kernels, guessing.draft, guessing.proposer)
        revision = rolled(present, config, model)
    request = cluster_pb2.RollRequest(revision=to_message(revision))
    answer = call_operator(state, "Roll", request, ORDER_IN_COMMAND_S)
    print(f"all workers have revision {answer.revision}")
    return 0
