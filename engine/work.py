"""The work of one step and its outcome: decoding rows with their drafts, chunks of prompts, and gains."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from engine.decode_rows import DecodeRows, Ints
from engine.schedule.batcher import Phase
from engine.sequence import Sequence
from engine.speculation.speculator import NO_DRAFTS, Drafts
from wire.errors import BatonError
from wire.sampling import Logprobs

NO_ROWS = slice(0, 0)


@dataclass(frozen=True)
class PromptChunk:
    """The next `num_tokens` known tokens of a sequence; they have pages, and no KV yet.

    is_sampled: it ends with the last known token, and brings the next; to siblings, which wait for the prompt, too.
    """

    sequence: Sequence
    num_tokens: int
    is_sampled: bool
    siblings: Seq[Sequence] = ()

    @classmethod
    def of(cls, sequence: Sequence, num_tokens: int, siblings: Iterable[Sequence] = ()) -> "PromptChunk":
        """Makes a chunk; siblings of the sequence gain a token with it if they know as much, the prompt alone."""
        is_sampled = sequence.num_computed + num_tokens == sequence.num_known
        alike = [one for one in siblings if is_sampled and not one.output_ids and not sequence.output_ids]
        return cls(sequence, num_tokens, is_sampled, [one for one in alike if one.phase is Phase.WAITING])

    @property
    def context_len(self) -> int:
        return self.sequence.num_computed + self.num_tokens

    @property
    def scored(self) -> range:
        """The positions of the prompt whose tokens this chunk scores: each by the logits of the position before."""
        if not self.sequence.wants_scores:
            return range(0)
        return range(self.sequence.num_scored, min(self.context_len + 1, self.sequence.num_prompt))

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that gain a token, all from the last row."""
        return [self.sequence, *self.siblings] if self.is_sampled else []


@dataclass(frozen=True)
class Work:
    """The work of one step: a token of each of these decoding rows, and chunks, with chunks of one token first.

    drafts: guesses that follow the tokens of rows; the rows are then the first ones.
    """

    rows: slice
    chunks: Seq[PromptChunk] = ()
    drafts: Drafts = NO_DRAFTS

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def num_tokens(self) -> int:
        return self.num_rows + len(self.drafts) + sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True)
class Gains:
    """The outcome of a run: samples of the decoding rows, row by row, then of the chunks.

    sequences: of each sample. token_ids: int64 [samples], -1 where the sequence failed. logprobs: by sample, where they
    are asked for. num_gained: tokens of each decoding row, or of all alike. scores: of the prompts of chunks.
    """

    sequences: list[Sequence]
    token_ids: Ints
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    failed: dict[Sequence, BatonError] = field(default_factory=dict)
    num_gained: Ints | int = 1
    scores: dict[Sequence, tuple[Logprobs, ...]] = field(default_factory=dict)

    def keeping(self, samples: list[int], num_gained: Ints | int) -> "Gains":
        """Keeps these samples, in order."""
        logprobs = self.logprobs and {at: self.logprobs[one] for at, one in enumerate(samples) if one in self.logprobs}
        sequences = [self.sequences[one] for one in samples]
        return Gains(sequences, self.token_ids[samples], logprobs, self.failed, num_gained, self.scores)

    def followed_by(self, later: "Gains") -> "Gains":
        """Joins the gains of two runs without drafts."""
        num = len(self.token_ids)
        logprobs = self.logprobs | {num + sample: one for sample, one in later.logprobs.items()}
        token_ids = np.concatenate([self.token_ids, later.token_ids])
        sequences, failed = [*self.sequences, *later.sequences], self.failed | later.failed
        return Gains(sequences, token_ids, logprobs, failed, scores=self.scores | later.scores)

    def advance(self, rows: DecodeRows, num_rows: int) -> None:
        """Adds the gained tokens to the first rows."""
        if isinstance(self.num_gained, int):
            rows.advance(self.token_ids[:num_rows])
        else:
            rows.advance(self.token_ids[self.num_gained.cumsum() - 1], self.num_gained)
