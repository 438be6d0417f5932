"""The order of a step's tokens, of the wanted logits, and of the samples drawn from these."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.model.sampler import Draw, score
from engine.sequence import Sequence
from engine.step.work import Ints, PromptChunk, Work


@dataclass(frozen=True)
class ChunkRows:
    """A chunk's rows in a step. start: its first token. first: its first row of logits; scored rows come before the
    last.
    """

    chunk: PromptChunk
    start: int
    first: int

    @property
    def end(self) -> int:
        """The token after the chunk's last."""
        return self.start + self.chunk.num_tokens

    @property
    def stop(self) -> int:
        """The row of logits after the chunk's last."""
        return self.first + len(self.chunk.scored) + self.chunk.is_sampled

    @property
    def tokens_of_logits(self) -> list[int]:
        """The tokens whose logits are wanted."""
        before = self.end - self.chunk.context_len - 1
        return [*(before + position for position in self.chunk.scored), *[self.end - 1] * self.chunk.is_sampled]

    def score(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores the chunk's part of a prompt, as `RowScores.numbers`. logits: all rows of the step."""
        scored, request = self.chunk.scored, self.chunk.sequence.request
        rows = logits[self.first : self.first + len(scored)]
        token_ids = request.prompt_ids[scored.start : scored.stop]
        return score(rows, token_ids, request.sampling.prompt_logprobs or 0)


@dataclass(frozen=True)
class StepShape:
    """The order of a step's rows. Decoding rows come first, `num_decoding` with their guesses, in each of three orders.

    ```
    tokens    decoding | chunk                         | chunk ...
    logits    decoding | its scored tokens, its last   | ...
    samples   decoding | its sequence, siblings        | ...
    ```

    sequences: a sequence for each sample.
    """

    work: Work
    num_decoding: int
    chunks: Seq[ChunkRows]
    sequences: list[Sequence]

    @classmethod
    def of(cls, work: Work, decoding: list[Sequence]) -> "StepShape":
        """Makes the shape of a step. decoding: the sequences of its decoding rows."""
        start = first = num = work.num_rows + len(work.drafts)
        sequences = [decoding[row] for row in work.drafts.rows] if work.drafts else decoding
        chunks = []
        for chunk in work.chunks:
            chunks.append(rows := ChunkRows(chunk, start, first))
            start, first = rows.end, rows.stop
            sequences = [*sequences, *chunk.sampled]
        return cls(work, num, chunks, sequences)

    @property
    def starts(self) -> Ints:
        """The first token of each decoding row and of each chunk, int64; and the number of tokens."""
        lengths, ends = self.work.drafts.lengths, [one.end for one in self.chunks]
        decoding = np.append(0, lengths.cumsum()) if self.work.drafts else np.arange(self.num_decoding + 1)
        return np.append(decoding, np.array(ends, dtype=np.int64))

    @property
    def scored(self) -> list[ChunkRows]:
        """The chunks that score their prompts."""
        return [one for one in self.chunks if one.chunk.scored]

    @property
    def rows_of_samples(self) -> list[int] | None:
        """The row of logits of each sample, None where each has its own."""
        if not any(one.chunk.scored or one.chunk.siblings for one in self.chunks):
            return None
        of_chunks = (one.stop - 1 for one in self.chunks for _ in one.chunk.sampled)
        return [*range(self.num_decoding), *of_chunks]

    def careful_draws(self, is_plain: npt.NDArray[np.bool_]) -> dict[int, Draw]:
        """Maps samples that are not plain greedy to their Draw. is_plain: bool for each decoding row."""
        drafts, num = self.work.drafts, self.num_decoding
        careful = (~(is_plain[drafts.rows] if drafts else is_plain)).nonzero()[0].tolist()
        of_chunks = {sample: sequence.draw() for sample, sequence in enumerate(self.sequences[num:], num)}
        return {sample: self.sequences[sample].draw(self._guessed(sample)) for sample in careful} | {
            sample: draw for sample, draw in of_chunks.items() if not draw.is_plain
        }

    def _guessed(self, sample: int) -> list[int]:
        """The guesses before a sample of a decoding row, which count as right until they are judged."""
        drafts = self.work.drafts
        return drafts.token_ids[sample + 1 - drafts.offsets[sample] : sample + 1].tolist() if drafts else []
