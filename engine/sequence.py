"""A choice of a request while an engine has it: its tokens, its pages, how far its KV is computed."""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import cast

import numpy as np

from engine.events import ChoiceId
from engine.model.batch import Model
from engine.request import ChoiceSoFar, EngineRequest, HandOff
from engine.sampler import Draw
from engine.schedule.batcher import Candidate, Gate, Phase
from wire.ids import PageId
from wire.keys import BlockName, NameChain
from wire.sampling import FinishReason


class BlockTable:
    """The pages of a sequence, in order; `row` is what a kernel reads of it, int32.

    behind: blocks before the window, and after the sinks, which have no page; the row has other sequences' or 0 there,
    and nothing reads them.
    """

    def __init__(self, pages: Iterable[PageId] = (), behind: range = range(0)) -> None:
        self._pages = array("i", pages)
        self._pages[behind.start : behind.start] = array("i", [0] * len(behind))
        self.behind = behind

    def __len__(self) -> int:
        return len(self._pages)

    def __getitem__(self, span: slice) -> list[PageId]:
        """Lists pages; ValueError for a block behind the window, whose page may be another sequence's by now."""
        start, stop, _ = span.indices(len(self._pages))
        if lost := range(max(start, self.behind.start), min(stop, self.behind.stop)):
            raise ValueError(f"block {lost.start} is behind the window")
        return cast(list[PageId], self._pages[span].tolist())

    def extend(self, pages: Iterable[PageId]) -> None:
        self._pages.extend(pages)

    @property
    def held(self) -> list[PageId]:
        """Lists the pages that the sequence has, the window's before the sinks'."""
        return self[self.behind.stop :] + self[: self.behind.start]

    def leave_behind(self, behind: range) -> list[PageId]:
        """Leaves these blocks behind the window; returns the pages that this frees."""
        pages = self[max(behind.start, self.behind.stop) : behind.stop]
        self.behind = max(self.behind, behind, key=len)
        return pages

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
    """Known tokens are prompt plus output; `num_computed` of them have KV in `pages`; the last known one never has.

    end_ids: tokens that end the choice. max_output: output tokens at which it ends for its length. num_scored: as in
    EngineRequest, and grows.
    """

    def __init__(self, handle: int, request: EngineRequest, choice: ChoiceSoFar, model: Model) -> None:
        sampling = request.sampling
        self.handle = handle
        self.request = request
        self.choice = ChoiceId(request.request_id, choice.index)
        self.output_ids = list(choice.output_ids)
        self.num_prompt = len(request.prompt_ids)
        self.end_ids = frozenset((*sampling.stop_token_ids, *(() if sampling.ignore_eos else model.eos_token_ids)))
        self.max_output = min(sampling.max_tokens, model.max_context_len - self.num_prompt)
        self.pages = BlockTable()
        self.phase = Phase.WAITING
        self.gate: Gate | None = None
        self.has_started = False
        self.num_scored = request.num_scored
        self._num_computed = 0
        self._early_ids = (*sampling.stop_token_ids, *model.eos_token_ids)
        self._layout = model.layout
        self._block_size = model.layout.block_size
        self._keys = NameChain(request.root, self._block_size, request.public)

    @property
    def num_known(self) -> int:
        return self.num_prompt + len(self.output_ids)

    @property
    def num_computed(self) -> int:
        """Tokens with KV. Follows from the number of known ones while the sequence decodes, step by step."""
        return self.num_known - 1 if self.phase is Phase.DECODE else self._num_computed

    @property
    def wants_scores(self) -> bool:
        """Whether tokens of the prompt are still to be scored; the leader's run does it before the first output."""
        return 0 < self.num_scored < self.num_prompt and not self.output_ids

    @property
    def num_readable(self) -> int:
        """Known tokens whose KV may be read from elsewhere: not the last, nor one whose logits are wanted."""
        return self.num_scored - 1 if self.wants_scores else self.num_known - 1

    def begin_run(self, num_computed: int) -> None:
        """Goes on from so many tokens with KV: decoding, if that is all but the last token emitted.

        A hand-off never decodes: it wants one token.
        """
        self._num_computed = num_computed
        is_complete = self.output_ids and num_computed == self.num_known - 1
        decodes = is_complete and not isinstance(self.request, HandOff)
        self.phase = Phase.DECODE if decodes else Phase.PREFILL

    def advance(self, num_tokens: int) -> None:
        """Counts tokens of a chunk as computed."""
        self._num_computed += num_tokens

    def drop_pages(self) -> None:
        """Forgets all pages and the KV in them. A sequence that ends or waits has none."""
        self.pages = BlockTable()
        self._num_computed = 0

    def draw(self, guesses: Seq[int] = ()) -> Draw:
        """Tells how to choose the token that follows the known ones, and guesses of the next ones."""
        sampling = self.request.sampling
        output_ids = [*self.output_ids, *guesses] if guesses else self.output_ids
        banned = () if len(output_ids) >= sampling.min_tokens else self._early_ids
        return Draw(sampling, self.choice.index, self.request.prompt_ids, output_ids, banned)

    @property
    def end(self) -> End:
        """Tells the end that the last token makes: an end or stop token, else max_tokens or a full context."""
        last = self.output_ids[-1]
        return End(FinishReason.STOP, last) if last in self.end_ids else End(FinishReason.LENGTH)

    @property
    def candidate(self) -> Candidate:
        """The sequence as batchers see it: while it fetches, it has no token to run and no page to yield."""
        num_computed = self.num_known if self.phase is Phase.FETCHING else self.num_computed
        num_behind = len(self.pages.behind)
        return Candidate(self.handle, self.phase, self.num_known, num_computed, len(self.pages), num_behind)

    @property
    def follower(self) -> Candidate:
        """The sequence as batchers see it while it waits for a sibling's prompt: it shares the full blocks."""
        num_shared = min(self.num_prompt, self.num_known - 1) // self._block_size
        num_computed = num_shared * self._block_size
        num_behind = len(self._layout.behind(num_computed))
        return Candidate(self.handle, self.phase, self.num_known, num_computed, num_shared, num_behind)

    def tokens(self, start: int, num_tokens: int) -> list[int]:
        """Slices `num_tokens` known tokens from position `start` on."""
        from_prompt = self.request.prompt_ids[start : start + num_tokens]
        first_output = max(0, start - self.num_prompt)
        return [*from_prompt, *self.output_ids[first_output : first_output + num_tokens - len(from_prompt)]]

    def cover(self, num_tokens: int) -> list[BlockName]:
        """Names the blocks of the first `num_tokens` known tokens, a partly filled last one too where it has a name."""
        if self._layout.has_open_blocks:
            num_tokens -= num_tokens % self._block_size
        return self._keys_of(num_tokens).cover(num_tokens)

    def tail(self, num_tokens: int) -> BlockName | None:
        """Names the last block of the first `num_tokens` known tokens if they fill it partly, and it has a name."""
        return None if self._layout.has_open_blocks else self._keys_of(num_tokens).tail(num_tokens)

    def full_blocks(self, start: int) -> list[tuple[BlockName, PageId]]:
        """Lists the blocks that became full since the sequence had `start` tokens with KV, and behind them its sinks.

        Without its sinks a prefix is worth nothing: so they are not used less of late than the rest.
        """
        stop = self.num_computed
        first, last = start // self._block_size, stop // self._block_size
        if first == last:
            return []
        num_sinks, keys = min(first, self._layout.num_sink_blocks), self._keys_of(stop)
        names = keys.full(stop, start) + keys.full(num_sinks * self._block_size)
        return list(zip(names, self.pages[first:last] + self.pages[:num_sinks], strict=True))

    def _keys_of(self, num_tokens: int) -> NameChain:
        """Brings the chain of keys up to the first `num_tokens` known tokens."""
        start = self._keys.num_tokens
        self._keys.extend(self.tokens(start, max(0, num_tokens - start)))
        return self._keys
