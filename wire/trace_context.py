"""The trace that a call belongs to: W3C's `traceparent`, the same text as header of HTTP and as metadata of gRPC."""

import re
from dataclasses import dataclass
from typing import Self

TRACEPARENT = "traceparent"
_FORM = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-[ -~]{0,64})?")
_SAMPLED = 1


@dataclass(frozen=True)
class TraceContext:
    """A trace, its span that sent the call, and whether the sender samples the trace."""

    trace_id: bytes
    span_id: bytes
    is_sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{int(self.is_sampled):02x}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Reads a header. Returns None for one that is malformed, as for none: W3C has a trace begin anew then."""
        found = _FORM.fullmatch(text)
        if found is None or (found[1] == "00" and found[5]):
            return None
        return cls(bytes.fromhex(found[2]), bytes.fromhex(found[3]), bool(int(found[4], 16) & _SAMPLED))
