"""Asks a cluster of two Ray nodes on this machine while the raylet of the second is killed, and another node joins.

    python benchmarks/lost_node.py --kills 3 --streams 8 --tokens 300

The head has a prefill and a decode worker, the other node a decode worker. Every answer is compared, token by token,
with that of an engine in this process. At the end both pools must be whole, and all pages at rest: 0 lost, 0 wrong, 0
leaked.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.baton_service import BatonService, num_in_use
from benchmarks.chaos_client import ChaosClient
from benchmarks.chaos_tally import Tally
from benchmarks.question import make_questions
from benchmarks.result_file import write_result
from tests.cluster.ray_nodes import RayNodes, kill_raylet
from tests.harness.checkpoints import make_checkpoint

_SETTINGS = "deploy/two-pools.example.toml"
_REST_TIMEOUT_S = 90.0


def main() -> None:
    options = _parse(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ended:
        model = str(make_checkpoint("llama-gqa", Path(folder) / "random", max_position_embeddings=2048))
        questions = make_questions(model, options.questions, options.prompt_len, options.tokens, options.seed)
        nodes = RayNodes(Path(folder), ended)
        os.environ.update(nodes.env)
        nodes.head(prefill=1, decode=1)
        service = BatonService(
            options.name, model, 1, 2, ["--dtype", "float32", "--config", _SETTINGS, "--ray-address", nodes.address]
        )
        harm = Harm(nodes, options.every)
        with service:
            client = ChaosClient(service.address, questions, options.timeout)
            duration_s = options.every * (options.kills + 1)

            async def run() -> Tally:
                async with asyncio.TaskGroup() as group:
                    load = group.create_task(client.keep_open(options.streams, duration_s))
                    group.create_task(asyncio.to_thread(harm.run, options.kills))
                return Tally.of(load.result())

            tally = asyncio.run(run())
            status = service.wait_for_rest(_REST_TIMEOUT_S)
    figures = {
        **asdict(tally),
        "leaked_pages": num_in_use(status),
        "problems": status["problems"],
        "kills": len(harm.done),
    }
    write_result(options.out, figures, {"kills": harm.done, "events": status["events"]})
    sys.exit(1 if tally.lost or tally.wrong or figures["leaked_pages"] or status["problems"] else 0)


class Harm:
    """The second node: it joins at once, and is killed and followed by another every `every_s` seconds.

    `done` has the time of each kill, and the seconds until the next node had joined.
    """

    def __init__(self, nodes: RayNodes, every_s: float) -> None:
        self.done: list[tuple[float, float]] = []
        self._nodes = nodes
        self._every_s = every_s
        self._node = nodes.join("decode")

    def run(self, num_kills: int) -> None:
        """Blocks until the last of the nodes has joined."""
        began_s = time.monotonic()
        for number in range(1, num_kills + 1):
            time.sleep(max(0.0, began_s + number * self._every_s - time.monotonic()))
            killed_s = time.monotonic()
            kill_raylet(self._node)
            self._node = self._nodes.join("decode")
            self.done.append((round(killed_s - began_s, 1), round(time.monotonic() - killed_s, 1)))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--every", type=float, default=30.0, help="seconds from kill to kill")
    parser.add_argument("--streams", type=int, default=8, help="open at any time")
    parser.add_argument("--tokens", type=int, default=300, help="of each answer")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--questions", type=int, default=64, help="different ones; more are asked again")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a request may take")
    parser.add_argument("--name", default="lostnode", help="of the cluster")
    parser.add_argument("--out", default="lost_node", help="name of the result in benchmarks/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
