"""When a choice ends by its tokens. Stop strings are the router's, which has the text."""

from dataclasses import dataclass

from engine.model.batch import Model
from engine.sequence import Sequence
from wire.sampling import FinishReason


@dataclass(frozen=True)
class End:
    """Why a choice ended, and the token that ended it if one did."""

    reason: FinishReason
    stop_token_id: int | None = None


def end_of(sequence: Sequence, model: Model) -> End | None:
    """Whether the last token so far is the last of all: an end or stop token, max_tokens, or a full context."""
    sampling, last = sequence.request.sampling, sequence.output_ids[-1]
    if last in sampling.stop_token_ids or (last in model.eos_token_ids and not sampling.ignore_eos):
        return End(FinishReason.STOP, last)
    if len(sequence.output_ids) >= sampling.max_tokens or sequence.num_known >= model.max_context_len:
        return End(FinishReason.LENGTH)
    return None


def may_not_come_yet(sequence: Sequence, model: Model) -> tuple[int, ...]:
    """Tokens that would end the choice before min_tokens."""
    sampling = sequence.request.sampling
    if len(sequence.output_ids) >= sampling.min_tokens:
        return ()
    return (*sampling.stop_token_ids, *model.eos_token_ids)
