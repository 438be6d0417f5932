"""Where a router answers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Addresses:
    """Clients at `public`, the command line at `operator`, Prometheus at `metrics`, which may be empty: nowhere."""

    public: str
    operator: str
    metrics: str = ""
