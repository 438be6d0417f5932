"""Baton's engine on a CPU beside vLLM, llama.cpp, OpenVINO and transformers: prompt and decode speed, in turns.

    OMP_NUM_THREADS=2 python benchmarks/peers.py --threads 2 --rounds 3
    OMP_NUM_THREADS=2 python benchmarks/peers.py --threads 2 --gguf smollm2 --out peers_gguf
    OMP_NUM_THREADS=2 python benchmarks/peers.py --threads 2 --cpu-kernels avx2 --out peers_avx2
    OMP_NUM_THREADS=2 python benchmarks/peers.py --threads 2 --peer baton-modules --peer transformers-batches \
        --batch 8 --prompt 512 --out peers_modules

Each engine has a process and an environment of its own (benchmarks/peer_engines.py) and loads the model once; only one
engine works at a time. Decode speed is taken between tokens of the time in which all requests decode, from clock times
of each token. A figure whose rounds differ by more than a fifth is refused: its rounds are printed, the exit status is
1, and there is no ratio with it. A missing environment is made with pip: set PIP_EXTRA_INDEX_URL to torch's index for
CPUs if they shall have no CUDA libraries. A peer that fails is named and left out.

--cpu-kernels is the name of a library in kernels/cpu/library.py, or auto. avx2 and reproducible_avx2 hold the peers to
AVX2, too: torch and oneDNN (vLLM, transformers, OpenVINO) by their variables, llama.cpp by an environment of its own
that is compiled for it; the page says what each ran with. OpenVINO then computes in float32, as it does on a processor
without bfloat16; what its plugin does beside oneDNN's products, attention above all, takes what the machine has.

With --gguf, Baton and llama.cpp run one file, packed as it is; other engines run its weights, dequantized into a plain
checkpoint, and baton-bfloat16 is Baton on that.
"""

import argparse
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import MachineState
from benchmarks.peer_figures import MAX_SPREAD, describe, num_refused, summarize
from benchmarks.peer_installs import (
    HOW_PEERS_ARE_HELD,
    INSTALLERS,
    ONEDNN_VARIABLE,
    environment_of,
    kernels_env,
    peer_env,
    vllm_env,
)
from benchmarks.peer_process import Answer, EngineFailed, EngineProcess, say
from benchmarks.result_file import write_result
from kernels.cpu.library import ISA_TO_FEATURES

PEERS = ("vllm", "llamacpp", "openvino", "openvino-int8", "openvino-int4", "transformers")
PLAIN_BATON = "baton-bfloat16"
MODULES = ("baton-modules", "transformers-batches")
"""The same architecture by transformers' modules in Baton's engine, and by transformers' continuous batching."""
"""Names behind a hyphen are widths of weights: engines of the checkpoint's own width are compared apart."""
READ_GGUF = ("baton", "llamacpp")
DECODE_PROMPT_LEN = 64
SMOLLM_SIZES: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
CHECKED_TOKENS = 32


class Launcher:
    """Starts engines on a checkpoint; their logs and temporary files go to `scratch`.

    plain: the checkpoint of engines that read no GGUF file; the same folder where `folder` is not made of one.
    kernels: the instruction set of Baton's kernels.
    """

    def __init__(
        self,
        folder: Path,
        venvs: Path,
        num_threads: int,
        scratch: Path,
        plain: Path | None = None,
        kernels: str = "auto",
    ) -> None:
        self._folder = folder
        self._plain = plain or folder
        self._venvs = venvs
        self._num_threads = num_threads
        self._scratch = scratch
        self._kernels = kernels

    @contextmanager
    def start(self, name: str, dtype: str, niceness: int = 0) -> Iterator[EngineProcess]:
        """Installs an engine if need be, and runs it. Raises EngineFailed."""
        kind = name.partition("-")[0]
        venv = environment_of(kind, self._kernels)
        python = INSTALLERS[venv](self._venvs / venv) if venv in INSTALLERS else Path(sys.executable)
        env = peer_env(self._num_threads, self._scratch) | kernels_env(self._kernels)
        env |= {"PYTHONPATH": str(ROOT)} if kind == "baton" else {}
        env |= vllm_env(python, self._num_threads) if kind == "vllm" else {}
        script = str(ROOT / "benchmarks" / "peer_engines.py")
        command = [
            "nice",
            "-n",
            str(niceness),
            str(python),
            "-P",
            script,
            name,
            str(self._folder if name in READ_GGUF else self._plain),
            str(self._num_threads),
            dtype,
        ]
        say(f"{name}: loading in {dtype}")
        engine = EngineProcess(name, command, env, self._scratch / f"{name}-{dtype}.log")
        try:
            yield engine
        finally:
            engine.end()


