import pytest

from text import child_processes
from text.grammar import GrammarProcesses
from wire.errors import InvalidRequest, Unsupported
from wire.sampling import FormatKind, ResponseFormat


async def test_grammars_are_built_first_in_a_process_that_may_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_processes, "MAX_WAIT_S", 60.0)  # its processor time ends it, not the clock
    processes = GrammarProcesses()
    try:
        await processes.check(ResponseFormat(FormatKind.REGEX, "yes|no"))
        with pytest.raises(InvalidRequest, match="cannot be built"):
            await processes.check(ResponseFormat(FormatKind.REGEX, "("))
        with pytest.raises(InvalidRequest, match="cannot be answered"):
            await processes.check(ResponseFormat(FormatKind.JSON_SCHEMA, '{"$ref": "#"}'))
        wide = "|".join(f"word{number}x" for number in range(400_000))
        with pytest.raises(InvalidRequest, match="too long"):
            await processes.check(ResponseFormat(FormatKind.REGEX, wide))
        await processes.check(ResponseFormat(FormatKind.LARK, 'start: "a"'))
    finally:
        await processes.close()


async def test_without_the_library_a_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    processes = GrammarProcesses()
    with pytest.raises(Unsupported, match="llguidance"):
        await processes.check(ResponseFormat(FormatKind.REGEX, "a"))
    await processes.close()
