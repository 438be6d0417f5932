import weakref

from baton.results import Chunk, Draft
from wire.pb import inference_pb2 as pb


def test_a_draft_keeps_the_text_and_no_chunk() -> None:
    draft, chunks = Draft(), weakref.WeakSet[Chunk]()
    for number in range(100):
        chunk = pb.Chunk(index=number % 2, text=f"{number}\r\n", token_ids=[number, 1 << 31])
        gained = draft.accept(pb.GenerateResponse(request_id="r", chunk=chunk))
        assert gained is not None
        chunks.add(gained)
        assert (gained.text, gained.token_ids) == (chunk.text, (number, 1 << 31))
    del gained
    assert not len(chunks)
    draft.accept(pb.GenerateResponse(complete=pb.Complete(choices=[pb.Choice(index=0), pb.Choice(index=1)])))
    first, second = draft.require_completion().choices
    assert first.text == "".join(f"{number}\r\n" for number in range(0, 100, 2))
    assert second.token_ids[:4] == (1, 1 << 31, 3, 1 << 31)
