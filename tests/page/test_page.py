"""The page in a real headless Chromium, before a synthetic cluster and before one with real workers."""

from statistics import median
from typing import Any

import pytest

from tests.page.browser import served
from tests.page.conftest import Look
from tests.page.synthetic import KEY, SyntheticOperator

pytestmark = [pytest.mark.page, pytest.mark.timeout(180)]
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def require_clean(seen: dict[str, Any]) -> None:
    assert seen["axe"] == {"door": [], "light": [], "dark": []}
    assert seen["console"] == []
    assert seen["outside"] == []
    assert seen["cookies"] == []
    assert all(seen["fits"].values()), seen["fits"]
    assert seen["keyboard"][-2:] == ["id", "one"], seen["keyboard"]


async def test_script_in_names_is_text(look: Look) -> None:
    async with served(SyntheticOperator(4, 5.0, HOSTILE)) as url:
        seen = await look(url, KEY, "acme/r-3")
    require_clean(seen)
    assert f"{HOSTILE} was replaced" in seen["text"]
    assert f"UNAVAILABLE: {HOSTILE}" in seen["text"]
    assert HOSTILE in seen["one"]


async def test_from_1280_pixels_on_no_table_is_cut(look: Look) -> None:
    async with served(SyntheticOperator(24, 5.0)) as url:
        seen = await look(url, KEY, "acme/r-3", seconds=1.0, is_judged=False)
    cut = {width: labels for width, labels in seen["cut"].items() if int(width) >= 1280}
    assert cut == {"1280": [], "1440": [], "2560": []}


async def test_two_hundred_workers_and_fifty_requests_a_second(look: Look) -> None:
    async with served(SyntheticOperator(200, 50.0)) as url:
        seen = await look(url, KEY, "acme/r-90", is_judged=False)
    require_clean(seen)
    assert seen["text"].count("decode-99") >= 1
    assert len(seen["delays_s"]) >= 4
    assert median(seen["delays_s"]) < 1.0
    assert seen["first_paint_s"] < 1.0
    assert seen["first_data_s"] < 1.0
