"""The router's actor as a plain object, and its line to the controller with Ray's handle replaced."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc.aio
import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from router.actor import RayController, RouterActor
from router.requests.versions import ModelVersions
from router.workers.controller_port import ControllerEvent, ControllerReport
from router.workers.membership import Membership
from tests.harness.fake_cluster import CONFIG
from tests.harness.fake_worker import FakeWorker
from tests.router.worker_server import served
from tests.text.backends import byte_level, write_folder
from text.token_bound import TokenBound
from wire.errors import ConfigError, ModelError, Unavailable, WorkerNotFound
from wire.ids import WorkerId
from wire.pb import cluster_pb2
from wire.pb import inference_pb2 as pb
from wire.pb.cluster_pb2_grpc import ClusterStub
from wire.pb.inference_pb2_grpc import InferenceStub
from wire.pools import MemberList, PoolSizes, Role
from wire.rpc import TOKEN_METADATA
from wire.served_model import ServedModel
from wire.typed_reader import to_json


def config_json(folder: Path) -> str:
    model = replace(CONFIG.model, folder=str(folder), vocab_size=400)
    return to_json(replace(CONFIG, model=model))


def no_actor(*_: str) -> None:
    raise ValueError("no actor of that name")


async def test_from_start_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, byte_level())
    bounds = Mock(wraps=TokenBound)
    monkeypatch.setattr("text.tokenizer.TokenBound", bounds)
    actor = RouterActor(config_json(tmp_path))
    started = json.loads(await actor.start())
    assert bounds.call_count == 1, "the first long text waits for the vocabulary"
    assert set(started) == {"public", "local", "operator", "metrics", "http"}
    async with served(FakeWorker(WorkerId("d0"), Role.DECODE), CONFIG.cluster.token) as (_, address):
        workers = [
            {"id": "d0", "role": "decode", "address": address, "state": "ready"},
            {"id": "p0", "role": "prefill", "address": "127.0.0.1:1", "state": "ready"},
        ]
        told = {"sizes": {"prefill": 2, "decode": 1}, "workers": workers}
        answer = json.loads(await actor.set_members(json.dumps(told)))
        assert (list(answer), list(answer["reasons"])) == (["reasons"], ["p0"])
        monkeypatch.setattr("ray.get_actor", no_actor)
        async with grpc.aio.insecure_channel(started["operator"]) as channel:
            metadata = ((TOKEN_METADATA, CONFIG.cluster.token),)
            status = await ClusterStub(channel).GetStatus(cluster_pb2.GetStatusRequest(), metadata=metadata)
        prefill, decode = status.pools
        assert (prefill.role, prefill.size, prefill.num_ready) == ("prefill", 2, 0)
        assert (decode.role, decode.size, decode.num_ready) == ("decode", 1, 1)
        async with grpc.aio.insecure_channel(started["public"]) as channel:
            request = pb.GenerateRequest(text="hello", sampling_params=pb.SamplingParams(max_tokens=3))
            responses = [response async for response in InferenceStub(channel).Generate(request)]
        assert responses[-1].complete.usage.completion_tokens == 3
        await actor.stop()


async def test_a_later_list_of_members_waits_for_the_one_before_with_its_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path, byte_level())
    actor, may_end = RouterActor(config_json(tmp_path)), asyncio.Event()
    seen: list[str] = []

    def note(_: object, models: Sequence[ServedModel]) -> None:
        seen.extend(one.fingerprint_hex for one in models)

    async def slow(*_: object) -> dict[WorkerId, str]:
        await may_end.wait()
        seen.append("members")
        return {}

    await actor.start()
    monkeypatch.setattr(ModelVersions, "replace", note)
    monkeypatch.setattr(Membership, "set", slow)
    fingerprints = ["aa" * 32, "bb" * 32]
    models = [(replace(CONFIG.model, fingerprint_hex=one),) for one in fingerprints]
    lists = [to_json(MemberList(PoolSizes(0, 1), (), one)) for one in models]
    setting = asyncio.gather(*map(actor.set_members, lists))
    await asyncio.sleep(0.01)
    may_end.set()
    await setting
    assert seen == [fingerprints[0], "members", fingerprints[1], "members"]
    monkeypatch.undo()
    await actor.stop()


def test_a_configuration_that_is_wrong() -> None:
    with pytest.raises(ConfigError):
        RouterActor("{}")


async def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        await RouterActor(config_json(tmp_path)).start()


async def test_members_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        await RouterActor(config_json(tmp_path)).set_members("[]")


Answer = Callable[[], Awaitable[str]]


class Handle:
    """Stands for Ray's handle of the controller: `handle.method.remote(...)` gives something to await."""

    def __init__(self, answer: Answer) -> None:
        self.calls: list[tuple[str, ...]] = []
        self._answer = answer

    def __getattr__(self, method: str) -> Any:
        class Method:
            @staticmethod
            async def remote(*arguments: str) -> Any:
                self.calls.append((method, *arguments))
                return await self._answer()

        return Method


