"""Make the pictures of the live page anew: ``make screenshots``. It takes a minute.

A run of ``digits`` is played with its page, and chromium (Debian: ``apt-get install chromium``) takes the pictures by
Playwright. Look at each picture before you commit it.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
LARGEST = 150_000
ROUND = 25
"""The pictures are taken after this round."""
PATIENCE = 300.0
MOMENT = """() => {
  const run = window.fedemu.runs[0];
  if (!run.states.some((state) => state === 3) || !run.states.some((state) => state === 4)) return false;
  run.tick = run.begin = () => {};
  return true;
}"""
"""True at a moment at which devices train and upload. The page then stands still."""


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-headless-shell")
    with tempfile.TemporaryDirectory(prefix="fedemu-screenshots-") as name, sync_playwright() as playwright:
        folder = Path(name)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        with (folder / "terminal").open("wb") as terminal:
            run = subprocess.Popen(
                [sys.executable, "-m", "fedemu", "run", "digits", "--rounds", "2000", "--page"],
                cwd=folder,
                stderr=terminal,
            )
        try:
            address = wait_for_address(folder / "terminal", run)
            page = opened(browser, address)
            page.select_option("[data-part=colouring]", "now")
            stand_still(page)
            take(page, "live.png")
            page = opened(browser, address)
            page.locator("[data-part=field]").click(position={"x": 60, "y": 40})
            page.wait_for_selector("[data-part=story] svg")
            stand_still(page)
            page.evaluate("document.querySelector('.bar').style.position = 'static'")
            take(page, "live_device.png", of=".columns")
        finally:
            run.terminate()
            run.wait(PATIENCE)
            browser.close()


def wait_for_address(terminal: Path, run: subprocess.Popen[bytes]) -> str:
    """The address with the token, as soon as the run has told it."""
    end = time.monotonic() + PATIENCE
    while not (found := re.search(r"http://\S+", terminal.read_text())):
        assert run.poll() is None, terminal.read_text()
        assert time.monotonic() < end, "the page did not come"
        time.sleep(0.1)
    return found[0]


def opened(browser: Any, address: str) -> Any:
    """The page after round ``ROUND``."""
    page = browser.new_page(viewport={"width": 1280, "height": 1000}, color_scheme="light")
    page.set_default_timeout(1000 * PATIENCE)
    page.goto(address)
    until(page, f"() => window.fedemu && (window.fedemu.runs[0].status.round || 0) >= {ROUND}")
    page.wait_for_selector(".u-wrap canvas")
    return page


def stand_still(page: Any) -> None:
    """Wait for the moment at which the page stands still, until all of it is drawn."""
    until(page, MOMENT)
    page.wait_for_timeout(1000)  # the last tick is drawn
    page.evaluate("document.querySelectorAll('.sub code').forEach((one) => { one.textContent = 'runs/digits-1' })")


def until(page: Any, script: str) -> None:
    """Wait until a script is true. The page forbids to make programs of texts, as Playwright's own wait does it."""
    end = time.monotonic() + PATIENCE
    while not page.evaluate(script):
        assert time.monotonic() < end, f"{script} did not become true"
        time.sleep(0.02)


def take(page: Any, name: str, of: str | None = None) -> None:
    """Save a picture of the window, or of a part of the page."""
    taken = page.locator(of).screenshot() if of else page.screenshot()
    picture = (
        Image.open(io.BytesIO(taken)).convert("RGB").quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    )
    picture.save(HERE / name, optimize=True)
    size = (HERE / name).stat().st_size
    print(f"{size:>8,} bytes  {name}{'  TOO LARGE' if size > LARGEST else ''}")


if __name__ == "__main__":
    main()
