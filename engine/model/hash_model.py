"""A model of hashes; its next token is right only if every block of its KV is.

    state[p]  = mix(sum[p-1], token[p])                            sum[-1] = mix(seed)
    stored    = state[p] * FACTOR[w]                               in every 64-bit word w of position p, in all layers
    sum[p]    = sum[p-1] + PLACE[p] * (WEIGHT . stored at p)       less the shares behind the window, but for the sinks'
    next      = mix(sum[p]) % vocab_size                           the likeliest token; the other logits are noise

All modulo 2**64. No sum outlives its step: each step reads all earlier positions through the block tables. So KV is a
pure function of the prefix (and of layout and seed), and a wrong, stale or misplaced block changes all later tokens.
Where KV was dropped, p counts kept positions, and the state has the difference.
"""

from collections import deque
from collections.abc import Sequence

import torch

from engine.model.batch import Batch, decode_greedily
from kernels.backend import KVPages
from wire.layout import KVLayout

_MASK = (1 << 64) - 1
_TOP_LOGIT = 5.0
_NOISE = 4.0
_WEIGHING = 0x2545F4914F6CDD1D


class HashModel:
    """A `CausalModel` that costs next to nothing, on a CPU. Its twin is `engine.model.decoder.Decoder`."""

    device = torch.device("cpu")
    keeps_phases = False

    def __init__(
        self,
        layout: KVLayout,
        vocab_size: int,
        max_context_len: int = 4096,
        eos_token_ids: tuple[int, ...] = (),
        seed: int = 0,
    ) -> None:
        """Different seeds make different models.

        Raises ValueError for a head that does not fill whole 64-bit words, and for KV in int4.
        """
        num_words, rest = divmod(layout.head_dim * layout.item_bits, 64)
        if rest or layout.has_open_blocks:
            raise ValueError("a head must fill whole 64-bit words, and have no open blocks")
        shape = (layout.num_layers, 2, layout.num_kv_heads, num_words)
        self.layout = layout
        self.vocab_size = vocab_size
        self.max_context_len = max_context_len
        self.eos_token_ids = eos_token_ids
        self._empty = _mix(seed)
        self._places = [_odd(1, position) for position in range(max_context_len)]
        self._place_words = _words(self._places)
        self._token_words = _words([_odd(2, token) for token in range(vocab_size)])
        factors = [_odd(3, index) for index in range(2 * layout.num_layers * layout.num_kv_heads * num_words)]
        # One odd weight and the rest even, so that their sum keeps all bits of a state.
        weights = [_odd(4, index) - (index > 0) for index in range(len(factors))]
        self._factors, self._weights = _words(factors).view(shape), _words(weights).view(shape)
        self._gain = sum(factor * weight for factor, weight in zip(factors, weights, strict=True)) & _MASK

    def oracle(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Computes the greedy continuation of a prompt without any KV."""
        known, seen = list(prompt_ids), _Seen(self._empty, self.layout)
        for position in range(len(known) + num_tokens):
            if position >= len(prompt_ids):
                known.append(self._next_token(seen.total))
            self._take(seen, position, known[position])
        return known[len(prompt_ids) :]

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        """Implements `CausalModel.forward`."""
        words = kv.data.view(torch.int64)
        bounds, positions = batch.cu_query_lens.tolist(), batch.positions.tolist()
        states: list[int] = []
        totals: list[int] = []
        for row, context_len in enumerate(batch.context_lens.tolist()):
            begin, end = bounds[row], bounds[row + 1]
            start = context_len - (end - begin)
            seen = self._read(words, batch.block_tables[row], start)
            tokens = zip(positions[begin:end], batch.token_ids[begin:end].tolist(), strict=True)
            for place, (position, token) in enumerate(tokens, start):
                states.append(self._take(seen, place, token, position - place))
                totals.append(seen.total)
        self._write(words, batch.slot_mapping, _words(states))
        return self._logits([totals[row] for row in batch.sample_rows.tolist()])

    def decode_greedily(self, batch: Batch, kv: KVPages, num_runs: int) -> torch.Tensor:
        """Implements `DraftModel.decode_greedily`."""
        return decode_greedily(self, batch, kv, num_runs)

    def new_queries(self, num_rows: int) -> torch.Tensor:
        return torch.empty(self.layout.num_layers, num_rows, 0)

    @torch.inference_mode()
    def weigh(self, queries: torch.Tensor, kv: KVPages, block_table: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Derives the weight of a token from its stored bits, so that each row sees the same weight."""
        stored = kv.data.view(torch.int64)[block_table, :, 0, :, :, 0]
        drawn = (stored.permute(1, 2, 0, 3).flatten(2)[..., :num_tokens] * _WEIGHING >> 44 & 0xFF).float()
        return drawn * torch.arange(num_tokens, 0, -1).clamp(max=queries.shape[1])

    def _take(self, seen: "_Seen", place: int, token: int, num_dropped: int = 0) -> int:
        """Returns the state of the token at a place, and adds its share to the sum that the next token sees."""
        seen.make_room()
        state = _mix(seen.total ^ _mix(token) ^ num_dropped)
        seen.add(self._places[place] * self._gain * state)
        return state

    def _next_token(self, total: int) -> int:
        return _mix(total) % self.vocab_size

    def _read(self, words: torch.Tensor, block_table: torch.Tensor, length: int) -> "_Seen":
        """Sums the shares of the visible positions before `length`, from the bytes of their pages."""
        window, num_sinks = self.layout.window, min(self.layout.num_sinks, length)
        begin = 0 if window is None else max(0, length + 1 - window)
        shares = self._shares(words, block_table, begin, length)
        sinks = self._shares(words, block_table, 0, min(num_sinks, begin))
        empty = self._empty + int(sinks.sum())
        return _Seen(empty, self.layout, begin, [int(shares.sum())] if window is None else shares.tolist())

    def _shares(self, words: torch.Tensor, block_table: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Computes the shares of the positions begin to end - 1."""
        first = begin // self.layout.block_size
        pages = block_table[first : self.layout.num_blocks(end)]
        stored = (words[pages] * self._weights.unsqueeze(3)).sum((1, 2, 3, 5)).flatten()
        return stored[begin - first * self.layout.block_size :][: end - begin] * self._place_words[begin:end]

    def _write(self, words: torch.Tensor, slot_mapping: torch.Tensor, states: torch.Tensor) -> None:
        pages, offsets = slot_mapping // self.layout.block_size, slot_mapping % self.layout.block_size
        words[pages, :, :, :, offsets] = states.view(-1, 1, 1, 1, 1) * self._factors

    def _logits(self, totals: Sequence[int]) -> torch.Tensor:
        noise = (_words(totals)[:, None] * self._token_words >> 32 & 0xFFFF).float() * (_NOISE / 0x10000)
        for row, total in enumerate(totals):
            noise[row, self._next_token(total)] = _TOP_LOGIT
        return noise


class _Seen:
    """The sum of shares that the next row sees.

    Keeps the window's shares, from position `begin` on, so that the oldest can be subtracted.
    """

    def __init__(self, empty: int, layout: KVLayout, begin: int = 0, shares: Sequence[int] = ()) -> None:
        self.total = (empty + sum(shares)) & _MASK
        self._layout = layout
        self._begin = begin
        self._shares = deque(shares)

    def make_room(self) -> None:
        """Subtracts the share that leaves the next row's window."""
        if len(self._shares) == self._layout.window:
            share = self._shares.popleft()
            self.total = (self.total - (share if self._begin >= self._layout.num_sinks else 0)) & _MASK
            self._begin += 1

    def add(self, share: int) -> None:
        self.total = (self.total + share) & _MASK
        self._shares.append(share)


def _mix(value: int) -> int:
    """Mixes 64 bits. Source: the finalizer of SplitMix64."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def _odd(table: int, index: int) -> int:
    return _mix(table << 32 | index) | 1


def _words(values: Sequence[int]) -> torch.Tensor:
    """Packs unsigned 64-bit numbers into int64 [len(values)] of the same bits."""
    return torch.tensor([value - ((value >> 63) << 64) for value in values], dtype=torch.int64)
