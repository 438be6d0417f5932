"""The engine as a library: load a model, generate, read the text. In process, without Ray.

>>> engine = Engine.load("path/to/a/checkpoint")
>>> for completion in engine.generate(["Once upon a time"], SamplingParams(max_tokens=20)):
...     print(completion.choices[0].text)
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.fingerprint import DigestCache
from engine.checkpoint.hub import find_folder
from engine.core import EngineCore
from engine.events import Event, Failed, Finished
from engine.grammar.grammars import Grammars
from engine.kv.dropping import HEAVIEST, Chooser
from engine.model.loading import load_model
from engine.request import ChoiceSoFar, EngineRequest
from engine.schedule.batcher import Batcher
from engine.schedule.continuous_batcher import ContinuousBatcher
from kernels.selection import select_backend
from kv_store.device_pool import DevicePool
from kv_store.page_store import PageStore
from kv_store.transfers import InlineTransfers, NoStore
from text.incremental import IncrementalText, Piece
from text.tokenizer import Tokenizer
from wire.ids import AttemptId, NamespaceRoot
from wire.kv_policy import Dropping, parse_kv_policy
from wire.layout import KVLayout
from wire.sampling import DEFAULTS, FinishReason, SamplingParams

if TYPE_CHECKING:
    from kv_store.prefix_store import PrefixStore

_ROOT = NamespaceRoot(bytes(32))


@dataclass
class ChoiceOutput:
    """An answer to a prompt, out of n."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None


@dataclass(frozen=True)
class EngineCompletion:
    """A prompt's answers, in order of their index."""

    prompt_ids: tuple[int, ...]
    choices: tuple[ChoiceOutput, ...]


class OpenStore(Protocol):
    """A way to open the store of a model's blocks: `functools.partial(PrefixStore, tiers, secret=...)`."""

    def __call__(self, *, model: bytes, layout: KVLayout) -> "PrefixStore": ...


class Engine:
    """A model in this process, its tokenizer and its pages of KV. Prompts given together run in continuous batches.

    store: keeps blocks beyond the pages; the caller closes it. None without a store.
    """

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Tokenizer,
        dropping: Dropping | None = None,
        defaults: SamplingParams = DEFAULTS,
        store: "PrefixStore | None" = None,
    ) -> None:
        """`dropping`: the policy by which each request drops KV, if any. `defaults`: parameters for requests without
        sampling.
        """
        self.core = core
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.store = store
        self._dropping = dropping
        self._grammars = Grammars(lambda: tokenizer.definition, core.model.vocab_size, core.model.eos_token_ids)

    @classmethod
    def load(
        cls,
        model: str,
        *,
        dtype: str | None = None,
        kv_dtype: str = "auto",
        kv_policy: str = "full",
        device: str = "cpu",
        block_size: int = 16,
        num_blocks: int = 1024,
        batcher: Batcher | None = None,
        chooser: Chooser = HEAVIEST,
        store: OpenStore | None = None,
    ) -> "Engine":
        """Loads a checkpoint folder, or a hub's name of one. Raises ModelError if it cannot be served.

        kv_dtype: a key of wire.layout.KV_DTYPES. kv_policy: a policy of wire.kv_policy, checked here. chooser: picks
        the tokens that a dropping policy keeps. store: opens the store for the model's fingerprint and layout, which
        names of a cluster's blocks begin with, too. A step writes the blocks that it fills to all tiers; a prompt's
        first step reads its front from there. Raises the errors of `store`.
        """
        policy = parse_kv_policy(kv_policy, kv_dtype)
        folder: Path = find_folder(model)
        checkpoint = Checkpoint(folder)
        tokenizer = checkpoint.load_tokenizer()
        backend = select_backend(torch.device(device))
        loaded = load_model(folder, dtype, torch.device(device), block_size, backend, kv_dtype, kv_policy)
        pool, opened = DevicePool(loaded.layout, num_blocks, loaded.device), None
        if store is not None:
            fingerprint = checkpoint.fingerprint(loaded.layout.dtype, backend.version, DigestCache.of_user())
            opened = store(model=fingerprint, layout=loaded.layout)
        transfers = InlineTransfers(PageStore(opened.tiers, pool)) if opened else NoStore()
        core = EngineCore(loaded, pool, batcher or ContinuousBatcher(), transfers, chooser=chooser)
        return cls(core, tokenizer, policy if isinstance(policy, Dropping) else None, checkpoint.sampling, opened)

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling: SamplingParams | None = None
    ) -> list[EngineCompletion]:
        """Answers all prompts, text or token ids; without `sampling` as generation_config.json advises.

        Raises the errors of `Grammars.prepare` and `EngineCore.add`, or that of a failed request.
        """
        root = _ROOT if self.store is None else self.store.root
        runs = [_Run(self.tokenizer, root, prompt, sampling or self.defaults, self._dropping) for prompt in prompts]
        by_id = {run.request.attempt_id: run for run in runs}
        try:
            for run in runs:
                self.core.add(self._grammars.prepare(run.request))
            while self.core.has_requests:
                output = self.core.step()
                for choice, token_id in zip(output.choices, output.token_ids, strict=True):
                    by_id[choice.attempt_id].gain(choice.index, token_id)
                for event in output.events:
                    by_id[event.attempt_id].take(event)
                for run in runs:
                    if run.is_done:
                        self.core.abort(run.request.attempt_id)
        finally:
            for attempt_id in by_id:
                self.core.abort(attempt_id)
        return [EngineCompletion(run.request.prompt_ids, tuple(run.outputs)) for run in runs]


class _Run:
    """A prompt under way."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        root: NamespaceRoot,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        dropping: Dropping | None,
    ) -> None:
        prompt_ids = tuple(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        choices = tuple(ChoiceSoFar(index) for index in range(sampling.n))
        attempt_id = AttemptId(secrets.token_hex(8))
        self.request = EngineRequest(
            attempt_id=attempt_id,
            root=root,
            prompt_ids=prompt_ids,
            sampling=sampling,
            choices=choices,
            dropping=dropping,
        )
        self.outputs = [ChoiceOutput() for _ in choices]
        decoding = tokenizer if sampling.skip_special_tokens else tokenizer.spelling(tokenizer.special_tokens)
        settings = sampling.stop, sampling.min_tokens, sampling.include_stop_str_in_output
        self._texts = [IncrementalText(decoding, *settings) for _ in choices]

    @property
    def is_done(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)

    def gain(self, choice: int, token_id: int) -> None:
        if self.outputs[choice].finish_reason is None:
            self.outputs[choice].token_ids.append(token_id)
            self._add(choice, self._texts[choice].feed((token_id,)))

    def take(self, event: Event) -> None:
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished) and self.outputs[event.choice].finish_reason is None:
            output = self.outputs[event.choice]
            self._add(event.choice, self._texts[event.choice].flush())
            if output.finish_reason is None:
                output.finish_reason, output.matched_stop = event.reason, event.stop_token_id

    def _add(self, choice: int, piece: Piece) -> None:
        output = self.outputs[choice]
        output.text += piece.text
        if piece.matched_stop is not None:
            output.finish_reason, output.matched_stop = FinishReason.STOP, piece.matched_stop
