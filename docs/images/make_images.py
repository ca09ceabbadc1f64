"""Make the pictures of README.md and docs/tutorial.md anew: ``python docs/images/make_images.py``.

The script plays the tutorial's commands in a temporary folder, as the page has them, and takes the pictures from what
they leave behind. It needs fedemu in the Python that runs it, and chromium (Debian: ``apt-get install chromium``). It
takes about three minutes on two cores. Look at each picture before you commit it: the pages around it name its figures.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
PAGE = HERE.parent / "tutorial.md"
COLUMNS = 88
LARGEST = 150_000
NEXT_FRAME = re.compile(r"(?:\x1b\[2K\x1b\[1A)+\x1b\[2K")
PLAIN = re.compile(r"\x1b\[[0-9;]*m")
FONT_FACE = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="fedemu-images-") as name:
        folder = Path(name)
        save_files(folder)
        pictures_of_first_run(folder)
        pictures_of_seeds(folder)
        pictures_of_accidents(folder)
        pictures_of_own_method(folder)
        pictures_of_tasks(folder)
    for picture in sorted([*HERE.glob("*.png"), *HERE.glob("*.svg")]):
        size = picture.stat().st_size
        print(f"{size:>8,} bytes  {picture.name}{'  TOO LARGE' if size > LARGEST else ''}")


def pictures_of_first_run(folder: Path) -> None:
    frames = NEXT_FRAME.split(on_terminal(folder, "fedemu run digits"))
    middle = next(frame for frame in frames if re.search(r"round 2\d/40", frame))
    terminal(middle, "first_run.svg", title="fedemu run digits")
    page(folder / "runs/digits-1/report.html", "report.png", width=1200, height=1120)
    plot(folder / "runs/digits-1/plots/class_accuracy.png", "class_accuracy.png")
    plot(folder / "runs/digits-1/plots/outcomes.png", "outcomes.png")


def pictures_of_seeds(folder: Path) -> None:
    run(folder, "fedemu run fleet.toml --seeds 0-2 --transport memory --out five-epochs")
    run(folder, "fedemu run fleet.toml --seeds 0-2 --transport memory --set local.epochs=1 --out one-epoch")
    run(folder, "fedemu compare five-epochs one-epoch --out epochs")
    page(folder / "epochs/compare.html", "comparison.png", width=1200, height=1240)


def pictures_of_accidents(folder: Path) -> None:
    """Kill all devices of a run once it shows its third round; the picture has the moment with the fewest of them."""
    killed = False

    def kill_devices(shown: str) -> None:
        nonlocal killed
        fleet = re.search(r"devices +process (\d+)", shown)
        if fleet and not killed and re.search(r"round +3/30", shown):
            killed = True
            subprocess.run(["pkill", "-KILL", "-x", "-s", fleet[1], "fedemu-device"], check=True)

    shown = on_terminal(folder, "fedemu run fleet.toml --set local.epochs=400 --out broken", kill_devices)
    frames = [frame for frame in NEXT_FRAME.split(shown) if re.search(r"round +\d+/30(.|\n)* connected", frame)]
    fewest = min(frames, key=lambda frame: int(PLAIN.sub("", frame).split(" connected")[0].split()[-1]))
    terminal(fewest, "accident.svg", title="fedemu run fleet.toml --set local.epochs=400 --out broken")


def pictures_of_own_method(folder: Path) -> None:
    run(
        folder,
        "fedemu run fleet.toml --seeds 0-2 --transport memory --set algorithm.name=smooth:Smoothed --out smoothed",
    )
    run(folder, "fedemu compare five-epochs smoothed --out own-method")
    plot(folder / "own-method/plots/round_forgetting.png", "own_method.png")


def pictures_of_tasks(folder: Path) -> None:
    for method in ("", "+mfcl", "+oracle"):
        run(folder, f"fedemu run digits-tasks{method} --transport memory --out tasks{method.replace('+', '-')}")
    run(folder, "fedemu compare tasks tasks-mfcl tasks-oracle --out tasks-compared")
    plot(folder / "tasks-compared/plots/tasks_accuracy.png", "tasks.png")
    plot(folder / "tasks-mfcl/plots/generated-4.png", "generated.png")


def save_files(folder: Path) -> None:
    """Write the files that the tutorial shows: each stands in the block after "Save this as `NAME`"."""
    for name, text in re.findall(r"[Ss]ave this as `([\w.]+)`.*?```\w+\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (folder / name).write_text(text)


def run(folder: Path, command: str) -> None:
    print(f"$ {command}", flush=True)
    subprocess.run(command, shell=True, cwd=folder, env=environment(), check=True, capture_output=True)


def on_terminal(folder: Path, command: str, watch: Callable[[str], object] = len) -> str:
    """Run a command on a pseudo-terminal of ``COLUMNS`` columns, and return everything that it wrote there.

    ``watch`` is called with all that was written so far, again and again.
    """
    print(f"$ {command}", flush=True)
    written = bytearray()

    def read(descriptor: int) -> bytes:
        chunk = os.read(descriptor, 65536)
        written.extend(chunk)
        watch(written.decode(errors="replace"))
        return b"."  # one dot on our own terminal for each piece

    before = Path.cwd()
    os.chdir(folder)
    os.environ.update(environment())
    try:
        pty.spawn(["sh", "-c", f"stty cols {COLUMNS} rows 30; {command}"], read)
    finally:
        os.chdir(before)
    return written.decode().replace("\r\n", "\n")


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}


def terminal(text: str, name: str, *, title: str) -> None:
    """Draw text with terminal colours as an SVG that fetches no font from elsewhere."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(text.strip("\n")))
    svg = console.export_svg(title=title, code_format=FONT_FACE.sub("", CONSOLE_SVG_FORMAT))
    (HERE / name).write_text(svg)


def page(html: Path, name: str, *, width: int, height: int) -> None:
    """Take a picture of the first ``width`` x ``height`` pixels of a page."""
    chromium = shutil.which("chromium") or shutil.which("chromium-headless-shell") or sys.exit("chromium is missing")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                chromium,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                f"--window-size={width},{height}",
                f"--screenshot={HERE / name}",
                html.as_uri(),
            ],
            check=True,
            capture_output=True,
        )
    plot(HERE / name, name)


def plot(source: Path, name: str) -> None:
    """Keep a picture with a palette of 256 colours, at most 1,000 pixels wide."""
    with Image.open(source) as image:
        picture = image.convert("RGB")
    if picture.width > 1000:
        picture = picture.resize((1000, round(picture.height * 1000 / picture.width)), Image.Resampling.LANCZOS)
    picture.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(HERE / name, optimize=True)


if __name__ == "__main__":
    main()
