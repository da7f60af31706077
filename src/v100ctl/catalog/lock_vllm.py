"""The complete lock of one version of vLLM: every package that it needs, with the hashes of its files.

``python -m v100ctl.catalog.lock_vllm VERSION`` writes ``vllm_locks/VERSION.txt`` beside this module, with ``uv`` and whatever
package index that is configured for. It resolves for each Python of the version's row, for Linux on x86-64 and wheels only, and
puts the answers together: a package that not every Python gets the same carries a marker. pip and uv read the result as it is.

vLLM's own requirements have no upper bounds where it matters, so a package is never newer than the row's ``lock.until``: it is
what users of that version had.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from v100ctl.catalog import load_catalog
from v100ctl.catalog.vllm import VllmRow
from v100ctl.catalog.vllm_lock import LOCKS, LockedPackage, parse_lock

#: The least glibc of a host that gets these wheels: Debian 11 has 2.31.
PLATFORM = "x86_64-manylinux_2_28"
#: Metadata of 150 packages over a slow line.
TIMEOUT_S = 1200


class LockError(Exception):
    """uv is missing, or there is no set of packages that fits."""


def resolve(row: VllmRow, python: str, uv: str = "uv") -> tuple[LockedPackage, ...]:
    """Every package that ``row`` needs on one Python.

    Raises:
        LockError: see there.
    """
    if row.lock is None:
        raise LockError(f"the catalog says nothing about a lock of vLLM {row.version}")
    asked = [f"vllm=={row.version}", *(f"{name}{bound}" for name, bound in row.requirements.items())]
    with tempfile.TemporaryDirectory() as folder:
        wanted, left_out = Path(folder, "requirements.in"), Path(folder, "overrides.txt")
        wanted.write_text("\n".join(asked) + "\n", encoding="utf-8")
        # An override whose marker never holds takes a package out of the graph.
        left_out.write_text("".join(f"{name} ; python_version < '3'\n" for name in row.lock.left_out), encoding="utf-8")
        argv = [uv, "pip", "compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate", "--only-binary", ":all:"]
        argv += ["--no-emit-index-url", "--no-emit-find-links", "--python-version", python, "--python-platform", PLATFORM]
        argv += ["--exclude-newer", row.lock.until.isoformat(), "--overrides", str(left_out), str(wanted)]
        try:
            done = subprocess.run(argv, capture_output=True, encoding="utf-8", timeout=TIMEOUT_S, check=False)
        except FileNotFoundError as error:
            raise LockError(f"`{uv}` is not installed") from error
    if done.returncode != 0:
        raise LockError(f"nothing fits vLLM {row.version} on Python {python}: {done.stderr.strip()}")
    return parse_lock(done.stdout)


def merge(found: Mapping[str, Sequence[LockedPackage]]) -> str:
    """The locks of several Pythons as one, with markers where they differ."""
    pythons: dict[LockedPackage, list[str]] = {}
    for python, packages in found.items():
        for package in packages:
            pythons.setdefault(package, []).append(python)
    blocks = []
    for package, users in sorted(pythons.items(), key=lambda item: (item[0].name, item[1])):
        marker = "" if len(users) == len(found) else " ; " + " or ".join(f'python_version == "{user}"' for user in users)
        hashes = "".join(f" \\\n    --hash={digest}" for digest in package.hashes)
        blocks.append(f"{package.name}=={package.version}{marker}{hashes}\n")
    return "".join(blocks)


def head(row: VllmRow) -> str:
    """What the file says about itself."""
    if row.lock is None:
        return ""
    pythons = ", ".join(row.lock.pythons)
    lines = [
        f"vLLM {row.version} and everything that it needs, for Python {pythons} on Linux and x86-64, as of {row.lock.until}.",
        f"`python -m v100ctl.catalog.lock_vllm {row.version}` makes it again, with uv.",
        *(f"Without {name}: {why}." for name, why in row.lock.left_out.items()),
    ]
    return "".join(f"# {line}\n" for line in lines)


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m v100ctl.catalog.lock_vllm", description=__doc__.splitlines()[0])
    parser.add_argument("version", help="a version of the catalog: 0.8.5.post1")
    parser.add_argument("--uv", default="uv", help="the program uv, where PATH does not have it")
    given = parser.parse_args(arguments)
    row = next((row for row in load_catalog().vllm_rows if row.version == given.version and row.lock), None)
    if row is None or row.lock is None:
        parser.error(f"the catalog has no row with `lock` for {given.version}")
    try:
        text = merge({python: resolve(row, python, given.uv) for python in row.lock.pythons})
    except (LockError, OSError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    path = Path(__file__).with_name(LOCKS) / f"{row.version}.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text(head(row) + text, encoding="utf-8")
    print(f"{path}: {len(re.findall(r'^[a-z].*==', text, re.MULTILINE))} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
