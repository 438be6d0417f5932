"""A choice of a request while an engine has it: its tokens, its pages, how far its KV is computed."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import cast

import numpy as np

from engine.model.batch import Model
from engine.request import ChoiceSoFar, EngineRequest
from engine.schedule.batcher import Candidate, Gate
from wire.ids import PageId
from wire.keys import BlockName, KeyChain
from wire.sampling import FinishReason


class State(Enum):
    """The state of a sequence. HANDING_OFF has its first token, and its pages until the store has them."""

    WAITING = "waiting"
    FETCHING = "fetching"
    RUNNING = "running"
    HANDING_OFF = "handing_off"
    ENDED = "ended"


class BlockTable:
    """The pages of a sequence, in order; `row` is what a kernel reads of it, int32."""

    def __init__(self, pages: Iterable[PageId] = ()) -> None:
        self._pages = array("i", pages)

    def __len__(self) -> int:
        return len(self._pages)

    def __getitem__(self, span: slice) -> list[PageId]:
        return cast(list[PageId], self._pages[span].tolist())

    def extend(self, pages: Iterable[PageId]) -> None:
        self._pages.extend(pages)

    @property
    def row(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Views the pages; the view must be gone before the next change."""
        return np.frombuffer(self._pages, dtype=np.int32)

    def slots(self, start: int, stop: int, block_size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Locates the KV of positions start to stop - 1: page * block_size + offset."""
        positions = np.arange(start, stop)
        return self.row[positions // block_size].astype(np.int64) * block_size + positions % block_size


@dataclass(frozen=True)
class End:
    """The reason of a choice's end, and the token that ended it, if one did."""

    reason: FinishReason
    stop_token_id: int | None = None


class Sequence:
    """Known tokens are prompt plus output; `num_computed` of them have KV in `pages`; the last known one never has."""

    def __init__(self, handle: int, request: EngineRequest, choice: ChoiceSoFar, block_size: int) -> None:
        self.handle = handle
        self.request = request
        self.choice = choice.index
        self.output_ids = list(choice.output_ids)
        self.pages = BlockTable()
        self.num_computed = 0
        self.state = State.WAITING
        self.gate: Gate | None = None
        self.has_started = False
        self._block_size = block_size
        self._keys = KeyChain(request.root, block_size)
        self._keys.extend(request.prompt_ids)
        self._keys.extend(choice.output_ids)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_known(self) -> int:
        return self.num_prompt + len(self.output_ids)

    @property
    def candidate(self) -> Candidate:
        """The sequence as batchers see it: while it fetches, it has no token to run and no page to yield."""
        missing = 0 if self.state is State.FETCHING else self.num_known - self.num_computed
        return Candidate(self.handle, self.num_known, self.num_known - missing, len(self.pages))

    @property
    def follower(self) -> Candidate:
        """The sequence as batchers see it while it waits for a sibling's prompt: it shares the full blocks."""
        num_shared = min(self.num_prompt, self.num_known - 1) // self._block_size
        return Candidate(self.handle, self.num_known, num_shared * self._block_size, num_shared)

    def append(self, token_id: int) -> None:
        self.output_ids.append(token_id)
        self._keys.extend((token_id,))

    def end(self, model: Model) -> End | None:
        """Tells the end that the last token makes: an end or stop token, max_tokens, or a full context."""
        sampling, last = self.request.sampling, self.output_ids[-1]
        if last in sampling.stop_token_ids or (last in model.eos_token_ids and not sampling.ignore_eos):
            return End(FinishReason.STOP, last)
        if len(self.output_ids) >= sampling.max_tokens or self.num_known >= model.max_context_len:
            return End(FinishReason.LENGTH)
        return None

    def banned_ids(self, model: Model) -> tuple[int, ...]:
        """Lists the tokens that would end the choice before min_tokens."""
        sampling = self.request.sampling
        if len(self.output_ids) >= sampling.min_tokens:
            return ()
        return (*sampling.stop_token_ids, *model.eos_token_ids)

    def tokens(self, start: int, num_tokens: int) -> list[int]:
        """Slices `num_tokens` known tokens from position `start` on."""
        from_prompt = self.request.prompt_ids[start : start + num_tokens]
        first_output = max(0, start - self.num_prompt)
        return [*from_prompt, *self.output_ids[first_output : first_output + num_tokens - len(from_prompt)]]

    def cover(self, num_tokens: int) -> list[BlockName]:
        """Names the blocks of the first `num_tokens` known tokens, a partly filled last one included."""
        return self._keys.cover(num_tokens)

    def tail(self, num_tokens: int) -> BlockName | None:
        """Names the last block of the first `num_tokens` known tokens if they fill it partly."""
        return self._keys.tail(num_tokens)

    def full_blocks(self, start: int, stop: int) -> list[tuple[BlockName, PageId]]:
        """Lists the blocks that became full as the computed tokens went from `start` to `stop`."""
        first, last = start // self._block_size, stop // self._block_size
        return list(zip(self._keys.full(stop, start), self.pages[first:last], strict=True)) if first < last else []
