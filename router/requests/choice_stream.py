"""One choice of a request, as the client has it: its tokens, its text, and how it ended."""

from text.incremental import IncrementalText, Piece
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2


class ChoiceStream:
    """Grows by what workers say of the choice, whichever worker it is: positions decide what is new."""

    def __init__(self, index: int, text: IncrementalText) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish: pb.Choice | None = None
        self._text = text

    @property
    def so_far(self) -> worker_pb2.ChoiceSoFar:
        """What a worker needs to go on with it."""
        return worker_pb2.ChoiceSoFar(index=self.index, output=pb.TokenIds(ids=self.token_ids))

    def continues(self, tokens: worker_pb2.ChoiceTokens) -> bool:
        """Whether no token is missing before these. They may repeat what is known."""
        return tokens.first_position <= len(self.token_ids)

    def accept(self, tokens: worker_pb2.ChoiceTokens) -> pb.Chunk | None:
        """Takes what is new in `tokens`, which `continues` this choice; the chunk for the client, if there is one.

        Tokens after a stop string are left out, and nothing is taken once the choice has ended.
        """
        num_repeated = len(self.token_ids) - tokens.first_position
        if self.finish is not None or num_repeated > len(tokens.token_ids):
            return None
        new = tokens.token_ids[num_repeated:]
        piece = self._text.feed(new[:-1] if tokens.HasField("stop_token_id") else new)
        taken = new if piece.matched_stop is None else new[: piece.num_tokens]
        self.token_ids.extend(taken)
        text = piece.text + self._end(tokens, piece)
        if not taken and not text:
            return None
        logprobs = tokens.logprobs[num_repeated : num_repeated + len(taken)]
        return pb.Chunk(index=self.index, token_ids=taken, text=text, logprobs=logprobs)

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
