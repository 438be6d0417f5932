"""Speculation: a grammar or a proposer guesses the next tokens of decoding sequences; one run verifies them.

    known    a b c
    guessed       d e f    further rows of the step, with position, slot and context of their tokens
    drawn         d e x    a guess is accepted that equals the token drawn before it: d, e and x are gained

Every token is drawn from (seed, choice, position), as without speculation, with penalties, min_tokens and
log-probabilities after the accepted tokens before it. So tokens are the same, bit by bit where rows do not depend on
their batch. A draft stays within the last page of its sequence: it takes no page, and later tokens overwrite the KV of
rejected guesses. Other parts of the engine see accepted tokens alone.

Sources: Leviathan et al., "Fast inference from transformers via speculative decoding" (ICML '23); prompt look-up of
Saxena (2023).
"""

import logging
import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from itertools import islice
from typing import Protocol

import numpy as np

from engine.events import Drafted
from engine.sequence import Sequence
from engine.step.decode_rows import DecodeRows
from engine.step.work import NO_DRAFTS, Drafts, Ints

log = logging.getLogger(__name__)

MAX_ROWS = 16
"""The most rows of a step with guesses: further rows cost nearly as much as tokens."""
DEFAULT_DRAFT_LEN = 7
MISS_PAUSE = 7
"""Steps without a draft after a step for which no guess was found."""
MAX_PAUSE = 32
"""The most steps without a draft after drafts whose guesses were all wrong."""
PLAIN_EVERY = 32
"""Every PLAIN_EVERY-th step has no drafts, to measure what drafts gain."""
TRIAL_STEPS = 4
TRIAL_PAUSE, MAX_TRIAL_PAUSE = 32, 1024
"""Steps without drafts after drafts have lost time: the first pause, and the longest."""
LOST_SHARE = 1 / 50
"""The share of time that drafts may lose: each step without drafts pays back so much of a lost step."""
MAX_LOST = 64
"""Drafts pause at this debt of lost steps, though guesses come true: prompts cost more."""
MAX_MISS, MAX_STALL = 2, 8
"""The most steps that one drafted step counts as lost: in a trial, and in the debt."""
NUM_REMEMBERED = 16
"""The guesses after which older ones count for a third in a sequence's chance."""
MAX_CHANCE, MIN_COST = 0.98, 0.01
"""Bounds of what is learned about guesses: a chance of 1 would be worth any length, a cost of 0 likewise."""
NGRAM_LENGTHS = (3, 2)
MAX_A_STEP = 4096
"""The most tokens of a sequence that one step adds to its n-grams: 4 ms of the engine's thread."""


class Proposer(Protocol):
    """A source of guesses. It may guess wrong or nothing; it must be quick."""

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int]]:
        """Guesses each sequence's tokens after the known ones, at most the number that it maps to."""

    def forget(self, sequence: Sequence) -> None:
        """Forgets a sequence that decodes no more. Does nothing for an unknown one."""


class NgramProposer:
    """A Proposer that repeats the tokens that followed an earlier occurrence of a sequence's last n-gram."""

    def __init__(self) -> None:
        self._texts: dict[Sequence, NgramText] = {}

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int]]:
        return {sequence: self._guess(sequence, num_tokens) for sequence, num_tokens in wanted.items()}

    def forget(self, sequence: Sequence) -> None:
        self._texts.pop(sequence, None)

    def _guess(self, sequence: Sequence, num_tokens: int) -> Seq[int]:
        """Guesses nothing until the text has all known tokens: a long sequence takes several steps."""
        text = self._texts.setdefault(sequence, NgramText())
        text.extend(sequence.tokens(len(text.token_ids), MAX_A_STEP))
        return text.guess(num_tokens) if len(text.token_ids) == sequence.num_known else []


class NgramText:
    """Tokens, and the place after the latest occurrence of each of their n-grams."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: Seq[int]) -> None:
        known, after = self.token_ids, self._after
        for token in token_ids:
            for length in NGRAM_LENGTHS:
                after[tuple(known[-length:])] = len(known)
            known.append(token)

    def guess(self, num_tokens: int) -> list[int]:
        """Repeats the tokens after the last n-gram's earlier occurrence; at their end begins again."""
        known = self.token_ids
        for length in NGRAM_LENGTHS:
            place = self._after.get(tuple(known[-length:]))
            if place is not None:
                period = len(known) - place
                return [known[place + ahead % period] for ahead in range(num_tokens)]
        return []


