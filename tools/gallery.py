"""The pictures of ``docs/images``, made anew: ``python -m tools.gallery`` where Chromium is.

Selenium, Pillow and torchao must be installed, and the packages of this repository.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs/images"
SCROLL = "document.getElementById('{}').scrollIntoView({{ behavior: 'instant' }})"
CHOOSE = "document.querySelectorAll('{} .row')[{}].click()"

XNNPACK = "--backend XnnpackBackend"
COMMANDS = f"""
lowerdeck lower clock:example -o clock.pte
lowerdeck inspect clock.pte --html clock.html
lowerdeck lower clock:example {XNNPACK} -o float.pte
lowerdeck lower clock:example {XNNPACK} --quantize int8 --calibrate clock:samples -o int8.pte
lowerdeck diff float.pte int8.pte --html diff.html
lowerdeck lower clock:example {XNNPACK} --quantize int8 --calibrate night:samples -o night.pte
lowerdeck run float.pte --input four.pt --trace float.json
lowerdeck run night.pte --input four.pt --trace night.json
lowerdeck diff float.pte night.pte --html night.html --traces float.json night.json
lowerdeck run int8.pte --trace int8.json
lowerdeck inspect int8.pte --html int8.html --trace int8.json
lowerdeck lower examples.vit:example -o vit.pte
lowerdeck run vit.pte --trace vit.json
lowerdeck inspect vit.pte --html vit.html --trace vit.json
lowerdeck lower examples.resnet18:example {XNNPACK} -o resnet.pte --html resnet.html
lowerdeck inspect resnet.pte --html resnet-file.html
"""
"""What makes the pages, as a reader would."""

SHOTS = {
    "clock-report.png": ("clock.html", 1100, 1420, "light", []),
    "file-graph.png": ("resnet-file.html", 1300, 800, "light", []),
    "vit-memory.png": ("vit.html", 1200, 900, "dark", [SCROLL.format("memory")]),
    "vit-modules.png": (
        "vit.html",
        1200,
        860,
        "light",
        [SCROLL.format("instructions"), CHOOSE.format(".instructions", 8)],
    ),
    "int8-times.png": ("int8.html", 1200, 680, "light", [SCROLL.format("instructions")]),
    "diff.png": (
        "diff.html",
        1200,
        800,
        "light",
        [SCROLL.format("instructions"), CHOOSE.format(".sides", 3)],
    ),
    "night.png": ("night.html", 1200, 440, "light", [SCROLL.format("instructions")]),
    "resnet-graph.png": ("resnet.html", 1500, 800, "light", []),
}
"""For each picture its page, the size, the scheme, and what is done before it is taken."""


def main() -> None:
    """Make the pages, and take their pictures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _clock(folder)
        for command in COMMANDS.strip().splitlines():
            done = subprocess.run(
                [Path(sys.executable).with_name("lowerdeck"), *command.split()[1:]],
                cwd=folder,
                check=False,
                env=os.environ
                | {"PYTHONPATH": f"{folder}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
            )
            # Files that differ are what `diff` is for.
            if done.returncode != ("diff" in command):
                raise SystemExit(f"{command} ended with {done.returncode}")
        _shoot(folder)


def _clock(folder: Path) -> None:
    """Write the tutorial's file and train its network."""
    first, second = (
        (ROOT / "docs/tutorial" / name).read_text()
        for name in ("1-a-model-to-a-file.md", "2-quantise-it.md")
    )
    training = first.split("```python\n")[1].partition("```")[0]
    save = 'torch.save([draw([4])], "four.pt")'
    for name, page in (("clock.py", first), ("night.py", second)):
        (folder / name).write_text(
            page.partition(f'```python title="{name}"\n')[2].partition("```")[0]
        )
    subprocess.run([sys.executable, "-c", f"{training}\n{save}"], cwd=folder, check=True)


def _shoot(folder: Path) -> None:
    webdriver: Any = importlib.import_module("selenium.webdriver")
    image: Any = importlib.import_module("PIL.Image")
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options)
    for name, (page, width, height, scheme, actions) in SHOTS.items():
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        browser.get((folder / page).as_uri())
        for action in ("", *actions):
            browser.execute_script(action)
            browser.execute_async_script("setTimeout(arguments[0], 400)")
        browser.save_screenshot(str(folder / name))
        # A page has few colours: a third of the bytes.
        image.open(folder / name).convert("RGB").quantize(128).save(IMAGES / name, optimize=True)
    browser.quit()


if __name__ == "__main__":
    main()
