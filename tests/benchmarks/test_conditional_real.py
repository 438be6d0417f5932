"""The goodput of the conditional mode over the better of both others, computed by hand."""

from benchmarks.conditional_real import over_the_better
from tests.benchmarks.test_disaggregation import LIMITS, mode, record

GOOD, LATE = record(0.1, 0.5, 1.0), record(0.9, 0.95, 1.0)


def test_the_better_mode_is_that_of_all_rounds() -> None:
    """In the second round alone `never` was better; rounds of it would be others' rounds at times."""
    modes = {
        "always": mode([GOOD, GOOD, GOOD, GOOD], [GOOD, LATE, LATE, LATE]),
        "never": mode([GOOD, LATE, LATE, LATE], [GOOD, GOOD, LATE, LATE]),
        "conditional": mode([GOOD, GOOD, GOOD, LATE], [GOOD, GOOD, LATE, LATE]),
    }
    assert over_the_better(modes, LIMITS) == {"goodput, conditional / always, the better": "1.00 (0.75 .. 2.00)"}
