"""Opens reports in a real browser: tables sort and filter, charts draw, no error, nothing of a model is run.

Needs Chromium and ChromeDriver (`apt-get install chromium chromium-driver`), and is no part of the test suite:

    python tests/browser_report.py [FILE.html] [--shots FOLDER]

Without a file it makes one of a GPT of 32 layers. With a folder it leaves pictures of the page there, light and dark,
and the page as printed.
"""

from __future__ import annotations

import argparse
import base64
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from models import Gpt
from torch import nn

import meshstep as ms

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1366,768", "--hide-scrollbars",
)  # fmt: skip
EVIL = "</script><img src=x onerror=alert(1)><!--"


class Browser:
    """A page in Chromium, by the WebDriver protocol."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"
        options = {"args": list(FLAGS), "binary": "/usr/bin/chromium"}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self.ask("/session", {"capabilities": {"alwaysMatch": wanted}})
        self.base += f"/session/{made['sessionId']}"

    def ask(self, path: str, body: dict | None = None, method: str = "POST") -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def run(self, script: str, *args: Any) -> Any:
        """What a script returns."""
        return self.ask("/execute/sync", {"script": script, "args": list(args)})

    def open(self, file: Path, scheme: str = "light") -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}})
        self.ask("/url", {"url": file.resolve().as_uri()})
        until = time.monotonic() + 20
        while self.run("return document.documentElement.dataset.ready") != "yes":
            assert time.monotonic() < until, f"the page is not ready: {self.logged()}"
            time.sleep(0.05)

    def logged(self) -> list[str]:
        """What the console says."""
        return [entry["message"] for entry in self.ask("/se/log", {"type": "browser"})]

    def column(self, table: str, index: int) -> list[str]:
        """The cells of a column of a table."""
        rows = "return [...document.querySelectorAll(`#${arguments[0]} tbody tr.row`)]"
        return self.run(f"{rows}.map((row) => row.children[arguments[1]].textContent)", table, index)

    def press(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

    def type(self, selector: str, text: str) -> None:
        self.run(
            "const e = document.querySelector(arguments[0]); e.value = arguments[1]; "
            "e.dispatchEvent(new Event('input'))",
            selector,
            text,
        )

    def shot(self, file: Path) -> None:
        """A picture of the whole page."""
        height = self.run("return document.documentElement.scrollHeight")
        size = {"width": 1366, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": size})
        file.write_bytes(base64.b64decode(self.ask("/screenshot", method="GET")))
        self.ask("/goog/cdp/execute", {"cmd": "Emulation.clearDeviceMetricsOverride", "params": {}})

    def printed(self, file: Path) -> None:
        """The page as it is printed."""
        file.write_bytes(base64.b64decode(self.ask("/print", {"background": True})))


@contextmanager
def browser() -> Iterator[Browser]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 20
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < until, "chromedriver does not start"
            time.sleep(0.05)
        made = Browser(port)
        yield made
        made.ask("", method="DELETE")
    finally:
        driver.terminate()
        driver.wait()


def amount(text: str) -> float:
    """The number that a cell shows: `1.5 KiB`, `4.56 ms`."""
    number, _, unit = text.replace(",", "").partition(" ")
    scale = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "us": 1, "ms": 1e3, "s": 1e6, "": 1}
    return float(number) * scale[unit]


def check_tables(page: Browser) -> None:
    sizes = [amount(text) for text in page.column("collectives-table", 4)]
    assert sizes == sorted(sizes, reverse=True), "collectives do not begin with the slowest"
    page.press("#collectives-table th:nth-child(4) button")
    sizes = [amount(text) for text in page.column("collectives-table", 3)]
    assert sizes == sorted(sizes, reverse=True), "the first press on a size does not sort downwards"
    page.press("#collectives-table th:nth-child(4) button")
    sizes = [amount(text) for text in page.column("collectives-table", 3)]
    assert sizes == sorted(sizes), "the second press does not turn the order"
    assert page.run("return document.querySelector('#collectives-table th:nth-child(4)').ariaSort") == "ascending"
    kinds = page.column("collectives-table", 0)
    page.type("#collectives-table input[type=search]", "all_gather")
    found = page.column("collectives-table", 0)
    assert 0 < len(found) < len(kinds) and all("all_gather" in kind for kind in found), "the filter does not filter"
    page.press("#collectives-table tr.row")
    said = page.run("return document.querySelector('#collectives-table tr.more').textContent")
    assert "wants" in said and "Instead" in said, said
    grouped = len(page.column("parameters-table", 0))
    page.press("#parameters-table input[type=checkbox]")
    each = len(page.column("parameters-table", 0))
    assert each > grouped, "repeated layers do not come apart"
    page.press("#parameters-table th:nth-child(5) button")
    sizes = [amount(text) for text in page.column("parameters-table", 4)]
    assert sizes == sorted(sizes, reverse=True)
    page.press("#parameters-table tr.row")
    assert page.run("return document.querySelector('#parameters-table tr.more').textContent.length") > 20


def check_charts(page: Browser) -> None:
    drawn = """
        const canvas = document.getElementById("timeline-canvas"), g = canvas.getContext("2d");
        const pixels = g.getImageData(0, 0, canvas.width, canvas.height).data, seen = new Set();
        for (let i = 0; i < pixels.length; i += 4)
            if (pixels[i + 3]) seen.add(pixels[i] << 16 | pixels[i + 1] << 8 | pixels[i + 2]);
        return [canvas.width, seen.size];
    """
    picture = "return document.getElementById('timeline-canvas').toDataURL()"
    width, colours = page.run(drawn)
    before = page.run(picture)
    assert width > 1000 and colours > 10, "the timeline is empty"
    page.press("#zoom-in")
    assert page.run(picture) != before, "the timeline does not zoom"
    page.press("#zoom-all")
    assert page.run(picture) == before
    page.run("""
        const canvas = document.getElementById("timeline-canvas"), box = canvas.getBoundingClientRect();
        const at = {clientX: box.left + 300, clientY: box.top + 12};
        canvas.dispatchEvent(new PointerEvent("pointermove", at));
    """)
    assert page.run("return document.getElementById('tip').hidden") is False, "nothing is said of what is pointed at"
    assert page.run("return document.querySelectorAll('#memory-curve polygon').length") == 3
    assert page.run("return document.querySelectorAll('#memory-bar i').length") >= 3


def check_program(page: Browser) -> None:
    rows = "return document.querySelectorAll('#tree-body tr').length"
    before = page.run(rows)
    page.press("#tree-body tr.row:nth-child(2)")
    assert page.run(rows) > before, "a module does not open"
    page.press("#tree-body tr.row:nth-child(2)")
    assert page.run(rows) == before, "a module does not close"
    page.type("#program-search", "aten. mm forward")
    lines = page.run("return [...document.querySelectorAll('#found tbody tr')].map((row) => row.textContent)")
    assert lines and all("mm" in line or "more" in line for line in lines), lines[:3]
    page.type("#program-search", "")
    assert page.run("return document.getElementById('found').children.length") == 0


def check_themes(page: Browser) -> None:
    colour = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(colour)
    page.press("#theme")
    assert page.run(colour) != light, "the theme does not change"
    page.press("#theme")
    assert page.run(colour) == light


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def layers() -> ms.Lowered:
    model, x = Gpt(layers=32), torch.randint(16, (8, 4))
    styles = {"*.up": "colwise", "*.down": "rowwise", "*.qkv": "colwise", "*.proj": "rowwise", "*.norm?": "sequence"}
    plan = ms.plans.fsdp("dp") + ms.plans.tensor_parallel(styles, "tp")
    optimizer = torch.optim.AdamW(model.parameters())
    return ms.simulate(step, mesh=ms.Mesh(dp=2, tp=2), plan=plan).lower(model, optimizer, x, x.roll(1, 1))


def evil() -> ms.Lowered:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(EVIL, nn.Linear(6, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._modules[EVIL](x)

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    forward.__name__ = EVIL
    return ms.simulate(forward, mesh=ms.Mesh(dp=2)).lower(Model(), torch.randn(8, 6))


def main() -> None:
    parser = argparse.ArgumentParser(description="Open a report in Chromium and use it.")
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--shots", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, browser() as page:
        file, bad = given.file or Path(folder) / "layers.html", Path(folder) / "evil.html"
        if given.file is None:
            layers().report(file, memory=2**20)
        evil().report(bad)
        page.open(file)
        for check in (check_tables, check_charts, check_program, check_themes):
            check(page)
            print(f"{check.__name__.removeprefix('check_')}: good")
        said = page.logged()
        assert not said, said
        page.open(bad)
        assert page.run("return document.images.length") == 0 and page.logged() == []
        assert EVIL in page.run("return document.querySelector('h1').textContent")
        print("names of a model: harmless")
        if given.shots:
            given.shots.mkdir(parents=True, exist_ok=True)
            for scheme in ("light", "dark"):
                page.open(file, scheme)
                page.shot(given.shots / f"{scheme}.png")
            page.printed(given.shots / "print.pdf")
    print(f"{file.name}: no error", file=sys.stderr)


if __name__ == "__main__":
    main()
