"""The answer to a request, as its client has it: the choices, each with its tokens, its text and its end."""

from collections.abc import Iterable, Iterator, Sequence

from text.answer.frame import NO_FRAME, AnswerFrame
from text.incremental import IncrementalText, Piece
from text.tokenizer_protocol import TextCodec
from wire.errors import WireError
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.sampling import SamplingParams

MAX_PART_TOKENS = 512
"""Tokens of one part of a prompt without scores."""


class ChoiceStream:
    """The answer of a choice. Positions tell which tokens are new, whichever worker sends them.

    includes_stop: the text includes what ended it. frame: has the text's opening, and its reasoning channel.
    """

    def __init__(
        self,
        index: int,
        text: IncrementalText,
        codec: TextCodec,
        includes_stop: bool = False,
        frame: AnswerFrame = NO_FRAME,
    ) -> None:
        self.index = index
        self._codec = codec
        self.token_ids: list[int] = []
        self.finish: pb.Choice | None = None
        self._text = text
        self._includes_stop = includes_stop
        self._opening = frame.opening
        self.reasoning = frame.new_count()
        self._may_reason = self.reasoning is not None

    @property
    def so_far(self) -> worker_pb2.UnfinishedChoice:
        """The choice, for a worker to continue it."""
        return worker_pb2.UnfinishedChoice(index=self.index, output=pb.TokenIds(ids=self.token_ids))

    def accept(self, tokens: worker_pb2.ChoiceTokens) -> pb.Chunk | None:
        """Takes new tokens; returns the chunk for the client, if any. Raises WireError for a gap.

        Drops tokens after a stop string, and all tokens after the choice's end.
        """
        if self.finish is not None:
            return None
        num_repeated = len(self.token_ids) - tokens.first_position
        if num_repeated < 0:
            raise WireError("a worker skipped tokens")
        if num_repeated > len(tokens.token_ids):
            return None
        new = tokens.token_ids[num_repeated:]
        is_silent_end = tokens.HasField("stop_token_id") and not self._includes_stop
        piece = self._feed(new[:-1] if is_silent_end else new)
        taken = new if piece.matched_stop is None else new[: piece.num_tokens]
        self.token_ids.extend(taken)
        text = piece.text + self._end(tokens, piece)
        if not taken and not text:
            return None
        chunk = pb.Chunk(index=self.index, token_ids=taken, text=self._opening + text, ended=self.finish)
        self._opening = ""
        if tokens.logprobs:
            chunk.logprobs.extend(tokens.logprobs[num_repeated : num_repeated + len(taken)])
            name_tokens(chunk.logprobs, self._codec)
        return chunk

    def resume(self, known: pb.ResumedChoice) -> None:
        """Takes what the client has of the choice already."""
        self.accept(worker_pb2.ChoiceTokens(index=self.index, token_ids=known.token_ids))
        if known.HasField("ended"):
            self.finish = pb.Choice()
            self.finish.CopyFrom(known.ended)
            self.finish.index = self.index

    def _feed(self, token_ids: Sequence[int]) -> Piece:
        """Feeds tokens, one by one while they may be reasoning, which is counted."""
        texts, num_tokens = "", 0
        while self._may_reason and num_tokens < len(token_ids):
            piece = self._text.feed(token_ids[num_tokens : num_tokens + 1])
            texts += piece.text
            num_tokens += piece.num_tokens
            assert self.reasoning is not None
            self._may_reason = self.reasoning.add(piece.text)
            if piece.matched_stop is not None:
                return Piece(texts, piece.matched_stop, num_tokens)
        rest = self._text.feed(token_ids[num_tokens:])
        return Piece(texts + rest.text, rest.matched_stop, num_tokens + rest.num_tokens)

    def _end(self, tokens: worker_pb2.ChoiceTokens, piece: Piece) -> str:
        """Decides whether and how the choice has ended; returns the text held back until its end."""
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


