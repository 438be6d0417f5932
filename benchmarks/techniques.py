"""Techniques for smaller KV caches, as docs/quality.md lists them, and the load under which their speed is measured."""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from benchmarks.choosers import Drawn, Latest
from benchmarks.quality_backends import CutText, EngineBackend, ScoringDecoder
from engine.kv.dropping import HEAVIEST, Chooser
from kernels.selection import select_backend
from wire.kv_policy import Dropping, parse_kv_policy

_SAME = "the same tokens"
FULL = "full, float32"
FULL_BFLOAT16 = "full, bfloat16"


@dataclass(frozen=True)
class Technique:
    """A way to keep KV in fewer bytes: its settings, the case that it is for, and the promise for a lost worker.

    when: the case, with `{changed}` and `{found}` of the real model's row; empty for a control. window: tokens of the
    model's window. weights: int8, int4, or as they are. over: the technique whose tokens its own are compared with.
    """

    name: str
    when: str
    promise: str = _SAME
    dtype: str | None = None
    kv_dtype: str = "auto"
    kv_policy: str = "full"
    chooser: Chooser = HEAVIEST
    window: int | None = None
    weights: str = ""
    over: str = FULL

    def load(
        self, model: Path, scratch: Path, device: str = "cpu", block_size: int = 16, num_blocks: int = 2048
    ) -> EngineBackend:
        """Loads a model with these settings."""
        folder = model if self.window is None else _with_window(model, self.window, scratch / self.name)
        backend = select_backend(torch.device(device), f"auto-{self.weights}") if self.weights else None
        decoder = ScoringDecoder.load(
            folder, self.dtype, torch.device(device), block_size, backend, self.kv_dtype, self.kv_policy
        )
        assert isinstance(decoder, ScoringDecoder)
        policy = parse_kv_policy(self.kv_policy)
        return EngineBackend(decoder, num_blocks, policy if isinstance(policy, Dropping) else None, self.chooser)


TECHNIQUES = (
    Technique(FULL, "where memory is no limit; the measure of the others"),
    Technique(FULL_BFLOAT16, "the default of most checkpoints; it halves the weights, too", dtype="bfloat16"),
    Technique(
        "int8",
        "first of all: half the bytes, no token goes, and facts stay. Answers change in a token of 32 about as often "
        "as by another dtype of the whole model: {changed} of SmolLM2's over bfloat16",
        kv_dtype="int8",
    ),
    Technique("int8 over bfloat16", "", dtype="bfloat16", kv_dtype="int8", over=FULL_BFLOAT16),
    Technique(
        "fp8",
        "only where a model's values need its range: it takes int8's bytes, and changes more answers ({changed})",
        kv_dtype="fp8",
    ),
    Technique(
        "int4",
        "where int8 is too large still, most answers may change ({changed}), and no fact of the prompt is wanted "
        "(SmolLM2 finds {found} at 1,000 tokens, though the demo model loses none)",
        kv_dtype="int4",
    ),
    Technique("window of 256", "never as a setting: it is a property of a model, trained with it", window=256),
    Technique("sinks=4+252", "for endless streams, of which only the latest text matters", kv_policy="sinks=4+252"),
    Technique(
        "snapkv=25%",
        "for long prompts of a model that was tried with it: SmolLM2 keeps its facts, the demo model loses half of "
        "them. Nearly all answers have other words ({changed})",
        kv_policy="snapkv=25%",
    ),
    Technique(
        "h2o=25%",
        "for long answers that go on with the gist of their text. Not for facts of a prompt: SmolLM2 finds {found} at "
        "1,000 tokens",
        kv_policy="h2o=25%",
    ),
    Technique("latest 25%", "", kv_policy="snapkv=25%", chooser=Latest()),
    Technique("25% at random", "", kv_policy="snapkv=25%", chooser=Drawn()),
    Technique("h2o=10%", "as h2o=25%, in fewer bytes: SmolLM2 finds {found}", kv_policy="h2o=10%"),
    Technique("latest 10%", "", kv_policy="snapkv=10%", chooser=Latest()),
    Technique("10% at random", "", kv_policy="snapkv=10%", chooser=Drawn()),
)


@dataclass(frozen=True)
class Load:
    """Texts that decode together, each so many tokens long, for some steps; and the rounds of that."""

    num_texts: int
    text_len: int
    num_steps: int
    num_rounds: int

    def __str__(self) -> str:
        what = f"{self.num_texts} requests of {self.text_len} tokens that decode together"
        return f"{what}, {self.num_steps} steps, median of {self.num_rounds} rounds"


LOAD = Load(num_texts=16, text_len=900, num_steps=64, num_rounds=5)


@dataclass(frozen=True)
class Decoding:
    """The speed of decoding, and bytes of KV for each known token, under one load.

    tokens_per_s: None where the technique has not taken turns with the others.
    """

    tokens_per_s: float | None
    bytes_per_token: float


def decode(backend: EngineBackend, texts: Sequence[CutText], num_steps: int) -> Decoding:
    """Times steps in which all texts decode, and counts their pages after them."""
    core, started = backend.core, set[str]()
    begun = [backend.begin(text, 2 * num_steps, ignore_eos=True) for text in texts]
    num_known = sum(len(text.token_ids) for text in texts)
    while len(started) < len(texts):
        output = backend.step()
        started.update(choice.attempt_id for choice in output.choices)
        num_known += len(output.token_ids)
    began_s = time.perf_counter()
    num_tokens = sum(len(backend.step().token_ids) for _ in range(num_steps))
    seconds = time.perf_counter() - began_s
    blocks = core.stats().blocks
    for request_id in begun:
        core.abort(request_id)
    layout = core.pool.layout
    open_bytes = replace(layout, quantization="none").payload_bytes
    num_bytes = (blocks.owned + blocks.published) * layout.payload_bytes + core.pool.num_open * open_bytes
    return Decoding(num_tokens / seconds, num_bytes / (num_known + num_tokens))


def decode_in_turns(
    backends: Sequence[EngineBackend], texts: Sequence[CutText], num_steps: int, num_rounds: int
) -> list[Decoding]:
    """Takes the median speed of each backend over rounds, each round another one first."""
    rounds: list[list[Decoding]] = [[] for _ in backends]
    for number in range(num_rounds):
        for turn in range(len(backends)):
            place = (number + turn) % len(backends)
            rounds[place].append(decode(backends[place], texts, num_steps))
    return [Decoding(median(one.tokens_per_s or 0 for one in taken), taken[-1].bytes_per_token) for taken in rounds]


def _with_window(model: Path, window: int, folder: Path) -> Path:
    """Copies a Llama's folder as that of a Mistral, which differs by its window."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
