"""Records a session in the terminal of a slot, plays the recording, and writes its last screen as a picture: docs/terminal.svg. `make picture` runs it."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pyte
from pyte.screens import Char

from env_client import embedded

PICTURE = Path(__file__).parent.parent / "docs" / "terminal.svg"
WIDTH, HEIGHT = 76, 14
PROGRAM = "def area(width, height):\n    return width + height\n\n\nif __name__ == '__main__':\n    print(area(6, 7))\n"
KEYS = (
    ["PS1='\\[\\e[32m\\]slot\\[\\e[0m\\]$ '; clear", "Enter"],
    ["python3 area.py", "Enter"],
    ["vim -u NONE +'syntax on' +'set number numberwidth=4 laststatus=2' area.py", "Enter"],
    ["/+", "Enter", "r*", ":w", "Enter"],
    [":!python3 area.py", "Enter"],
    ["Enter"],
)
X_PX, Y_PX, MARGIN_PX = 8.4, 19, 14
BACKGROUND, FOREGROUND = "#1d1f21", "#d0d3d6"
COLORS = {
    "black": "#4d5057", "red": "#e06c75", "green": "#98c379", "brown": "#d7b05f", "blue": "#61a0ef", "magenta": "#c678dd", "cyan": "#56b6c2",
    "white": FOREGROUND, "default": FOREGROUND,
}  # fmt: skip


def record() -> str:
    """Return the recording of a session in a new slot."""
    with embedded(pools={"default": {"backend": "local", "slots_per_sandbox": 1}}) as service, service.client() as client, client.lease() as lease:
        lease.put_file("area.py", PROGRAM.encode())
        lease.exec("tmux", {"action": "reset", "pane_width": WIDTH, "pane_height": HEIGHT})
        for keys in KEYS:
            typed = lease.send_keys(keys, block=True)
            if not typed.success:
                raise RuntimeError(typed.error)
        return lease.get_recording().decode()


def play(recording: str) -> pyte.Screen:
    """Return the screen at the end of a recording."""
    header, *events = map(json.loads, recording.splitlines())
    screen = pyte.Screen(header["width"], header["height"])
    screen.resize(HEIGHT, WIDTH)
    stream = pyte.Stream(screen)
    for _, kind, text in events:
        if kind == "o":
            stream.feed(text)
    return screen


def draw(screen: pyte.Screen) -> str:
    """Return a screen as an SVG."""
    width_px, height_px = round(2 * MARGIN_PX + WIDTH * X_PX), 2 * MARGIN_PX + HEIGHT * Y_PX
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width_px} {height_px}" width="{width_px}" font-family="monospace" font-size="14">',
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
    ]
    for row in range(HEIGHT):
        for column in range(WIDTH):
            parts += draw_cell(screen.buffer[row][column], MARGIN_PX + column * X_PX, MARGIN_PX + row * Y_PX)
    return "\n".join([*parts, "</svg>", ""])


def draw_cell(cell: Char, x_px: float, y_px: float) -> list[str]:
    """Return the elements of one character: its background if it has one, and the character if it is not blank."""
    fill, back = color(cell.fg), color(cell.bg) if cell.bg != "default" else BACKGROUND
    if cell.reverse:
        fill, back = back, fill
    elements = [f'<rect x="{x_px:.1f}" y="{y_px}" width="{X_PX + 0.3:.1f}" height="{Y_PX}" fill="{back}"/>'] if back != BACKGROUND else []
    if cell.data.strip():
        weight = ' font-weight="bold"' if cell.bold else ""
        elements.append(f'<text x="{x_px:.1f}" y="{y_px + 14}" fill="{fill}"{weight}>{html.escape(cell.data)}</text>')
    return elements


def color(name: str) -> str:
    """Return a colour of the terminal as one of SVG."""
    return COLORS.get(name.removeprefix("bright"), f"#{name}")


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(draw(play(record())), encoding="utf-8")
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
