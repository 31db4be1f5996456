"""Programs to show, and a headless browser to show them in."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lowerdeck import serializer as pte
from lowerdeck_files import programs

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

_KERNELS = ["aten::convolution.out", "aten::relu.out", "aten::add.out"]
_BLOB = b"DemoBackend 1 0badc0de\ninputs 1\nconv_relu_op,0,x=%0\nsin_op,1,x=%1\noutputs %2\n"


def layered_program(
    layers: int, *, prefix: str = "block", marked: str = "", delegate: bool = True
) -> pte.Program:
    """Return a program of ``layers`` kernel calls, planned in two alternating places.

    Every eighth result is kept for a sum much later, so the picture of memory is not a zebra.
    """
    tensor, frame = programs.tensor, pte.Frame
    values = [pte.Int(1), pte.Double(float("inf")), pte.IntList([0, 0])]
    values.append(tensor([1, 16, 32, 32], at=0))
    values.append(tensor([1, 16, 1, 1], at=65536, name="state.running_mean"))
    constants: list[bytes] = []
    steps: list[Any] = []
    traces: list[pte.FrameList] = []
    source = 3
    kept: list[int] = []
    for layer in range(layers):
        channels = 8 << (layer // 5 % 2)
        place = 65600 + 65536 * (layer % 2)
        place += 131072 * (1 + len(kept) % 3) if layer % 8 == 0 else 0
        if layer % 2 == 0:
            constants.append(bytes(36 * channels))
            name = f"{prefix}.{layer}.conv{marked}.weight"
            values.append(tensor([channels, 1, 3, 3], name=name, index=len(constants)))
        result = len(values)
        values.append(tensor([1, channels, 32, 32], at=place))
        if layer % 8 == 7 and kept:
            step = 2, [source, kept.pop(0), 0, result, result]
        elif layer % 2 == 0:
            step = 0, [source, result - 1, 0, 2, 1, result, result]
        else:
            step = 1, [source, result, result]
        if layer % 8 == 0:
            kept.append(result)
        steps.append(pte.KernelCall(*step))
        frames = [frame("models/train.py", 12, "main", "net(images)")]
        frames.append(frame(f"models/net{marked}.py", 40 + layer, "forward", "x = self.block(x)"))
        traces.append(pte.FrameList(frames))
        source = result
    output = len(values)
    values.append(tensor([1, 10], at=600_000))
    if delegate:
        steps.append(pte.DelegateCall(0, [source, output]))
        traces.append(pte.FrameList([frame("models/net.py", 9, "forward", "self.head(x)")]))
    made = programs.program(
        values, *steps, constants=constants, memory=720_000, inputs=[3], outputs=[output]
    )
    (plan,) = made.execution_plan
    plan.operators = [pte.Operator(*name.partition(".")[::2]) for name in _KERNELS]
    plan.chains[0].stacktrace = traces
    specs = [("mode", b"fast")]
    return (
        programs.add_delegates(made, _BLOB, backend="DemoBackend", specs=specs)
        if delegate
        else made
    )


@pytest.fixture(scope="session")
def program() -> Callable[..., pte.Program]:
    """A maker of programs with any number of instructions."""
    return layered_program


@pytest.fixture(scope="session")
def browser() -> Iterator[Chrome]:
    """A headless Chromium; the tests are skipped where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("chromium or chromedriver is missing (Debian: chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=driver)
    chrome = webdriver.Chrome(options=options, service=service)
    yield chrome
    chrome.quit()


class Page:
    """A page in the browser, with what the tests ask of it."""

    def __init__(self, browser: Chrome) -> None:
        self.browser = browser

    def ask(self, script: str, *args: object) -> Any:
        """Return what a piece of JavaScript gives."""
        return self.browser.execute_script(script, *args)

    def resize(self, width: int, height: int = 900) -> None:
        """Show the page in a window of so many pixels, narrower than a real window can be."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.settle()

    def settle(self) -> None:
        """Wait until searches and redraws that were started are done."""
        self.browser.execute_async_script(
            "const done = arguments[0];"
            "setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 120);"
        )

    def keys(self, *keys: str) -> None:
        """Press keys where the focus is, one after the other."""
        for key in keys:
            self.browser.switch_to.active_element.send_keys(key)
        self.settle()

    def complaints(self) -> list[str]:
        """Return what the browser wrote to its console."""
        return [entry["message"] for entry in self.browser.get_log("browser")]


@pytest.fixture
def show(browser: Chrome, tmp_path: Path) -> Iterator[Callable[[str], Page]]:
    """Write a page to a file and open it."""

    def _show(text: str) -> Page:
        path = tmp_path / "page.html"
        path.write_text(text, encoding="utf-8")
        browser.get_log("browser")
        browser.get(path.as_uri())
        page = Page(browser)
        page.settle()
        return page

    yield _show
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