def controller(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> tuple[RayController, Handle]:
    handle = Handle(answer)
    monkeypatch.setattr("ray.get_actor", lambda name, namespace: {("controller", "baton"): handle}[(name, namespace)])
    return RayController("controller", "baton"), handle


async def test_the_controller_is_told_in_text(monkeypatch: pytest.MonkeyPatch) -> None:
    port, handle = controller(monkeypatch, saying('{"prefill": 1, "decode": 2}'))
    assert await port.scale(None, 2) == PoolSizes(1, 2)
    await port.drain(WorkerId("d0"))
    await port.worker_lost(WorkerId("d1"))
    await port.shutdown()
    assert handle.calls == [
        ("scale", '{"decode": 2}'),
        ("scaled", '{"prefill": 1, "decode": 2}'),
        ("drain", "d0"),
        ("drained", "d0"),
        ("worker_lost", "d1"),
        ("shutdown",),
    ]


async def test_its_events_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    port, _ = controller(
        monkeypatch, saying('{"events": [{"age_s": 1.5, "text": "worker d0 lost"}], "problems": ["p"]}')
    )
    assert await port.report() == ControllerReport((ControllerEvent(1.5, "worker d0 lost"),), ("p",))


def saying(answer: str) -> Answer:
    async def say() -> str:
        return answer

    return say


def failing(error: Exception) -> Answer:
    async def fail() -> str:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RayTaskError("drain", "a traceback", WorkerNotFound("no worker of that id")), WorkerNotFound),
        (RayTaskError("drain", "a traceback", ZeroDivisionError()), Unavailable),
        (TimeoutError(), Unavailable),
    ],
)
async def test_what_goes_wrong_there(monkeypatch: pytest.MonkeyPatch, error: Exception, told: type[Exception]) -> None:
    port, _ = controller(monkeypatch, failing(error))
    with pytest.raises(told):
        await port.drain(WorkerId("d0"))


async def test_a_controller_that_dies_is_asked_again_for_what_it_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.actor.PAUSE_S", 0.001)
    answers = ["", '{"decode": 7}', "", "", '{"prefill": 1, "decode": 2}']

    async def answer() -> str:
        if given := answers.pop(0):
            return given
        raise ActorDiedError

    port, handle = controller(monkeypatch, answer)
    assert await port.scale(None, 2) == PoolSizes(1, 2)
    order = ("scale", '{"decode": 2}')
    assert handle.calls == [order] * 2 + [("scaled", '{"decode": 7}')] * 3


async def test_a_roll_is_ordered_again_of_a_controller_that_dies_and_its_end_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.actor.PAUSE_S", 0.001)
    answers = ["", "3", "", "3"]

    async def answer() -> str:
        if given := answers.pop(0):
            return given
        raise ActorDiedError

    port, handle = controller(monkeypatch, answer)
    assert await port.roll("{}") == 3
    assert handle.calls == [("roll", "{}")] * 2 + [("rolled", "3")] * 2


async def test_an_order_is_not_asked_for_beyond_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.actor.ORDER_TIMEOUT_S", 0.02)
    monkeypatch.setattr("router.actor.PAUSE_S", 0.001)
    port, _ = controller(monkeypatch, failing(ActorDiedError()))
    with pytest.raises(Unavailable, match="the controller does not answer"):
        await port.scale(None, 2)


async def test_a_controller_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.get_actor", no_actor)
    with pytest.raises(Unavailable):
        await RayController("controller", "baton").report()


async def test_a_controller_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.actor.REPORT_TIMEOUT_S", 0.02)

    async def never() -> str:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await answer

    port, _ = controller(monkeypatch, never)
    with pytest.raises(Unavailable):
        await port.report()
