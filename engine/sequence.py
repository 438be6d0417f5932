"""A choice of a request while an engine has it: its tokens, its pages, how far its KV is computed."""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import cast

import numpy as np

from engine.events import ChoiceId
from engine.model.batch import Model
from engine.model.dropping import Watch
from engine.request import ChoiceSoFar, EngineRequest, HandOff
from engine.sampler import Draw
from engine.schedule.batcher import Candidate, Gate, Phase
from wire.ids import PageId
from wire.keys import BlockName, NameChain
from wire.kv_policy import Dropping, Rule
from wire.sampling import FinishReason


class BlockTable:
    """The pages of a sequence, in order; `row` is what a kernel reads of it, int32.

    behind: blocks before the window, and after the sinks, which have no page; the row has other sequences' or 0 there,
    and nothing reads them. num_dropped: tokens whose KV was dropped; the pages have the others, without gaps.
    """

    def __init__(self, pages: Iterable[PageId] = (), behind: range = range(0), num_dropped: int = 0) -> None:
        self._pages = array("i", pages)
        self._pages[behind.start : behind.start] = array("i", [0] * len(behind))
        self.behind = behind
        self.num_dropped = num_dropped

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
        places = np.arange(start, stop) - self.num_dropped
        return self.row[places // block_size].astype(np.int64) * block_size + places % block_size

    def drop(self, places: Iterable[int], block_size: int) -> list[PageId]:
        """Takes full pages out; returns them."""
        pages = [PageId(self._pages.pop(place)) for place in sorted(places, reverse=True)]
        self.num_dropped += len(pages) * block_size
        return pages


@dataclass(frozen=True)
class End:
    """The reason of a choice's end, and the token that ended it, if one did."""

    reason: FinishReason
    stop_token_id: int | None = None


class KeptPrompt:
    """The tokens that a policy keeps of a prompt, `num_tokens` of them; the others, `num_dropped`, go at its end.

    has_names: their blocks have names. reserved: pages for them, until the prompt's end. delayed: blocks of the prompt
    that the store gets after these, each with a reference. is_lost: the store lacks them, so that they are chosen anew.
    """

    @classmethod
    def of(cls, dropping: Dropping | None, num_prompt: int, block_size: int) -> "KeptPrompt | None":
        """Returns None where the whole prompt stays."""
        if dropping is None or not dropping.num_copied(num_prompt, block_size):
            return None
        return cls(dropping, num_prompt, block_size)

    def __init__(self, dropping: Dropping, num_prompt: int, block_size: int) -> None:
        self.num_blocks = dropping.num_copied(num_prompt, block_size)
        self.num_tokens = self.num_blocks * block_size
        self.num_dropped = num_prompt - self.num_tokens
        self.has_names = dropping.rule.names_kept
        self.reserved: list[PageId] = []
        self.delayed: list[tuple[BlockName, PageId]] = []
        self.is_lost = False
        self._terms = dropping.terms
        self._num_prompt = num_prompt
        self._names: NameChain | None = None

    def names(self, prompt: NameChain) -> NameChain:
        """Returns the chain that begins with the kept blocks, given that of the prompt."""
        if self._names is None:
            self._names = prompt.kept(self._terms, self._num_prompt, self.num_blocks)
        return self._names


class Sequence:
    """Known tokens are prompt plus output; `num_computed` of them have KV in `pages`; the last known one never has.

    end_ids: tokens that end the choice. max_output: output tokens at which it ends for its length. num_scored: as in
    EngineRequest, and grows. kept: of a prompt that does not stay whole. watch: while tokens may still be dropped.
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
        self._dropping = _dropping_of(request, self._block_size)
        self.kept = KeptPrompt.of(self._dropping, self.num_prompt, self._block_size)
        self.watch = self._new_watch()

    @property
    def num_known(self) -> int:
        return self.num_prompt + len(self.output_ids)

    @property
    def num_computed(self) -> int:
        """Tokens with KV. Follows from the number of known ones while the sequence decodes, step by step."""
        return self.num_known - 1 if self.phase is Phase.DECODE else self._num_computed

    @property
    def num_stored(self) -> int:
        """Tokens whose KV is in the pages."""
        return self.num_computed - self.pages.num_dropped

    @property
    def is_due(self) -> bool:
        """Whether tokens may be dropped before the next one runs."""
        return self.watch is not None and self.num_computed == self.watch.boundary

    @property
    def findable(self) -> KeptPrompt | None:
        """The kept prompt if its blocks may be found: a first token has been drawn from the whole prompt."""
        kept = self.kept
        if kept is None or kept.is_lost or not kept.has_names or self.request.computes_all:
            return None
        return kept if self.output_ids else None

    def clipped(self, num_tokens: int) -> int:
        """Cuts the next tokens to run at the next boundary."""
        return num_tokens if self.watch is None else min(num_tokens, self.watch.boundary - self.num_computed)

    @property
    def wants_scores(self) -> bool:
        """Whether tokens of the prompt are still to be scored; the leader's run does it before the first output."""
        return 0 < self.num_scored < self.num_prompt and not self.output_ids

    @property
    def num_readable(self) -> int:
        """Known tokens whose KV may be read from elsewhere: not the last, nor one whose logits are wanted.

        Whole blocks before the watched rows, where there are such.
        """
        num_tokens = self.num_scored - 1 if self.wants_scores else self.num_known - 1
        if self.watch is None:
            return num_tokens
        return min(num_tokens, self.watch.start) // self._block_size * self._block_size

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
        self.watch = self._new_watch()

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
        num_more = self._num_reserved - self._num_pageless
        return Candidate(
            self.handle,
            self.phase,
            num_known=self.num_known + num_more,
            num_computed=max(0, num_computed + num_more),
            num_blocks=len(self.pages),
            num_behind=len(self.pages.behind),
            num_spare=0 if self.kept is None else len(self.kept.reserved),
        )

    @property
    def follower(self) -> Candidate:
        """The sequence as batchers see it while it waits for a sibling's prompt: it shares the full blocks."""
        num_pageless, num_more = self._num_pageless, self._num_reserved - self._num_pageless
        num_readable = self.num_known - 1 + num_more if self.watch is None or num_pageless else self.num_readable
        num_shared = min(self.num_prompt, num_readable) // self._block_size
        num_computed = num_shared * self._block_size
        num_behind = len(self._layout.behind(num_computed))
        return Candidate(self.handle, self.phase, self.num_known + num_more, num_computed, num_shared, num_behind)

    @property
    def _num_pageless(self) -> int:
        """Known tokens that need no page: dropped ones, or the tokens that findable kept blocks leave out."""
        findable = self.findable if self.phase is Phase.WAITING else None
        return self.pages.num_dropped if findable is None else findable.num_dropped

    @property
    def _num_reserved(self) -> int:
        """Tokens whose pages admission reserves for the kept prompt; to batchers they are tokens like others."""
        if self.kept is None or self.phase is not Phase.WAITING or self.findable is not None:
            return 0
        return self.kept.num_tokens

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

    def cover_kept(self, num_tokens: int) -> list[BlockName]:
        """Names the blocks of the kept prompt, and of the tokens behind it, of the first `num_tokens` known ones."""
        assert self.kept is not None, "the whole prompt stays"
        return self._kept_keys_of(num_tokens).cover(num_tokens - self.kept.num_dropped)

    def tail(self) -> BlockName | None:
        """Names the last block with KV if it is filled partly, and has a name."""
        keys = None if self._layout.has_open_blocks else self._stored_keys()
        return None if keys is None else keys.tail(self.num_stored)

    def full_blocks(self, start: int) -> list[tuple[BlockName, PageId]]:
        """Lists the blocks that became full since the sequence had `start` tokens with KV, and behind them its sinks.

        Without its sinks a prefix is worth nothing: so they are not used less of late than the rest.
        """
        start, stop = start - self.pages.num_dropped, self.num_stored
        first, last = start // self._block_size, stop // self._block_size
        keys = self._stored_keys() if first < last else None
        if keys is None:
            return []
        num_sinks = min(first, self._layout.num_sink_blocks)
        names = keys.full(stop, start) + keys.full(num_sinks * self._block_size)
        return list(zip(names, self.pages[first:last] + self.pages[:num_sinks], strict=True))

    def _stored_keys(self) -> NameChain | None:
        """Brings the chain of the pages' tokens up to the last computed one; None if they have no names."""
        if not self.pages.num_dropped:
            return self._keys_of(self.num_computed)
        return self._kept_keys_of(self.num_computed) if self.kept is not None and self.kept.has_names else None

    def _kept_keys_of(self, num_tokens: int) -> NameChain:
        """Brings the chain of kept tokens up to the first `num_tokens` known ones."""
        assert self.kept is not None, "the whole prompt stays"
        chain = self.kept.names(self._keys_of(self.num_prompt))
        start = chain.num_tokens + self.kept.num_dropped
        chain.extend(self.tokens(start, max(0, num_tokens - start)))
        return chain

    def _new_watch(self) -> Watch | None:
        return None if self._dropping is None else Watch(self._dropping, self.num_prompt, self._block_size)

    def _keys_of(self, num_tokens: int) -> NameChain:
        """Brings the chain of keys up to the first `num_tokens` known tokens."""
        start = self._keys.num_tokens
        self._keys.extend(self.tokens(start, max(0, num_tokens - start)))
        return self._keys


def _dropping_of(request: EngineRequest, block_size: int) -> Dropping | None:
    """Returns the policy of a request; None where it drops nothing of this prompt, or of a hand-off's KV."""
    dropping, num_prompt = request.dropping, len(request.prompt_ids)
    if dropping is None or dropping.rule is Rule.H2O:
        return None if isinstance(request, HandOff) else dropping
    return dropping if dropping.num_copied(num_prompt, block_size) else None