def make_model(folder: Path, **sizes: int) -> Path:
    """Makes a checkpoint with random weights in bfloat16, of SmolLM-135M's shape or other sizes, unless it is there.

    Weights are larger than in training, or attention would matter so little that a wrong rotation gave the same tokens.
    """
    if not (folder / "config.json").exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        say(f"making a model in {folder}")
        config = LlamaConfig(
            **SMOLLM_SIZES | sizes,
            vocab_size=49152,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
            tie_word_embeddings=True,
            initializer_range=0.05,
        )
        torch.manual_seed(0)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent) as made:
            LlamaForCausalLM(config).bfloat16().save_pretrained(Path(made, "model"))
            Path(made, "model").replace(folder)
    return folder


@dataclass(frozen=True)
class Point:
    """A speed to measure: `decode` with a number of requests, or `prompt` with a number of tokens."""

    kind: str
    size: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.size} {'requests' if self.kind == 'decode' else 'tokens'}"

    def ask(self, engine: EngineProcess, num_tokens: int, seed: int) -> Answer:
        """Lets an engine generate once. No two seeds have a prefix in common, for Baton would reuse its KV."""
        if self.kind == "prompt":
            return engine.ask(1, self.size, 1, seed)
        return engine.ask(self.size, DECODE_PROMPT_LEN, num_tokens, seed)

    def rate(self, answer: Answer) -> float:
        """Returns tokens per second of the phase that the point is about. Raises EngineFailed where there is none."""
        return self.size / answer.first_s if self.kind == "prompt" else answer.decode_rate


class Comparison:
    """Engines that take turns. A peer that fails is ended and left out; Baton's failure is raised."""

    def __init__(self, engines: dict[str, EngineProcess], left_out: dict[str, str]) -> None:
        self.engines = engines
        self.left_out = left_out
        self.num_first = 0
        self.num_equal_first = Counter[str]()
        self._seeds = count(1_000)

    def take_turns(self, point: Point, num_tokens: int) -> dict[str, float]:
        """Measures a point once with each engine, each time another one first; returns tokens per second."""
        seed = next(self._seeds)
        rates: dict[str, float] = {}
        first_ids: dict[str, list[int]] = {}
        for name in rotate(list(self.engines), seed):
            try:
                answer = point.ask(self.engines[name], num_tokens, seed)
                rates[name], first_ids[name] = point.rate(answer), answer.first_ids
            except EngineFailed as error:
                if name == "baton":
                    raise
                self.engines.pop(name).end()
                leave_out(self.left_out, name, error)
        self.num_first += len(first_ids["baton"])
        for name, ids in first_ids.items():
            self.num_equal_first[name] += sum(map(int.__eq__, ids, first_ids["baton"]))
        return rates

    def run(self, points: Sequence[Point], num_tokens: int, num_rounds: int) -> dict[Point, dict[str, list[float]]]:
        """Returns tokens per second by point and engine, a value a round, after a round that warms up."""
        rounds = []
        for number in range(num_rounds + 1):
            rounds.append({point: self.take_turns(point, num_tokens) for point in points})
            say(f"round {number} of {num_rounds} is done" if number else "all engines are warm")
        return {point: {name: [one[point][name] for one in rounds[1:]] for name in self.engines} for point in points}


def rotate(names: list[str], steps: int) -> list[str]:
    """Moves the first `steps` names to the end."""
    steps %= len(names)
    return names[steps:] + names[:steps]


