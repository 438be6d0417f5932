"""Stop strings, found in text that arrives in pieces."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scanned:
    """Text that is certainly output, and the stop string that ends it, if one does."""

    text: str
    stop: str | None


class StopMatcher:
    """Holds back text that may be the start of a stop string, and releases the rest.

    Linear in the text (Knuth, Morris, Pratt, 1977). The match that is complete first wins; of several complete with the
    same character, the longest.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._patterns = [_Pattern(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._held = ""

    def feed(self, text: str) -> Scanned:
        """Feeds text. After a reported stop string the matcher is done: no `feed` or `flush` may follow."""
        known = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            stop = self._step(char)
            if stop is not None:
                return Scanned(known[: end - len(stop)], stop)
        certain = len(known) - max((pattern.num_matched for pattern in self._patterns), default=0)
        self._held = known[certain:]
        return Scanned(known[:certain], None)

    def flush(self) -> str:
        """Releases the text held back: it is output after all, as nothing follows."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        complete = [pattern.text for pattern in self._patterns if pattern.step(char)]
        return complete[0] if complete else None


class _Pattern:
    """How much of one string the text seen so far ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._borders = _borders(text)

    def step(self, char: str) -> bool:
        """Returns whether the string is complete with this character."""
        while self.num_matched and self.text[self.num_matched] != char:
            self.num_matched = self._borders[self.num_matched - 1]
        self.num_matched += self.text[self.num_matched] == char
        return self.num_matched == len(self.text)


def _borders(text: str) -> list[int]:
    """Computes for each prefix of `text` the length of the longest proper prefix that also ends it."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        length += text[i] == text[length]
        borders[i] = length
    return borders
