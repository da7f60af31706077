"""The HTML report in a real browser: its script runs under its own policy, filters work, and nothing is fetched."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from v100ctl.audit import AuditReport, HostAudit, bounded
from v100ctl.audit.page import to_html
from v100ctl.findings import Finding

pytestmark = pytest.mark.slow

TRAP = "</div><script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"


def finding(identity: str, layer: str, severity: str, actual: str = "found") -> Finding:
    fields = {"kind": "drifted", "role": "llm_server", "expected": "wanted", "fix": "look"}
    return Finding(id=identity, layer=layer, severity=severity, actual=actual, **fields)  # type: ignore[arg-type]  # plain words


@pytest.fixture(scope="module")
def chromium() -> str:
    """Debian's browser, installed where it is missing."""
    found = shutil.which("chromium")
    if found is None:
        subprocess.run(["apt-get", "install", "--yes", "--no-install-recommends", "chromium"], check=True, capture_output=True)
        found = shutil.which("chromium")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on three hosts, one of which sets a trap."""
    findings = [
        finding("file.content:/etc/x", "file", "error", TRAP),
        finding("unit.disabled:v100-chat.service", "unit", "error"),
        finding("gpu.persistence:GPU-1", "hardware", "warn"),
    ]
    report = AuditReport(
        {
            "a": HostAudit("drift", bounded(findings), 10.0),
            "b": HostAudit("clean", (), 11.0),
            "c": HostAudit("unreachable", error=TRAP),
        }
    )
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(to_html(report, now_s=1_795_910_400.0), encoding="utf-8")
    return path


def browse(chromium: str, folder: Path, url: str, *arguments: str) -> str:
    """What the browser prints. No address but this file's can be reached."""
    argv = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    argv += ["--host-resolver-rules=MAP * ~NOTFOUND", "--hide-scrollbars", *arguments, url]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300)
    return done.stdout


def shown(document: str) -> list[str]:
    """Headings of the findings that are not hidden."""
    articles = re.findall(r"<article([^>]*)>\s*<h3>([^<]*)</h3>", document)
    return [heading for attributes, heading in articles if "hidden" not in attributes]


def test_filters_and_traps(chromium: str, page: Path, tmp_path: Path) -> None:
    everything = browse(chromium, tmp_path, page.as_uri(), "--dump-dom")
    assert shown(everything) == [
        "file.content:/etc/x",
        "unit.disabled:v100-chat.service",
        "gpu.persistence:GPU-1",
        "c: unreachable",
    ]
    assert "<title>v100ctl audit, " in everything, "no trap has worked"
    assert "<img" not in everything
    assert shown(browse(chromium, tmp_path, f"{page.as_uri()}#layer=unit", "--dump-dom")) == ["unit.disabled:v100-chat.service"]
    assert shown(browse(chromium, tmp_path, f"{page.as_uri()}#severity=warn&host=a", "--dump-dom")) == ["gpu.persistence:GPU-1"]
    nothing = browse(chromium, tmp_path, f"{page.as_uri()}#text=no-such-word", "--dump-dom")
    assert shown(nothing) == []
    assert re.search(r'<p id="none" class="dim">', nothing)


@pytest.mark.parametrize(("width", "dark"), [(500, False), (500, True), (1400, False)])
def test_it_is_drawn(chromium: str, page: Path, tmp_path: Path, width: int, dark: bool) -> None:
    picture = tmp_path / "page.png"
    extra = ["--force-dark-mode"] if dark else []
    browse(chromium, tmp_path, page.as_uri(), f"--window-size={width},900", f"--screenshot={picture}", *extra)
    data = picture.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (width, 900)
    # A page without a word is a few kilobytes.
    assert len(data) > 20_000
