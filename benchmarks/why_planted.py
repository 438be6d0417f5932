"""Answers of `baton why` about misses whose causes are planted, on real clusters of the demo model.

    python benchmarks/why_planted.py
    python benchmarks/why_planted.py --cards FOLDER    # a file an answer, in drawn order, for a trial by a reader

Four clusters answer, one after another: without a cold tier; with a folder that an earlier cluster has filled, in which
some files are spoilt; with this folder and another dtype; with a Redis behind a slow line, filled by an earlier
cluster. Prompts fill six to eight blocks. Exits with 1 where an answer lacks the words of what was planted.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Unpack

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from baton import Client, Completion
from baton.request import Options
from benchmarks.baton_service import HANDED_OFF, BatonService
from benchmarks.machine import MachineState
from benchmarks.slow_tier import proxied
from benchmarks.tiers import own_redis
from tests.faults.toxic_proxy import Line

CHARACTERS = 160
BLOCK_SIZE = 16
SMALL = ("--no-http", "--pool-bytes", "2MiB", *HANDED_OFF)
"""Device pools of 64 blocks: what other prompts push out of the arena is not kept there."""
WRITTEN_S = 3.0
LOST_AFTER = 40
"""Prompts that push another one out of an arena of 256 blocks, which remembers as many lost ones."""
FORGOTTEN_AFTER = 80
TRIES = 40
LATE_S = 0.02
SLOW = 1e6
"""Bytes a second: a block takes longer to read than to compute."""


@dataclass(frozen=True)
class Planted:
    """A planted cause, words that its answer must have, the answer, and the most lines that it may have."""

    what: str
    words: str
    answer: str
    max_lines: int = 4

    @property
    def is_right(self) -> bool:
        return self.words in self.answer and len(self.answer.splitlines()) <= self.max_lines


class Trial:
    """Requests to one cluster after another, and what `baton why` answers. Prompts are printable text."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.planted: list[Planted] = []

    def prompt(self) -> str:
        return "".join(self._draw.choices("abcdefghijklmnopqrstuvwxyz ", k=CHARACTERS))

    def ask(self, service: BatonService, prompt: str, **options: Unpack[Options]) -> str:
        """Returns the id of an ended request."""
        return self._generate(service, prompt, **options).request_id

    def fill(self, service: BatonService, num_prompts: int) -> None:
        for _ in range(num_prompts):
            self.ask(service, self.prompt())

    def plant_hit(self, service: BatonService, what: str, prompt: str) -> None:
        """Asks a prompt of which only the partly filled last block may be uncached."""
        completion = self._generate(service, prompt)
        num_cached = (completion.usage.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        self.planted.append(Planted(what, f": {num_cached} of", why(service, completion.request_id), 2))

    def plant(self, service: BatonService, what: str, words: str, prompt: str, **options: Unpack[Options]) -> None:
        answer = why(service, self.ask(service, prompt, **options))
        print(f"{what}\n{answer}", file=sys.stderr)
        self.planted.append(Planted(what, words, answer))

    def plant_in_arena(self) -> None:
        with BatonService("arena", None, 1, 1, [*SMALL, "--redis-url", "off", "--arena-bytes", "8MiB"]) as service:
            prompt = self.prompt()
            self.plant(service, "a new prompt", "new to its node", prompt)
            self.plant_hit(service, "the same prompt again", prompt)
            changed = prompt[:70] + ("A" if prompt[70] != "A" else "B") + prompt[71:]
            self.plant(service, "character 70 of it changed", "differs from known ones", changed)
            self.plant(service, "its log-probabilities asked for", "scores its prompt", prompt, prompt_logprobs=1)
            self.plant_hit(service, "a prompt of five characters", "hello")
            self.fill(service, LOST_AFTER)
            self.plant(service, f"the first prompt after {LOST_AFTER} others", "to make room", prompt)
            clear = [*command("cache", "clear", "--everything"), "--name", service.name]
            subprocess.run(clear, stdout=subprocess.DEVNULL, check=True)
            self.plant(service, "the same after `baton cache clear`", "cleared by the operator", prompt)
            other = self.prompt()
            self.ask(service, other)
            self.fill(service, FORGOTTEN_AFTER)
            self.plant(service, f"another prompt after {FORGOTTEN_AFTER} others", "are forgotten", other)

    def plant_in_files(self, folder: Path) -> None:
        settings = [*SMALL, "--redis-url", "off", "--files-folder", str(folder)]
        spoilt, whole = self.prompt(), self.prompt()
        with BatonService("writes", None, 1, 1, settings) as service:
            self.ask(service, spoilt)
            time.sleep(WRITTEN_S)
            for path in files(folder):
                path.write_bytes(path.read_bytes()[:-64] + bytes(64))
            self.ask(service, whole)
            time.sleep(WRITTEN_S)
        with BatonService("spoilt", None, 1, 1, settings) as service:
            self.plant(
                service, "a cluster started again, the prompt's files spoilt", "gave none, or wrong bytes", spoilt
            )
        with BatonService("bfloat16", None, 1, 1, [*settings, "--dtype", "bfloat16"]) as service:
            self.plant(service, "a cluster started again in bfloat16", "stored under other settings", whole)

    def plant_in_redis(self, folder: Path) -> None:
        with own_redis(folder) as url:
            settings = [*SMALL, "--arena-bytes", "8MiB", "--redis-url"]
            stored = [self.prompt() for _ in range(TRIES)]
            with BatonService("writes", None, 1, 1, [*settings, url]) as service:
                for prompt in stored:
                    self.ask(service, prompt)
                time.sleep(WRITTEN_S)
            line = Line(bytes_per_s=SLOW)
            with (
                proxied(url, line) as slow_url,
                BatonService("slow", None, 1, 1, [*settings, slow_url]) as service,
            ):
                what = "a prompt that an earlier cluster left in a Redis of 1 MB/s"
                self._plant_one_of(service, what, "expected to take less time", stored)
                line.bytes_per_s = inf
                lost = [self.prompt() for _ in range(LOST_AFTER)]
                for prompt in lost:
                    self.ask(service, prompt)
                line.bytes_per_s, line.delay_s = SLOW, (LATE_S, LATE_S)
                what = f"a prompt after {LOST_AFTER} others, and a copy of it in a Redis that is far"
                self._plant_one_of(service, what, "copy went to a cold tier", lost)

    def _plant_one_of(self, service: BatonService, what: str, words: str, prompts: list[str]) -> None:
        """Asks prompts until one has the answer: what a tier costs is learned, and a dear one is tried now and then."""
        for prompt in prompts:
            answer = why(service, self.ask(service, prompt))
            if words in answer:
                break
        self.planted.append(Planted(what, words, answer))

    def _generate(self, service: BatonService, prompt: str, **options: Unpack[Options]) -> Completion:
        with Client(service.address) as client:
            sent: Options = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True, **options}
            return client.generate(prompt, **sent)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cli", *arguments]


def why(service: BatonService, request_id: str) -> str:
    done = subprocess.run(
        [*command("why", request_id), "--name", service.name], stdout=subprocess.PIPE, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1024)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cards", type=Path, help="a folder for one file an answer, in drawn order")
    options = parser.parse_args()
    trial = Trial(options.seed)
    with ExitStack() as ended:
        folders = [Path(ended.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        trial.plant_in_arena()
        trial.plant_in_files(folders[0])
        trial.plant_in_redis(folders[1])
    if options.cards:
        options.cards.mkdir(parents=True, exist_ok=True)
        cards = random.Random(options.seed).sample(trial.planted, len(trial.planted))
        for number, one in enumerate(cards, start=1):
            (options.cards / f"{number:02}.txt").write_text(one.answer + "\n")
            (options.cards / f"{number:02}.planted").write_text(one.what + "\n")
    print(f"{MachineState.measure().describe()}\n\n| planted | `baton why` says | right |\n|---|---|---|")
    for one in trial.planted:
        print(f"| {one.what} | {'; '.join(one.answer.splitlines())} | {'yes' if one.is_right else 'NO'} |")
    return 0 if all(one.is_right for one in trial.planted) else 1


if __name__ == "__main__":
    sys.exit(main())