class PromptAnswer:
    """The prompt's part of an answer: echo, log-probabilities, or neither. Pure.

    num_sent: prompt tokens that the client has. Positions tell which scores are new, as with choices.
    """

    def __init__(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, codec: TextCodec, echo: str, num_sent: int = 0
    ) -> None:
        self.num_sent = num_sent
        self._prompt_ids = prompt_ids
        self._is_scored = sampling.prompt_logprobs is not None
        self._is_wanted = self._is_scored or sampling.echo
        self._echo = echo
        self._codec = codec

    @property
    def num_scored(self) -> int:
        """Tokens that a worker need not score, in the form of Begin: 0 if none is to be scored."""
        return self.num_sent if self._is_scored and self.num_sent < len(self._prompt_ids) else 0

    def first_parts(self) -> Iterator[pb.PromptPart]:
        """Yields the parts that need no scores: the text and the first token, or everything."""
        num_known = self._is_wanted and (1 if self._is_scored else len(self._prompt_ids))
        while self.num_sent < num_known:
            ids = self._prompt_ids[self.num_sent : min(self.num_sent + MAX_PART_TOKENS, num_known)]
            yield self._part(
                [pb.TokenLogprobs(token_id=token_id) for token_id in ids], "" if self.num_sent else self._echo
            )

    def accept(self, scores: worker_pb2.PromptScores) -> pb.PromptPart | None:
        """Takes new scores. Raises WireError for a gap, and for more scores than requested."""
        num_repeated = self.num_sent - scores.first_position
        tokens = scores.logprobs[max(num_repeated, 0) :]
        if num_repeated < 0 or len(tokens) > len(self._prompt_ids) - self.num_sent or not self._is_scored:
            raise WireError("a worker sent log-probabilities of the prompt that were not the next ones")
        for position, one in enumerate(tokens, self.num_sent):
            one.token_id = self._prompt_ids[position]
        return self._part(tokens, "") if tokens else None

    def _part(self, tokens: Sequence[pb.TokenLogprobs], text: str) -> pb.PromptPart:
        self.num_sent += len(tokens)
        part = pb.PromptPart(tokens=tokens, text=text)
        name_tokens(part.tokens, self._codec)
        return part


def name_tokens(logprobs: Iterable[pb.TokenLogprobs], codec: TextCodec) -> None:
    """Adds the bytes of each token."""
    for one in logprobs:
        one.token = codec.token_bytes(one.token_id)
        for other in one.top:
            other.token = codec.token_bytes(other.token_id)


class ChoiceStreams:
    """The answers of all choices of a request. Pure. `shown`: special tokens that are part of the text."""

    def __init__(
        self, sampling: SamplingParams, codec: TextCodec, shown: Sequence[str] = (), frame: AnswerFrame = NO_FRAME
    ) -> None:
        self.num_tokens = 0
        self._stopped: list[int] = []
        self._num_unfinished = sampling.n
        decoding = codec.spelling(shown) if shown else codec
        settings = sampling.stop, sampling.min_tokens, sampling.include_stop_str_in_output
        self._choices = [
            ChoiceStream(index, IncrementalText(decoding, *settings), codec, sampling.include_stop_str_in_output, frame)
            for index in range(sampling.n)
        ]

    def resume(self, known: Iterable[pb.ResumedChoice]) -> None:
        """Takes what the client has of all choices already, as if it had been sent here."""
        for choice, one in zip(self._choices, known, strict=True):
            choice.resume(one)
            self.num_tokens += len(choice.token_ids)
        self._num_unfinished = len(self.unfinished)

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(one.reasoning.num_tokens for one in self._choices if one.reasoning)

    @property
    def has_ended(self) -> bool:
        return not self._num_unfinished

    @property
    def worker_goes_on(self) -> bool:
        """Tells whether all choices have ended, some by a stop string: then the worker goes on until an abort."""
        return self.has_ended and any(finish.HasField("stop_string") for finish in self.finishes)

    def take_stopped(self) -> list[int]:
        """Returns the choices that ended, unknown to their worker, since the last call."""
        stopped, self._stopped = self._stopped, []
        return stopped

    @property
    def unfinished(self) -> list[worker_pb2.UnfinishedChoice]:
        """The unfinished choices, each with the tokens that the client has."""
        return [choice.so_far for choice in self._choices if choice.finish is None]

    @property
    def finishes(self) -> list[pb.Choice]:
        """Lists the ends of finished choices."""
        return [choice.finish for choice in self._choices if choice.finish is not None]

    def accept(self, gained: Iterable[worker_pb2.ChoiceTokens]) -> Iterator[pb.Chunk]:
        """Takes tokens in order; yields chunks for the client. Raises WireError for a gap or an unknown choice."""
        for tokens in gained:
            if tokens.index >= len(self._choices):
                raise WireError("a worker sent tokens of no choice")
            choice = self._choices[tokens.index]
            was_unfinished = choice.finish is None
            chunk = choice.accept(tokens)
            if was_unfinished and choice.finish is not None:
                self._num_unfinished -= 1
                if tokens.finish_reason == pb.FINISH_REASON_UNSPECIFIED:
                    self._stopped.append(tokens.index)
            if chunk is not None:
                self.num_tokens += len(chunk.token_ids)
                yield chunk
