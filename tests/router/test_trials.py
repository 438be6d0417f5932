import asyncio

from router.requests.trials import Trials
from wire.ids import RequestId

A, B, C = (RequestId(name) for name in "abc")


async def begun(trials: Trials, request_id: RequestId) -> asyncio.Task[None]:
    task = asyncio.create_task(trials.begin(request_id))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_one_after_another() -> None:
    trials = Trials()
    tasks = [await begun(trials, request_id) for request_id in (A, B, C)]
    assert [task.done() for task in tasks] == [True, False, False]
    trials.end(A)
    await tasks[1]
    assert not tasks[2].done()
    trials.end(B)
    await tasks[2]
    trials.end(C)
    assert len(trials) == 0


async def test_who_waits_may_go() -> None:
    trials = Trials()
    await trials.begin(A)
    waiting, last = await begun(trials, B), await begun(trials, C)
    waiting.cancel()
    trials.end(B)
    trials.end(B)
    assert not last.done()
    trials.end(A)
    await last


async def test_who_is_on_trial_stays_until_its_end() -> None:
    trials = Trials()
    await trials.begin(A)
    await trials.begin(A)
    assert not (await begun(trials, B)).done()
    trials.end(A)
    trials.end(B)
