# ruff: noqa: RUF001
"""Lines of text on which tokenizers come apart: code, tables, numbers after spaces, scripts, emoji, odd whitespace."""

import random
from collections.abc import Callable

_SCRIPTS = (
    "Привет как дела",
    "你好世界今天天气",
    "こんにちは世界カナ",
    "안녕하세요 세계",
    "مرحبا بالعالم",
    "שלום עולם",
)
_OTHER_SCRIPTS = (
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "Γειά σου Κόσμε",
    "Zażółć gęślą jaźń",
    "Đây là tiếng Việt",
    "ﬁne ﬀ Ǆungla",
)
_EMOJI = ("😀", "👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "✨", "❤️", "🏴‍☠️", "☃", "1️⃣")
_WORDS = ("the", "Quick", "brown", "can't", "WE'LL", "it's", "naïve", "HTTPServer", "foo_bar", "e.g.", "'tis", "I'Ve")
_SPACES = (" ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", " \n ", "\t\t", "\u00a0", "\u2003", "\u3000", "        ")
_SIGNS = (
    "...",
    "!?",
    "->",
    "==",
    "//",
    "::",
    "{}",
    "[]",
    "$",
    "€",
    "%",
    "#",
    "<<",
    "|",
    "~",
    "—",
    "“q”",
    "’",
    "＃",
    "^",
)
_CODE = ("def f(x):", "    return x+1", "for(i=0;i<10;++i)", "if (a&&b) {", "}", "# note", 'print("hi")', "\tx = y[1:]")


def _number(random_: random.Random) -> str:
    whole = str(random_.randrange(10 ** random_.randint(1, 12)))
    return random_.choice(
        (whole, f"{whole}.{random_.randrange(100)}", f"{whole}e-5", f"0x{whole}", "½", "Ⅷ", "٣٤٥", "²")
    )


def _part(random_: random.Random) -> str:
    kinds: tuple[Callable[[], str], ...] = (
        lambda: random_.choice(_WORDS),
        lambda: random_.choice(_SPACES),
        lambda: random_.choice(_SPACES) + _number(random_),
        lambda: _number(random_),
        lambda: random_.choice(_SIGNS),
        lambda: random_.choice(_SCRIPTS + _OTHER_SCRIPTS),
        lambda: random_.choice(_EMOJI),
        lambda: random_.choice(_CODE),
        lambda: "| " + " | ".join(_number(random_).rjust(8) for _ in range(3)) + " |",
        lambda: chr(random_.choice((random_.randrange(32, 0x2FF), random_.randrange(0x300, 0xD7FF)))),
    )
    return random_.choice(kinds)()


def drawn_lines(count: int, seed: int) -> list[str]:
    """Draws lines of one to twelve parts, with and without spaces between them."""
    random_ = random.Random(seed)
    return [
        random_.choice((" ", "", "")).join(_part(random_) for _ in range(random_.randint(1, 12))) for _ in range(count)
    ]
