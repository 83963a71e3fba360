"""Takes the screenshots of the server's page that the documents show, in a headless Chromium.

    python scripts/take_page_screenshots.py    # docs/page.png and docs/page_dark.png

The server has the demo model with its EAGLE-3 head, and runs on this machine's CPU.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "test" / "support"))
from browser import Page, find_browser, open_browser  # noqa: E402
from serving_utils import running_server  # noqa: E402

FLAGS = (
    *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "demo-eagle3"),
    *("--speculative-num-steps", "5", "--speculative-load-aware", "off"),
)
SIZE = {"width": 1280, "height": 860}
PROMPT = 'class Stack:\n    """A stack of items."""\n\n    def '
IS_DONE = "!document.getElementById('send').disabled && !toDraw.size"


def main() -> int:
    """Takes them all; exits with 1 where there is no browser."""
    path = find_browser()
    if path is None:
        print("There is no Chromium: apt-get install chromium", file=sys.stderr)
        return 1
    with running_server("demo", *FLAGS) as server, open_browser(path) as page:
        page.call("Emulation.setDeviceMetricsOverride", **SIZE, deviceScaleFactor=1, mobile=False)
        page.open(f"{server.url}/")
        page.wait_for("document.getElementById('status').innerText === 'Ready'")
        page.fill("prompt", PROMPT)
        generate(page, num_outputs=1, temperature=0, num_tokens=256)
        time.sleep(4)
        generate(page, num_outputs=20, temperature=0.7, num_tokens=256)
        time.sleep(4)
        generate(page, num_outputs=1, temperature=0.3, num_tokens=192)
        take(page, "page.png", "light")
        page.fill("streams", "20")
        page.fill("temperature", "0.7")
        page.click("send")
        time.sleep(5)
        take(page, "page_dark.png", "dark")
    return 0


def generate(page: Page, num_outputs: int, temperature: float, num_tokens: int) -> None:
    """Generates outputs at once, to their end."""
    page.fill("streams", str(num_outputs))
    page.fill("temperature", str(temperature))
    page.fill("max-tokens", str(num_tokens))
    page.click("send")
    page.wait_for(IS_DONE, timeout_s=120)


def take(page: Page, name: str, scheme: str) -> None:
    """Writes a picture of what is to be seen, in light or dark colours."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    page.call("Emulation.setEmulatedMedia", features=[feature])
    page.run("new Promise((resolve) => setTimeout(resolve, 300))")
    file = ROOT / "docs" / name
    file.write_bytes(page.screenshot())
    print(f"{file.relative_to(ROOT)}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    sys.exit(main())
