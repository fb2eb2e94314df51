"""The page in a browser: it opens without an error, its button works, what it shows runs nothing, both palettes draw."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from plait.report import page, record
from plait.report.record import Sample
from tests.report import runs
from tests.report.test_page import EVIL

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
pytestmark = [pytest.mark.browser, pytest.mark.skipif(BROWSER is None, reason="needs Chromium (Debian: chromium)")]


def browser(page_file: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    home = page_file.parent / "browser"
    settings = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--hide-scrollbars"]
    command = [str(BROWSER), *settings, f"--user-data-dir={home}", *flags, page_file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("run")
    runs.folder(where, runs.made(dp=2, tp=2, pp=2, microbatches=4), samples=[Sample(30, "def ", EVIL)])
    page.draw(where)
    return where


def test_it_opens_without_an_error_and_nothing_of_a_sample_runs(folder: Path) -> None:
    done = browser(folder / record.PAGE, "--dump-dom")
    assert "CONSOLE" not in done.stderr, done.stderr
    assert '<button id="theme" type="button">Dark</button>' in done.stdout, "the script has shown its button"
    assert "<title>llama-tiny over pp 2 x dp 2 x tp 2 - plait</title>" in done.stdout
    assert "<img" not in done.stdout


def test_a_script_that_got_in_would_not_run(folder: Path) -> None:
    """Were the escaping to fail, the policy would still stand."""
    text = (folder / record.PAGE).read_text()
    bad = folder / "bad.html"
    bad.write_text(text.replace("<main>", "<main><script>document.title = 'owned'</script>"))
    done = browser(bad, "--dump-dom")
    assert "<title>owned" not in done.stdout
    assert "Content Security Policy" in done.stderr


def pixels(png: Path) -> tuple[int, int, set[bytes], bytes]:
    """Width, height, the colours of some rows, and the first pixel of an 8-bit RGB(A) image; filters are undone."""
    data = png.read_bytes()
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert depth == 8
    size = {2: 3, 6: 4}[kind]
    packed, place = b"", 8
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        if data[place + 4 : place + 8] == b"IDAT":
            packed += data[place + 8 : place + 8 + length]
        place += 12 + length
    raw, stride, before = zlib.decompress(packed), width * size, bytearray(width * size)
    colours: set[bytes] = set()
    first = b""
    for row in range(height):
        start = row * (stride + 1)
        line = _unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), before, size)
        first = first or bytes(line[:3])
        if row % 7 == 0:
            colours |= {bytes(line[at : at + 3]) for at in range(0, stride, size)}
        before = line
    return width, height, colours, first


def _unfiltered(kind: int, line: bytearray, above: bytearray, size: int) -> bytearray:
    for at in range(len(line) if kind else 0):
        left = line[at - size] if at >= size else 0
        corner = above[at - size] if at >= size else 0
        up = above[at]
        if kind == 4:
            guess = left + up - corner
            guess = min((left, up, corner), key=lambda value: abs(guess - value))
        else:
            guess = {1: left, 2: up, 3: (left + up) // 2}[kind]
        line[at] = (line[at] + guess) & 255
    return line


def colour(text: str) -> bytes:
    return bytes.fromhex(text.removeprefix("#"))


@pytest.mark.parametrize(("theme", "place"), [("light", 0), ("dark", 1)])
def test_both_palettes_draw(folder: Path, theme: str, place: int) -> None:
    from plait.report.style import PALETTE

    text = (folder / record.PAGE).read_text()
    themed = folder / f"{theme}.html"
    themed.write_text(text.replace('<html lang="en">', f'<html lang="en" data-theme="{theme}">'))
    shot = folder / f"{theme}.png"
    browser(themed, f"--screenshot={shot}", "--window-size=800,2400")
    width, height, colours, first = pixels(shot)
    assert (width, height) == (800, 2400)
    assert first == colour(PALETTE["paper"][place])
    for name in ("card", "blue", "sky", "orange", "purple", "green", "idle"):
        assert colour(PALETTE[name][place]) in colours, name


def test_every_class_that_is_drawn_has_a_colour(folder: Path) -> None:
    text = (folder / record.PAGE).read_text()
    sheet = text.partition("<style>")[2].partition("</style>")[0]
    for kinds in set(re.findall(r'<(?:rect|path|td|span)[^>]* ?class="([^"]+)"', text)):
        for kind in kinds.split():
            assert f".{kind}" in sheet, kind
