"""Opens the page in a headless Chromium, and prints what it saw as JSON. Runs in an environment of its own.

python browser_program.py SETTINGS, a JSON object: url, key, axe (file, or ""), shots (folder, or ""), find (id of a
request), seconds.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

WIDTHS = (320, 768, 1280, 1440, 2560)
WAIT_MS = 15_000
DELAYS = """() => {
  window.delays = [];
  new MutationObserver(() => {
    const made = Number(document.documentElement.dataset.shown);
    requestAnimationFrame(() => setTimeout(() => window.delays.push(Date.now() / 1000 - made)));
  }).observe(document.documentElement, { attributes: true, attributeFilter: ["data-shown"] });
}"""
FITS = "() => document.documentElement.scrollWidth <= window.innerWidth"
CUT = """() => [...document.querySelectorAll(".scroll")].filter((one) => one.scrollWidth > one.clientWidth)
  .map((one) => one.getAttribute("aria-label"))"""
FOCUS = "() => document.activeElement.id || document.activeElement.getAttribute('aria-label')"
PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime / 1000"


def look(settings: dict[str, Any]) -> dict[str, Any]:
    seen: dict[str, Any] = {"console": [], "outside": [], "fits": {}, "cut": {}, "axe": {}}
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=as_root)
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        page.on("console", lambda one: seen["console"].append(one.text) if one.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: seen["console"].append(str(error)))
        page.on("dialog", lambda dialog: (seen["console"].append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda one: note_outside(one.url, settings["url"], seen["outside"]))
        page.goto(settings["url"])
        page.wait_for_function(PAINT, timeout=WAIT_MS)
        seen["first_paint_s"] = page.evaluate(PAINT)
        seen["axe"]["door"] = faults(page, settings["axe"])
        enter(page, settings["key"])
        seen["first_data_s"] = page.evaluate("() => window.firstData")
        page.evaluate(DELAYS)
        page.wait_for_timeout(1000 * settings["seconds"])
        seen["delays_s"] = page.evaluate("() => window.delays")
        seen["text"] = page.inner_text("main")
        seen["keyboard"] = walk(page, settings["find"])
        seen["one"] = page.inner_text("#one")
        seen["axe"]["light"] = faults(page, settings["axe"])
        page.emulate_media(color_scheme="dark")
        seen["axe"]["dark"] = faults(page, settings["axe"])
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            seen["fits"][width] = page.evaluate(FITS)
            seen["cut"][width] = page.evaluate(CUT)
        if settings["shots"]:
            shoot(page, Path(settings["shots"]))
        seen["cookies"] = page.context.cookies()
        browser.close()
    return seen


def enter(page: Page, key: str) -> None:
    """Types the key, and waits for the first picture of the cluster."""
    page.fill("#key", key)
    page.evaluate("""() => {
      document.getElementById("door").addEventListener("submit", () => { window.begun = performance.now(); });
      new MutationObserver((_, self) => { self.disconnect(); requestAnimationFrame(() => setTimeout(
        () => { window.firstData = (performance.now() - window.begun) / 1000; })); })
        .observe(document.documentElement, { attributes: true, attributeFilter: ["data-shown"] });
    }""")
    page.press("#key", "Enter")
    page.wait_for_function("() => window.firstData !== undefined", timeout=WAIT_MS)


def walk(page: Page, request_id: str) -> list[str]:
    """Finds a request with the keyboard alone; returns the elements that had the focus."""
    focused = []
    page.focus("#main")
    for _ in range(12):
        page.keyboard.press("Tab")
        focused.append(
            page.evaluate("() => document.activeElement.id || document.activeElement.getAttribute('aria-label')")
        )
        if focused[-1] == "id":
            break
    page.keyboard.type(request_id)
    page.keyboard.press("Enter")
    page.wait_for_function("() => !document.getElementById('one').hidden", timeout=WAIT_MS)
    focused.append(page.evaluate("() => document.activeElement.id"))
    return focused


def faults(page: Page, axe: str) -> list[str]:
    """Runs axe-core; returns a line for each fault. Without a file of it, none."""
    if not axe:
        return []
    page.evaluate(Path(axe).read_text())
    found = page.evaluate("() => axe.run()")
    return [f"{one['id']}: {node['html'][:200]}" for one in found["violations"] for node in one["nodes"]]


def shoot(page: Page, folder: Path) -> None:
    """Makes the pictures: light, dark with one request, and narrow."""
    for name, scheme, width, height, is_open in (
        ("page-light", "light", 1280, 1000, False),
        ("page-dark", "dark", 1280, 1000, True),
        ("page-narrow", "light", 360, 800, False),
    ):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": height})
        page.evaluate("(shown) => { document.getElementById('one').hidden = !shown; window.scrollTo(0, 0); }", is_open)
        if is_open:
            page.evaluate("() => document.getElementById('h-requests').scrollIntoView()")
        page.wait_for_timeout(300)
        page.screenshot(path=str(folder / f"{name}.png"))


def note_outside(url: str, own: str, outside: list[str]) -> None:
    if not url.startswith((own.rpartition("/")[0] + "/", "data:,")):
        outside.append(url)


print(json.dumps(look(json.loads(sys.argv[1]))))
