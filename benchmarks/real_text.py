"""Long English text that people wrote: articles of Wikipedia, from a file of a package on the package index."""

import bz2
import html
import re
from functools import cache

from engine.checkpoint.pulled import NamedModel

SOURCE = NamedModel(
    name="articles",
    package="gensim",
    version="4.4.0",
    member="gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
    sha256="a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
    licence="CC-BY-SA-3.0",
    num_bytes=1_695_871,
    wheel_bytes=27_809_988,
)
"""A file of gensim's tests: pages of the English Wikipedia as its dump has them. It is fetched and never imported."""
NAME = f"{SOURCE.package} {SOURCE.version}, {SOURCE.member.rpartition('/')[2]}, sha256 {SOURCE.sha256[:16]}"
TITLES = ("Anarchism", "Autism", "Alabama", "Abraham Lincoln", "Aristotle")
_PAGE = re.compile(r"<title>([^<]*)</title>.*?<text[^>]*>(.*?)</text>", re.DOTALL)
_INNERMOST = re.compile(
    r"\{\{[^{}]*\}\}|\{\|(?:(?!\{\|).)*?\|\}|\[\[(?:File|Image|Category):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]", re.DOTALL
)
_TAGS = re.compile(r"<!--.*?-->|<ref[^>/]*/>|<ref[^>]*>.*?</ref>|<[^>]+>", re.DOTALL)
_LINK = re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]|\[https?://\S+ ?([^\]]*)\]")


@cache
def articles() -> dict[str, str]:
    """Returns the articles of TITLES as plain text; the first call fetches them, and blocks."""
    dump = bz2.decompress(SOURCE.pull(lambda *_: None).read_bytes()).decode()
    pages = dict(_PAGE.findall(dump))
    return {title: plain_text(pages[title]) for title in TITLES}


def plain_text(markup: str) -> str:
    """Leaves out templates, tables, files, notes and marks of a page, and keeps the words of links."""
    text = _TAGS.sub("", html.unescape(html.unescape(markup)))
    count = 1
    while count:
        text, count = _INNERMOST.subn("", text)
    text = _LINK.sub(lambda match: match[1] or match[2] or "", text)
    text = re.sub(r"'{2,}|^[=*#:;]+|=+ *$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n\s*\n+", "\n\n", re.sub(r"[ \t]+", " ", text)).strip()