class DraftLength:
    """The length of a sequence's next draft: doubled after a draft that came true, 0 for a while after failures."""

    def __init__(self) -> None:
        self.length = 2
        self._pause = 1
        self._num_to_skip = 0
        self._num_tried = self._num_true = 1.0

    def worthwhile(self, guess_cost: float) -> int:
        """Returns how many guesses, at least one, are worth their time: a guess comes true only if all before it do.

        guess_cost: plain steps that a guess takes; a true guess saves a step.
        """
        chance = min(self._num_true / self._num_tried, MAX_CHANCE)
        return max(1, int(math.log(max(guess_cost, MIN_COST)) / math.log(chance)))

    def is_due(self) -> bool:
        """Counts a step; returns whether it has a draft."""
        self._num_to_skip -= 1
        return self._num_to_skip < 0

    def rest(self, num_steps: int) -> None:
        """Makes no draft in the next `num_steps` steps."""
        self._num_to_skip = num_steps

    def learn(self, num_guessed: int, num_accepted: int) -> None:
        # A guess after one that was wrong has not been tried.
        self._num_tried += min(num_accepted + 1, num_guessed) - self._num_tried / NUM_REMEMBERED
        self._num_true += num_accepted - self._num_true / NUM_REMEMBERED
        if num_accepted:
            self._pause = 1
            self.length = max(self.length, 2 * num_guessed) if num_accepted == num_guessed else num_accepted + 1
        else:
            self.length = 1
            self.rest(self._pause)
            self._pause = min(2 * self._pause, MAX_PAUSE)


class Payoff:
    """The steps that drafts gain or lose, at one number of rows.

    Example: a drafted step takes as long as two plain steps and brings each row five tokens; it gains three steps.
    """

    guess_cost = 0.0
    """Plain steps that a guess of each row takes: 1 at most, where no guess is worth it."""

    def __init__(self) -> None:
        self._plain_s = self._gain = self._num_lost = 0.0
        self._num_steps = self._num_drafted = self._num_to_skip = 0
        self._pause = TRIAL_PAUSE

    def is_due(self) -> bool:
        """Counts a step; returns whether it may have drafts. The first and every PLAIN_EVERY-th step have none, to
        compare.
        """
        self._num_steps += 1
        self._num_to_skip -= 1
        return self._num_to_skip < 0 and self._num_steps % PLAIN_EVERY != 1

    def learn_plain(self, step_s: float) -> None:
        """Takes the seconds of a step without drafts, which pays back a share of a lost step. The first is slow."""
        plain_s = self._plain_s if 0 < self._plain_s < 2 * step_s else step_s
        self._plain_s = plain_s + (min(step_s, 2 * plain_s) - plain_s) / 4
        self._num_lost = max(0.0, self._num_lost - LOST_SHARE)

    def learn_missed(self, step_s: float) -> None:
        """Takes the seconds of a step whose drafts did not come, as while a proposer catches up."""
        if self._plain_s:
            self._count(1 - step_s / self._plain_s)
            self._judge()

    def learn_drafted(self, step_s: float, num_guesses: float, num_rounds: float) -> None:
        """Takes the seconds of a step that had `num_guesses` and gained `num_rounds` tokens a row. In a trial's first
        step the proposer catches up.
        """
        if self._plain_s:
            num_steps = step_s / self._plain_s
            gain = num_rounds - num_steps
            self._count(gain)
            if self._num_drafted:
                self._gain += (max(gain, -MAX_MISS) - self._gain) / 8
                self.guess_cost += (min(1.0, (num_steps - 1) / num_guesses) - self.guess_cost) / 8
            self._num_drafted += 1
            self._judge()

    def _count(self, gain: float) -> None:
        self._num_lost = max(0.0, self._num_lost - max(gain, -MAX_STALL))

    def _judge(self) -> None:
        """Pauses drafts that lose time, until plain steps have paid back the lost steps."""
        if self._num_lost > MAX_LOST or (self._num_drafted >= TRIAL_STEPS and self._gain < 0):
            self._num_to_skip = max(self._pause, int(self._num_lost / LOST_SHARE))
            self._pause = min(2 * self._pause, MAX_TRIAL_PAUSE)
            self._num_drafted, self._gain, self._num_lost = 0, 0.0, 0.0
        elif self._num_drafted >= TRIAL_STEPS:
            self._pause = TRIAL_PAUSE


