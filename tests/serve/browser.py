"""A headless Chromium, driven by Selenium, and what its tests read of a page."""

import base64
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / ".make" / "fleet-page"
TIMEOUT_S = 30


class Browser:
    """One window."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a JavaScript function's body."""
        return self.driver.execute_script(script, *arguments)

    def command(self, name: str, **parameters: Any) -> dict[str, Any]:
        """One command of Chromium's own protocol."""
        return cast(dict[str, Any], self.driver.execute_cdp_cmd(name, parameters))

    def texts(self, selector: str) -> list[str]:
        """What is to be read in the elements that a reader sees."""
        script = (
            "return [...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility()).map(e => e.innerText)"
        )
        return cast(list[str], self.run(script, selector))

    def text(self, selector: str = "body") -> str:
        return "\n".join(self.texts(selector))

    def eventually(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"did not come true in {timeout_s} s; the page says:\n{self.text()}"
            time.sleep(0.1)

    def errors(self) -> list[str]:
        """What the console has told of as an error since this was last asked."""
        entries = cast(list[dict[str, Any]], self.driver.get_log("browser"))  # type: ignore[no-untyped-call]
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def set_screen(self, width: int, height: int, *, dark: bool = False, is_phone: bool = False) -> None:
        """As a device of this size, in CSS pixels, whose user prefers the dark or not."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def accessible(self) -> list[tuple[str, str]]:
        """Role and name of all that Chromium tells assistive technology of."""
        nodes: list[dict[str, Any]] = self.command("Accessibility.getFullAXTree")["nodes"]
        told = [node for node in nodes if not node["ignored"]]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in told]

    def faint_texts(self) -> list[str]:
        """Texts whose contrast with what is behind them is below 4.5, as WCAG has it."""
        return cast(list[str], self.run(FAINT_TEXTS))

    def screenshot(self, name: str) -> Path:
        """The whole page as it looks now, kept for people to look at."""
        height = self.run("return document.documentElement.scrollHeight")
        width = self.run("return document.documentElement.clientWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        taken = self.command("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        path.write_bytes(base64.b64decode(taken["data"]))
        return path


FAINT_TEXTS = """
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
function rgba(colour) {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
}
const over = ([r, g, b, a], below) => [r, g, b].map((part, i) => a * part + (1 - a) * below[i]);
function light(colour) {
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = colour.map((part) => linear(part / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function grounds(element) {
  if (element === null) return [[255, 255, 255]];
  const style = getComputedStyle(element);
  const below = grounds(element.parentElement).map((ground) => over(rgba(style.backgroundColor), ground));
  const heat = style.backgroundImage.match(/(?:color|rgba?)\\([^)]*\\)/);
  return heat ? [...below, ...below.map((ground) => over(rgba(heat[0]), ground))] : below;
}
const faint = [];
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node = texts.nextNode(); node; node = texts.nextNode()) {
  const element = node.parentElement;
  if (!node.data.trim() || !element.checkVisibility() || element.closest("script, style, template")) continue;
  for (const ground of grounds(element)) {
    const shades = [over(rgba(getComputedStyle(element).color), ground), ground].map(light).sort((a, b) => b - a);
    const ratio = (shades[0] + 0.05) / (shades[1] + 0.05);
    if (ratio < 4.5) faint.push(`${ratio.toFixed(2)}: ${node.data.trim()}`);
  }
}
return faint;
"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser of its own; where there is none the test is skipped, but in CI it fails."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser, driver = next(filter(None, map(shutil.which, names)), None), shutil.which("chromedriver")
    if browser is None or driver is None:
        why = "no chromium and chromedriver are here; `make browser` installs them where it may"
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(why)
        pytest.skip(why)
    options = Options()
    options.binary_location = browser
    arguments = [
        "--headless=new",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--hide-scrollbars",
    ]
    if os.geteuid() == 0:
        # Chromium's sandbox does not start for root.
        arguments.append("--no-sandbox")
    for argument in arguments:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # Named, so that Selenium looks for no other one, here or elsewhere.
    opened = webdriver.Chrome(options=options, service=Service(driver))
    try:
        opened.set_script_timeout(TIMEOUT_S)
        yield Browser(opened)
    finally:
        opened.quit()