def num_equal(some: Sequence[int], others: Sequence[int]) -> int:
    """Counts tokens before the first difference."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False)))


def check_tokens(launcher: Launcher) -> str:
    """Compares greedy tokens of Baton and transformers in float32, for one prompt."""
    with launcher.start("baton", "float32") as baton, launcher.start("transformers", "float32") as reference:
        answers = [engine.ask(1, DECODE_PROMPT_LEN, CHECKED_TOKENS, 1).token_ids[0] for engine in (baton, reference)]
    return f"{num_equal(*answers)} of {CHECKED_TOKENS}"


def leave_out(left_out: dict[str, str], name: str, error: EngineFailed) -> None:
    left_out[name] = str(error)
    say(f"{name} is left out: {error}")


def find_checkpoints(options: argparse.Namespace, scratch: Path) -> tuple[Path, Path]:
    """Finds the folder that Baton serves, and the plain one of engines that read no GGUF file."""
    if options.gguf is None:
        folder = options.model or make_model(default_folder())
        return folder, folder
    from benchmarks.real_model import plain_checkpoint
    from engine.checkpoint.hub import find_folder

    folder = find_folder(options.gguf)
    return folder, plain_checkpoint(scratch / "plain", folder)


def compare(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Starts all engines, measures, and ends them. Raises EngineFailed for Baton."""
    machine = MachineState.measure()
    folder, plain = find_checkpoints(options, scratch)
    venvs = options.venvs.resolve()
    launcher = Launcher(folder.resolve(), venvs, options.threads, scratch, plain, options.cpu_kernels)
    checked = check_tokens(launcher)
    engines: dict[str, EngineProcess] = {}
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        peers = options.peer or [*([PLAIN_BATON] if options.gguf else []), *PEERS]
        for name in ("baton", *dict.fromkeys(peers)):
            try:
                engines[name] = stack.enter_context(launcher.start(name, options.dtype))
            except EngineFailed as error:
                if name == "baton":
                    raise
                leave_out(left_out, name, error)
        points = [Point("decode", size) for size in options.batch] + [Point("prompt", size) for size in options.prompt]
        comparison = Comparison(engines, left_out)
        rates = comparison.run(points, options.tokens, options.rounds)
    summaries = {point: summarize(rates[point]) for point in points}
    return {
        "decode": {str(point.size): one for point, one in summaries.items() if point.kind == "decode"},
        "prompt": {str(point.size): one for point, one in summaries.items() if point.kind == "prompt"},
        "table": {f"{point}, tokens/s": describe(one) for point, one in summaries.items()},
        "tokens_as_transformers_in_float32": checked,
        "first_tokens_as_baton": {
            name: f"{comparison.num_equal_first[name]} of {comparison.num_first}" for name in engines if name != "baton"
        },
        "held_to": kernels_env(options.cpu_kernels).get(ONEDNN_VARIABLE, ""),
        "threads": options.threads,
        "load_average_before": machine.load_average,
        "read_gb_s_before": machine.read_gb_s,
        "versions": {name: engine.version for name, engine in engines.items()},
        "settings": {name: engine.settings for name, engine in engines.items()},
        "left_out": left_out,
    }


def tabulate(figures: Mapping[str, Any]) -> dict[str, str]:
    """Puts all figures into rows."""
    lines = {
        "Baton's tokens as transformers' in float32": figures["tokens_as_transformers_in_float32"],
        "first tokens as Baton's": _list(figures["first_tokens_as_baton"]),
        "peers held to": figures["held_to"] and f"{figures['held_to']}: {HOW_PEERS_ARE_HELD}",
        "threads": str(figures["threads"]),
        "before": f"load average {figures['load_average_before']:.2f}, read {figures['read_gb_s_before']:.1f} GB/s",
        "versions": _list(figures["versions"]),
        "settings": _list(figures["settings"], "; "),
        "left out": _list(figures["left_out"], "; "),
    }
    return {**figures["table"], **{name: text for name, text in lines.items() if text}}


def _list(texts: Mapping[str, str], separator: str = ", ") -> str:
    return separator.join(f"{name} {text}" for name, text in texts.items())


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peer", action="append", choices=(*PEERS, PLAIN_BATON, *MODULES), help="repeatable; all of them by default"
    )
    parser.add_argument("--batch", type=_sizes, default=[1, 8, 32], help="requests at a time, for decode speed")
    parser.add_argument("--prompt", type=_sizes, default=[512, 4000], help="tokens of a prompt, for prompt speed")
    parser.add_argument("--tokens", type=int, default=64, help="of each request, for decode speed")
    parser.add_argument("--rounds", type=_rounds, default=3, help="two at least, behind one that warms up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-kernels", choices=("auto", *ISA_TO_FEATURES), default="auto", help="Baton's kernels")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--model", type=Path, help="a checkpoint folder; SmolLM-135M's shape with random weights")
    parser.add_argument("--gguf", metavar="FILE", help="a GGUF file, or a name of `baton pull`, in place of --model")
    parser.add_argument(
        "--venvs", type=Path, default=default_cache(), help="where the peers' environments are, or are made"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    parser.add_argument("--out", default="peers", help="name of the result in benchmarks/results")
    return parser.parse_args(arguments)


def _sizes(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def _rounds(text: str) -> int:
    if int(text) < 2:
        raise argparse.ArgumentTypeError("one round has no spread: at least 2")
    return int(text)


def default_folder() -> Path:
    """Names the folder of the model that is made where none is given."""
    return default_cache() / "random-135m"


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton" / "peers"


def main() -> None:
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with TemporaryDirectory() as scratch:
        try:
            figures = compare(options, Path(scratch))
        except EngineFailed as error:
            sys.exit(f"baton or its reference failed: {error}")
    with redirect_stdout(sys.stderr if options.json else sys.stdout):
        write_result(options.out, tabulate(figures), figures)
    if options.json:
        print(json.dumps(figures))
    if refused := num_refused([*figures["decode"].values(), *figures["prompt"].values()]):
        sys.exit(
            f"{refused} figures are refused: their rounds differ by more than {MAX_SPREAD:.0%}; try a quieter machine"
        )


if __name__ == "__main__":
    main()
