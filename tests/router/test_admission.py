import re

import pytest

from router.config import AdmissionBounds
from router.requests.admission import Admission
from wire.errors import Overloaded, RequestExists
from wire.ids import QualifiedId, RequestId, qualified

A, B, C, D = (QualifiedId(name) for name in "abcd")


def test_requests_are_queued_until_their_first_token() -> None:
    admission = Admission(AdmissionBounds())
    admission.admit(A, 10)
    admission.admit(B, 10)
    admission.started(A)
    admission.started(A)
    assert (admission.num_queued, admission.num_running) == (1, 1)
    admission.leave(A)
    admission.leave(B)
    assert (admission.num_queued, admission.num_running) == (0, 0)


@pytest.mark.parametrize(
    ("bounds", "reason"),
    [
        (AdmissionBounds(max_open_requests=3), "3 requests are open, the limit (router.max_open_requests)"),
        (AdmissionBounds(max_queued_requests=2), "2 requests are queued, the limit (router.max_queued_requests)"),
        (
            AdmissionBounds(max_queued_bytes=25),
            "25 bytes of requests may be queued, the limit (router.max_queued_bytes)",
        ),
    ],
)
def test_each_bound_refuses_with_its_setting_and_a_time_to_retry(bounds: AdmissionBounds, reason: str) -> None:
    admission = Admission(bounds)
    for request_id in (A, B, C):
        admission.admit(request_id, 10)
        if request_id is A:
            admission.started(A)
    with pytest.raises(Overloaded, match=re.escape(reason)) as refused:
        admission.admit(D, 10)
    assert refused.value.retry_after_s == bounds.retry_after_s
    admission.leave(C)
    admission.admit(D, 10)


def test_room_is_wanting_where_no_request_may_come_in() -> None:
    admission = Admission(AdmissionBounds(max_open_requests=3, max_queued_requests=2, max_queued_bytes=10))
    admission.admit(A, 10)
    admission.require_room()
    admission.admit(B, 0)
    with pytest.raises(Overloaded, match="queued"):
        admission.require_room()
    admission.started(A)
    admission.admit(C, 0)
    with pytest.raises(Overloaded, match="open"):
        admission.require_room()
    admission.leave(C)
    admission.require_room()


def test_a_refused_request_takes_no_room() -> None:
    admission = Admission(AdmissionBounds(max_queued_bytes=10))
    with pytest.raises(Overloaded):
        admission.admit(A, 11)
    admission.admit(A, 10)


@pytest.mark.parametrize("is_running", [False, True])
def test_an_id_is_taken_once(is_running: bool) -> None:
    admission = Admission(AdmissionBounds())
    admission.admit(A, 1)
    if is_running:
        admission.started(A)
    with pytest.raises(RequestExists):
        admission.admit(A, 1)
    admission.leave(A)
    admission.admit(A, 1)


def of(tenant: str, number: int) -> QualifiedId:
    return qualified(tenant, RequestId(f"r{number}"))


def num_admitted(admission: Admission, tenant: str, num_asked: int, weight: float = 1.0) -> int:
    """Asks for requests of 10 bytes until one is refused."""
    for number in range(num_asked):
        try:
            admission.admit(of(tenant, number), 10, weight)
        except Overloaded:
            return number
    return num_asked


BOUNDS = [
    AdmissionBounds(max_open_requests=8),
    AdmissionBounds(max_queued_requests=8),
    AdmissionBounds(max_queued_bytes=80),
]


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize(("weight", "part"), [(1.0, 4), (3.0, 6), (1 / 3, 2)])
def test_a_tenant_has_its_part_of_a_bound_that_another_has_reached(
    bounds: AdmissionBounds, weight: float, part: int
) -> None:
    admission = Admission(bounds)
    assert num_admitted(admission, "heavy", 20) == 8, "alone it may have all"
    assert num_admitted(admission, "light", 20, weight) == part
    assert admission.check() == []
    admission.leave(of("heavy", 0))
    with pytest.raises(Overloaded):
        admission.admit(of("heavy", 0), 10)
    for number in range(part):
        admission.leave(of("light", number))
    admission.admit(of("heavy", 0), 10)
    assert admission.check() == []


def test_a_tenants_part_is_known_before_its_message_is() -> None:
    admission = Admission(AdmissionBounds(max_queued_requests=2))
    assert num_admitted(admission, "heavy", 3) == 2
    admission.require_room("light")
    with pytest.raises(Overloaded):
        admission.require_room("heavy")
    admission.started(of("heavy", 0))
    admission.require_room("heavy")


def test_a_tenant_whose_requests_are_over_has_no_part() -> None:
    admission = Admission(AdmissionBounds(max_open_requests=2))
    admission.admit(of("light", 0), 10)
    admission.leave(of("light", 0))
    assert num_admitted(admission, "heavy", 3) == 2
    assert num_admitted(admission, "third", 3) == 1
    assert num_admitted(admission, "fourth", 3) == 0, "a third of two is less than one request"


@pytest.mark.parametrize(
    "bounds",
    [
        AdmissionBounds(max_open_requests=12),
        AdmissionBounds(max_queued_requests=12),
        AdmissionBounds(max_queued_bytes=120),
    ],
)
def test_all_tenants_together_have_at_most_twice_a_bound(bounds: AdmissionBounds) -> None:
    admission = Admission(bounds)
    asked = [num_admitted(admission, tenant, 20) for tenant in ("first", "second", "third", "fourth")]
    assert asked == [12, 6, 4, 2], "the fourth's part is three"
    assert num_admitted(admission, "fifth", 1) == 0
    assert admission.check() == []
    admission.leave(of("first", 0))
    assert num_admitted(admission, "fifth", 2) == 1
