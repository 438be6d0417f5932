"""The grammars of a model's requests, built for its vocabulary, away from the thread of its steps."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.model.matcher import Matcher
from engine.request import EngineRequest
from text.grammar import PARAM, new_matcher, require_library
from wire.errors import Unsupported
from wire.sampling import ResponseFormat

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_KEPT = 32
"""Grammars that stay built for further requests."""


class Grammars:
    """The grammars of a model's requests, for its vocabulary. Thread-safe; a call may block for a second.

    definition: reads the tokenizer, as the tokenizers library writes it.
    """

    def __init__(self, definition: Callable[[], str], vocab_size: int, eos_token_ids: Seq[int]) -> None:
        self._definition = definition
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[ResponseFormat, Matcher] = OrderedDict()
        self._turn = threading.Lock()

    def prepare(self, request: EngineRequest) -> EngineRequest:
        """Gives each choice of a request with a response format a matcher that has taken the choice's tokens.

        Raises InvalidRequest or Unsupported.
        """
        given = request.sampling.response_format
        if given is None:
            return request
        start = self._start(given)
        choices = tuple(replace(choice, matcher=start.fork()) for choice in request.choices)
        for choice in choices:
            assert choice.matcher is not None
            choice.matcher.take(choice.output_ids)
            if fault := choice.matcher.fault:
                raise fault
        return replace(request, choices=choices)

    def _start(self, given: ResponseFormat) -> Matcher:
        """Returns the matcher before any token, which is kept; callers fork it."""
        with self._turn:
            tokenizer = self._open_tokenizer()
            if given in self._kept:
                self._kept.move_to_end(given)
                return self._kept[given]
        built = Matcher(new_matcher(given, tokenizer))
        built.state.compute_bitmask()  # of the first token, which copies have then
        if built.fault:
            raise built.fault
        with self._turn:
            self._kept[given] = built
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return built

    def _open_tokenizer(self) -> "LLTokenizer":
        if self._tokenizer is None:
            require_library()
            from llguidance import LLTokenizer

            if not self._eos_token_ids:
                raise Unsupported(f"{PARAM}: the model has no token that ends an answer", param=PARAM)
            definition = self._definition()
            try:
                self._tokenizer = LLTokenizer(definition, n_vocab=self._vocab_size, eos_token=[*self._eos_token_ids])
            except ValueError as error:
                raise Unsupported(f"{PARAM}: llguidance does not know the model's tokenizer", param=PARAM) from error
        return self._tokenizer


NO_GRAMMARS = Grammars(str, 0, ())
"""Grammars of a model without a token to end an answer: each format is refused."""