class Speculator:
    """The drafts of an engine's steps: their lengths, their rows, and their success.

    Guesses are tokens that a grammar forces, else a proposer's, if there is one.

    max_draft_len: guesses of one row in one step. num_drafts, num_guessed, num_accepted: totals so far. clock: seconds,
    for pausing drafts that lose time; None never pauses them.
    """

    def __init__(
        self,
        proposer: Proposer | None = None,
        max_draft_len: int = DEFAULT_DRAFT_LEN,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.num_drafts = self.num_guessed = self.num_accepted = 0
        self._proposer = proposer
        self._max_draft_len = max_draft_len
        self._draft_lens: dict[Sequence, DraftLength] = {}
        self._clock = clock
        self._payoffs = [Payoff() for _ in range(MAX_ROWS)]
        self._began: tuple[int, float] | None = None
        self._forced: Mapping[Sequence, Seq[int]] = {}
        self._num_wanted = 0

    def may_draft(self, rows: DecodeRows, num_rows: int, num_tokens: int) -> bool:
        """Tells whether a step of `num_tokens` other tokens may have drafts; a loaded step may not."""
        return num_tokens < MAX_ROWS and (
            self._proposer is not None or (rows.may_force and any(one.matcher for one in rows.sequences[:num_rows]))
        )

    def draft(self, rows: DecodeRows, num_rows: int, num_tokens: int) -> Drafts:
        """Makes drafts for the first rows of a step of `num_tokens` other tokens."""
        budget, self._num_wanted = MAX_ROWS - num_tokens, 0
        if not self.may_draft(rows, num_rows, num_tokens):
            return NO_DRAFTS
        if self._clock is not None and num_rows == num_tokens:
            self._began = num_rows, self._clock()
        if self._clock is not None and not self._payoffs[num_tokens].is_due():
            return NO_DRAFTS
        rooms = dict(zip(rows.sequences, (rows.room[:num_rows] - 1).tolist(), strict=False))
        self._forced = self._force(rooms, budget)
        lengths = self._lengths(rooms, self._payoffs[num_tokens].guess_cost)
        wanted = _share(budget - sum(map(len, self._forced.values())), lengths)
        self._num_wanted = len(wanted)
        guesses = {**(self._propose(wanted) if wanted else {}), **self._forced}
        for sequence in wanted:
            if not guesses.get(sequence):
                self._draft_lens[sequence].rest(MISS_PAUSE)
        if not any(guesses.values()):
            return NO_DRAFTS
        some = {row: guesses[one] for row, one in enumerate(rows.sequences[:num_rows]) if guesses.get(one)}
        return Drafts.of(rows.token_ids[:num_rows], some)

    def learn(self, rows: DecodeRows, drafts: Drafts, num_gained: Ints | int) -> list[Drafted]:
        """Learns from the tokens that each row of a step has gained; returns an event for each draft."""
        self._time(drafts, num_gained)
        if not drafts:
            return []
        events = []
        gained = np.broadcast_to(num_gained, drafts.lengths.shape).tolist()
        for sequence, length, num_new in zip(rows.sequences, drafts.lengths.tolist(), gained, strict=False):
            if length > 1:
                if sequence not in self._forced:
                    self._draft_lens[sequence].learn(length - 1, num_new - 1)
                events.append(Drafted(sequence.choice.attempt_id, sequence.choice.index, length - 1, num_new - 1))
                self.num_accepted += num_new - 1
        self.num_drafts += len(events)
        self.num_guessed += len(drafts)
        return events

    def _time(self, drafts: Drafts, num_gained: Ints | int) -> None:
        """Learns from the time of a step of decoding rows alone."""
        if self._clock is None or self._began is None:
            return
        (num_rows, began_s), self._began = self._began, None
        step_s, payoff = self._clock() - began_s, self._payoffs[num_rows]
        if drafts:
            payoff.learn_drafted(step_s, len(drafts) / num_rows, float(np.sum(num_gained)) / num_rows)
        elif self._num_wanted:
            payoff.learn_missed(step_s)
        else:
            payoff.learn_plain(step_s)

    def forget(self, sequence: Sequence) -> None:
        """Forgets a sequence that decodes no more. Does nothing for an unknown one."""
        if self._draft_lens.pop(sequence, None) is not None and self._proposer is not None:
            self._proposer.forget(sequence)

    def _propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int]]:
        """Asks the proposer; if that fails, the step has no guesses of it."""
        assert self._proposer is not None
        try:
            return self._proposer.propose(wanted)
        except Exception as failure:  # of whatever kind a draft model, or what it runs on, may raise
            log.warning("no guesses, for the proposer failed: %r", failure)
            return {}

    def _force(self, rooms: Mapping[Sequence, int], budget: int) -> Mapping[Sequence, Seq[int]]:
        """Returns tokens that grammars force, at most `budget` in all."""
        forced: dict[Sequence, Seq[int]] = {}
        for sequence, room in rooms.items():
            most = min(room, budget, self._most(sequence))
            if most > 0 and sequence.matcher and (tokens := sequence.matcher.forced(sequence.output_ids)):
                forced[sequence] = tokens[:most]
                budget -= len(forced[sequence])
        return forced

    def _lengths(self, rooms: Mapping[Sequence, int], guess_cost: float) -> Mapping[Sequence, int]:
        """Computes how many guesses a proposer may make for each sequence without forced tokens."""
        rest = {one: room for one, room in rooms.items() if room > 0 and one not in self._forced}
        wanted = ((one, min(self._length(one, guess_cost), room)) for one, room in rest.items() if self._proposer)
        return {sequence: length for sequence, length in wanted if length > 0}

    def _most(self, sequence: Sequence) -> int:
        """Computes the most tokens to guess; the run gains one more than are accepted."""
        return min(self._max_draft_len, sequence.ending.max_output - len(sequence.output_ids) - 1)

    def _length(self, sequence: Sequence, guess_cost: float) -> int:
        """Computes the number of tokens to guess, from the success of earlier drafts and the time of a guess."""
        draft_len = self._draft_lens.get(sequence)
        if draft_len is None:
            draft_len = self._draft_lens[sequence] = DraftLength()
        if not draft_len.is_due():
            return 0
        return min(draft_len.length, draft_len.worthwhile(guess_cost), self._most(sequence))


def _share(budget: int, lengths: Mapping[Sequence, int]) -> dict[Sequence, int]:
    """Cuts drafts so that they have at most `budget` guesses together."""
    most = max(1, budget // max(1, len(lengths)))
    return {sequence: min(length, most) for sequence, length in islice(lengths.items(), budget)}
