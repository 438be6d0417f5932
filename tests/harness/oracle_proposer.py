"""Proposers of tests: one that knows what is to come, and errs as it is told."""

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from engine.sequence import Sequence
from engine.speculation.speculator import Speculator


class OracleProposer:
    """A Proposer that is told the outputs of prompts, and goes on with one that fits; it errs at random."""

    def __init__(self, outputs: Mapping[tuple[int, ...], Seq[Seq[int]]], error_rate: float, seed: int = 0) -> None:
        self.forgotten: list[Sequence] = []
        self._outputs = outputs
        self._error_rate = error_rate
        self._random = random.Random(seed)

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int]]:
        return {sequence: self._guess(sequence, num_tokens) for sequence, num_tokens in wanted.items()}

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence)

    def _guess(self, sequence: Sequence, num_tokens: int) -> list[int]:
        num_known = len(sequence.output_ids)
        for output in self._outputs.get(sequence.request.prompt_ids, ()):
            if [*output[:num_known]] == sequence.output_ids:
                return [self._garbled(token) for token in output[num_known : num_known + num_tokens]]
        return [0] * num_tokens

    def _garbled(self, token: int) -> int:
        return token ^ 1 if self._random.random() < self._error_rate else token


def oracle_drafts(
    outputs: Mapping[tuple[int, ...], Seq[Seq[int]]], error_rate: float, max_draft_len: int = 7
) -> Speculator:
    """Makes the speculator of an OracleProposer."""
    return Speculator(OracleProposer(outputs, error_rate), max_draft_len)
