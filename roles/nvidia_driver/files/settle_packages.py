"""Say what becomes of installed packages when a driver of another branch takes their place. Changes nothing.

Prints one JSON list of words for ``apt-get install``: a package that the host's package index has in a version of the wanted
driver is named, so that it comes along; any other is named with a ``-`` behind, which removes it. With package files in place of
an index nothing is named that one of them replaces. What is not installed, or is no driver's package by its version (CUDA's begin
with two digits), or is of the wanted driver already, is not named. Standard library only, Python >= 3.8.
"""

import argparse
import json
import os
import re
import subprocess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterable


def run(argv: "list[str]", *, check: bool = True) -> str:
    """What a program printed."""
    environment = dict(os.environ, LC_ALL="C")
    return subprocess.run(argv, env=environment, stdout=subprocess.PIPE, check=check).stdout.decode("utf-8", "replace")


def candidates(policy: str) -> "dict[str, str]":
    """Package -> the version that ``apt-cache policy`` says would be installed; empty for ``(none)``."""
    found = {}
    name = ""
    for line in policy.splitlines():
        if line and not line.startswith(" "):
            name = line.rstrip(":")
        candidate = re.match(r"  Candidate: (\S+)", line)
        if candidate:
            found[name] = "" if candidate.group(1) == "(none)" else candidate.group(1)
    return found


def is_of(version: str, driver: str) -> bool:
    """Is a package's version one of the driver ``driver``, a branch (``580``) or an exact version (``580.159.04``)?"""
    upstream = re.sub(r"^[0-9]+:", "", version).partition("-")[0]
    return upstream == driver or upstream.startswith(driver + ".")


def others(listed: str, driver: str, architecture: str) -> "list[str]":
    """The packages of another driver among those of ``dpkg-query``'s list: state, name and version.

    Libraries have their architecture in the name there; apt says it for those of another than the host's alone.
    """
    rows = [line.split() for line in listed.splitlines()]
    return [
        name[: -len(architecture) - 1] if name.endswith(":" + architecture) else name
        for state, name, version in (row for row in rows if len(row) == 3)
        if state not in ("not-installed", "config-files")
        and re.match(r"([0-9]+:)?[0-9]{3}\.[0-9]", version)
        and not is_of(version, driver)
    ]


def words(installed: "Iterable[str]", found: "dict[str, str]", driver: str) -> "list[str]":
    """The words for installed packages, with what the index has of each."""
    return [name if is_of(found.get(name, ""), driver) else name + "-" for name in installed]


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description="Say what becomes of packages of another driver. Changes nothing.")
    parser.add_argument("--driver", required=True, help="branch or version that the host shall have")
    parser.add_argument("--file", action="append", default=[], dest="files", help="a package file that is installed, too")
    parser.add_argument("packages", nargs="+")
    options = parser.parse_args()
    # It fails where one of the names is not known, and lists the others.
    listed = run(
        ["dpkg-query", "--show", "--showformat", "${db:Status-Status} ${binary:Package} ${Version}\n", *options.packages],
        check=False,
    )
    packages = others(listed, options.driver, run(["dpkg", "--print-architecture"]).strip())
    if options.files:
        coming = {run(["dpkg-deb", "--field", path, "Package"]).strip() for path in options.files}
        print(json.dumps([name + "-" for name in packages if name.partition(":")[0] not in coming]))
        return
    policy = run(["apt-cache", "policy", *packages]) if packages else ""
    print(json.dumps(words(packages, candidates(policy), options.driver)))


if __name__ == "__main__":
    main()
