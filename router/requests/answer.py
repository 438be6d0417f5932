"""The answer to one request, as its client has it: the choices, each with its tokens, its text, and how it ended."""

from collections.abc import Iterable, Iterator

from text.codec import TextCodec
from text.incremental import IncrementalText, Piece
from wire.errors import WireError
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.sampling import SamplingParams


class ChoiceStream:
    """A choice. Positions decide which tokens are new, whatever worker they come from."""

    def __init__(self, index: int, text: IncrementalText, codec: TextCodec) -> None:
        self.index = index
        self._codec = codec
        self.token_ids: list[int] = []
        self.finish: pb.Choice | None = None
        self._text = text

    @property
    def so_far(self) -> worker_pb2.ChoiceSoFar:
        """The choice as a worker needs it to go on."""
        return worker_pb2.ChoiceSoFar(index=self.index, output=pb.TokenIds(ids=self.token_ids))

    def accept(self, tokens: worker_pb2.ChoiceTokens) -> pb.Chunk | None:
        """Takes the tokens that are new; returns the chunk for the client, if there is one. Raises WireError for a gap.

        Tokens after a stop string are left out, and nothing is taken once the choice has ended.
        """
        if self.finish is not None:
            return None
        num_repeated = len(self.token_ids) - tokens.first_position
        if num_repeated < 0:
            raise WireError("a worker skipped tokens")
        if num_repeated > len(tokens.token_ids):
            return None
        new = tokens.token_ids[num_repeated:]
        piece = self._text.feed(new[:-1] if tokens.HasField("stop_token_id") else new)
        taken = new if piece.matched_stop is None else new[: piece.num_tokens]
        self.token_ids.extend(taken)
        text = piece.text + self._end(tokens, piece)
        if not taken and not text:
            return None
        chunk = pb.Chunk(index=self.index, token_ids=taken, text=text)
        if tokens.logprobs:
            chunk.logprobs.extend(tokens.logprobs[num_repeated : num_repeated + len(taken)])
            self._name_tokens(chunk)
        return chunk

    def _name_tokens(self, chunk: pb.Chunk) -> None:
        for one in chunk.logprobs:
            one.token = self._codec.token_bytes(one.token_id)
            for other in one.top:
                other.token = self._codec.token_bytes(other.token_id)

    def _end(self, tokens: worker_pb2.ChoiceTokens, piece: Piece) -> str:
        """Decides whether and how the choice has ended; the text that was held back until its end."""
        if piece.matched_stop is None and tokens.finish_reason == pb.FINISH_REASON_UNSPECIFIED:
            return ""
        last = self._text.flush()
        if last.matched_stop is not None:
            self.finish = pb.Choice(
                index=self.index, finish_reason=pb.FINISH_REASON_STOP, stop_string=last.matched_stop
            )
        else:
            self.finish = pb.Choice(index=self.index, finish_reason=tokens.finish_reason)
            if tokens.HasField("stop_token_id"):
                self.finish.stop_token_id = tokens.stop_token_id
        return last.text


class Answer:
    """All choices of a request. Pure."""

    def __init__(self, sampling: SamplingParams, codec: TextCodec) -> None:
        self.num_tokens = 0
        self._num_unfinished = sampling.n
        self._choices = [
            ChoiceStream(index, IncrementalText(codec, sampling.stop, sampling.min_tokens), codec)
            for index in range(sampling.n)
        ]

    @property
    def has_ended(self) -> bool:
        return not self._num_unfinished

    @property
    def worker_goes_on(self) -> bool:
        """Whether all choices have ended, one by a stop string: its worker does not know, and must be told to abort."""
        return self.has_ended and any(finish.HasField("stop_string") for finish in self.finishes)

    @property
    def unfinished(self) -> list[worker_pb2.ChoiceSoFar]:
        """The choices that go on, each with what the client has of it."""
        return [choice.so_far for choice in self._choices if choice.finish is None]

    @property
    def finishes(self) -> list[pb.Choice]:
        """How each choice that has ended did."""
        return [choice.finish for choice in self._choices if choice.finish is not None]

    def accept(self, gained: Iterable[worker_pb2.ChoiceTokens]) -> Iterator[pb.Chunk]:
        """Takes tokens in order; yields chunks for the client. Raises WireError for a gap or an unknown choice."""
        for tokens in gained:
            if tokens.index >= len(self._choices):
                raise WireError("a worker sent tokens of no choice")
            choice = self._choices[tokens.index]
            was_unfinished = choice.finish is None
            chunk = choice.accept(tokens)
            self._num_unfinished -= was_unfinished and choice.finish is not None
            if chunk is not None:
                self.num_tokens += len(chunk.token_ids)
                yield chunk
