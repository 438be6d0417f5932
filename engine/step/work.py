"""The work of one step and its outcome: decoding rows with their drafts, chunks of prompts, and gains."""

from collections.abc import Container, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt

from engine.events import StepOutput
from engine.schedule.batcher import Phase
from engine.sequence import Sequence
from wire.errors import BatonError
from wire.sampling import Logprobs

Ints = npt.NDArray[np.integer]
NO_ROWS = slice(0, 0)


@dataclass(frozen=True)
class Drafts:
    """The tokens of the first rows in a step, each row's own and then its guesses. R rows, T tokens.

    lengths: int64 [R], tokens of each row. token_ids: int64 [T].
    """

    lengths: Ints
    token_ids: Ints

    @classmethod
    def of(cls, own: Ints, row_to_guesses: Mapping[int, Seq[int]]) -> "Drafts":
        """Makes drafts of each row's own token, int64 [R], and of guesses."""
        tokens = [[token, *row_to_guesses.get(row, ())] for row, token in enumerate(own.tolist())]
        lengths = np.array([len(one) for one in tokens], dtype=np.int64)
        return cls(lengths, np.array([*chain.from_iterable(tokens)], dtype=np.int64))

    def __len__(self) -> int:
        """Counts the guesses."""
        return len(self.token_ids) - len(self.lengths)

    @cached_property
    def rows(self) -> Ints:
        """The row of each token, int64 [T]."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @cached_property
    def offsets(self) -> Ints:
        """The distance of each token from its row's own, int64 [T]."""
        return np.arange(len(self.rows)) - (self.lengths.cumsum() - self.lengths)[self.rows]

    def true_places(self, drawn: Seq[int], end_ids: Seq[Container[int]]) -> list[int]:
        """Lists the places, of T, up to which the guesses of each row came true; its own token always counts.

        drawn: the token drawn after each, negative for none. end_ids: token ids that end each row.
        """
        places: list[int] = []
        token_ids = self.token_ids.tolist()
        place = 0
        for length, ends in zip(self.lengths.tolist(), end_ids, strict=True):
            places.append(place)
            for guess in range(place + 1, place + length):
                token = token_ids[guess]
                if token != drawn[guess - 1] or token in ends or drawn[guess] < 0:
                    break
                places.append(guess)
            place += length
        return places


NO_DRAFTS = Drafts.of(np.zeros(0, dtype=np.int64), {})


@dataclass(frozen=True)
class PromptChunk:
    """The next `num_tokens` known tokens of a sequence; they have pages, and no KV yet.

    is_sampled: ends with the last known token, and brings the next, for siblings that wait for the prompt, too.
    """

    sequence: Sequence
    num_tokens: int
    is_sampled: bool
    siblings: Seq[Sequence] = ()

    @classmethod
    def of(cls, sequence: Sequence, num_tokens: int, siblings: Iterable[Sequence] = ()) -> "PromptChunk":
        """Makes a chunk. Siblings gain a token with it if sequence and siblings know the prompt alone."""
        is_sampled = sequence.num_computed + num_tokens == sequence.num_known
        alike = [one for one in siblings if is_sampled and not one.output_ids and not sequence.output_ids]
        return cls(sequence, num_tokens, is_sampled, [one for one in alike if one.phase is Phase.WAITING])

    @property
    def is_decoding(self) -> bool:
        """Whether its token runs as a decoding row."""
        return self.sequence.runs_decoding(self.num_tokens)

    @property
    def context_len(self) -> int:
        return self.sequence.num_computed + self.num_tokens

    @property
    def scored(self) -> range:
        """The positions of the prompt whose tokens this chunk scores, each by the logits before it."""
        if not self.sequence.wants_scores:
            return range(0)
        return range(self.sequence.num_scored, min(self.context_len + 1, self.sequence.request.num_prompt))

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that gain a token, all from the last row."""
        return [self.sequence, *self.siblings] if self.is_sampled else []


@dataclass(frozen=True)
class Work:
    """The work of one step: a token of each of these decoding rows, then chunks, of which decoding rows come first.

    drafts: guesses that follow the tokens of rows; the rows are then the first of DecodeRows.
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


@dataclass(frozen=True, kw_only=True)
class Gains:
    """The outcome of a run: samples of the decoding rows, row by row, then of the chunks.

    sequences: a sequence for each sample. token_ids: int64 [samples], -1 where the sequence failed. logprobs:
    log-probabilities by sample, where asked for. num_gained: gained tokens, one number for each decoding row or for
    all. scores: log-probabilities of prompts' tokens, by sequence.
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
        return Gains(
            sequences=sequences,
            token_ids=self.token_ids[samples],
            logprobs=logprobs,
            failed=self.failed,
            num_gained=num_gained,
            scores=self.scores,
        )

    def left(self) -> "Gains":
        """Leaves out the samples of sequences that have ended with the request of a failed one."""
        if not self.failed:
            return self
        kept = [sample for sample, sequence in enumerate(self.sequences) if sequence.phase is not Phase.ENDED]
        return self.keeping(kept, self.num_gained)

    def followed_by(self, later: "Gains") -> "Gains":
        """Joins the gains of two runs without drafts."""
        num = len(self.token_ids)
        logprobs = self.logprobs | {num + sample: one for sample, one in later.logprobs.items()}
        token_ids = np.concatenate([self.token_ids, later.token_ids])
        sequences, failed = [*self.sequences, *later.sequences], self.failed | later.failed
        return Gains(
            sequences=sequences,
            token_ids=token_ids,
            logprobs=logprobs,
            failed=failed,
            scores=self.scores | later.scores,
        )

    def newest(self, num_rows: int) -> Ints:
        """Returns the newest token of each of the first `num_rows` rows."""
        return (
            self.token_ids[:num_rows]
            if isinstance(self.num_gained, int)
            else self.token_ids[self.num_gained.cumsum() - 1]
        )

    def emit(self, output: StepOutput) -> list[Sequence]:
        """Appends tokens to their sequences; returns the sequences that end with theirs."""
        ending = []
        output.choices = [sequence.choice for sequence in self.sequences]
        output.token_ids = self.token_ids.tolist()
        output.logprobs = self.logprobs
        positions = output.positions
        for sequence, token_id in zip(self.sequences, output.token_ids, strict=True):
            output_ids, rule = sequence.output_ids, sequence.ending
            positions.append(len(output_ids))
            output_ids.append(token_id)
            if len(output_ids) >= rule.max_output or token_id in rule.ids:
                ending.append(sequence)
        return ending
