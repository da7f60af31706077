"""All headers at once: from which place, read once, kept, and what is unknown rather than wrong."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.models import making
from v100ctl.access import Access
from v100ctl.artifacts.cache import Cache
from v100ctl.errors import UnreachableError, V100ctlError
from v100ctl.fleet import ModelSpec
from v100ctl.models import collect
from v100ctl.models.collect import HeaderCache, HeaderRequest, ModelHeaderUnknown, collect_headers
from v100ctl.models.local import read_local
from v100ctl.models.source import ModelHeaderError, ModelMissingError
from v100ctl.models.types import ModelHeader
from v100ctl.probe.connection import Connection

SHA256 = "ab" * 32
LOCAL = Connection.from_vars("web1", {"ansible_connection": "local", "ansible_become": False})


class World:
    """Folders in place of the user's, and what was asked of whom."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "tiny.gguf"
        making.dense(self.file)
        self.header = read_local(self.file)
        self.models = Cache(folder / "cache")

    def ask(self, *requests: HeaderRequest, access: Access | None = None) -> list[ModelHeader | V100ctlError]:
        found = collect_headers(requests, access or Access(timeout_s=20), cache=self.folder / "headers", models=self.models)
        return [found[request] for request in requests]

    def entries(self) -> list[Path]:
        return sorted((self.folder / "headers").glob("*.json"))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def on_host(path: Path | str, connection: Connection | None = LOCAL, **spec: Any) -> HeaderRequest:
    given = ModelSpec(**(spec or {"path": str(path)}), sha256=SHA256)
    return HeaderRequest("web1", connection, given, str(path))


def calls(monkeypatch: pytest.MonkeyPatch, name: str, answer: Callable[..., Any] | None = None) -> list[Any]:
    """Note each call of one of the module's readers; with ``answer``, in its place."""
    real = answer or getattr(collect, name)
    noted: list[Any] = []

    def note(*args: Any, **options: Any) -> Any:
        noted.append(args)
        return real(*args, **options)

    monkeypatch.setattr(collect, name, note)
    return noted


def test_each_place_is_read_once_for_all_hosts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    local, web = calls(monkeypatch, "read_local"), calls(monkeypatch, "read_url", lambda *_, **__: world.header)
    requests = [
        HeaderRequest(host, LOCAL, ModelSpec(sha256=SHA256, **source), f"/var/lib/v100ctl/models/{host}.gguf")
        for host in ("web1", "web2", "web3")
        for source in ({"from_controller": str(world.file)}, {"url": "https://models.example/tiny.gguf"})
    ]
    assert world.ask(*requests) == [world.header] * 6
    assert (len(local), len(web)) == (1, 1)


def test_a_file_on_the_host_is_asked_for_over_its_connection(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = calls(monkeypatch, "read_from_host")
    missing = on_host(world.folder / "none.gguf")
    unclaimed = HeaderRequest("web1", LOCAL, None, str(world.file))
    good, none, projector = world.ask(on_host(world.file), missing, unclaimed)
    assert good == world.header and projector == world.header
    assert isinstance(none, ModelMissingError)
    # One session for all three.
    assert len(asked) == 1


def test_a_file_of_another_host_is_read_there(world: World) -> None:
    spec = ModelSpec(from_host={"host": "web2", "path": str(world.file)}, sha256=SHA256)
    request = HeaderRequest("web1", LOCAL, spec, "/var/lib/v100ctl/models/abababababab-tiny.gguf", path_there=str(world.file))
    assert world.ask(request) == [world.header]


def test_the_second_run_asks_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [on_host(world.file), on_host("/x", from_controller=str(world.file))]
    assert world.ask(*requests) == [world.header] * 2
    for name in ("read_from_host", "read_local", "read_url", "start_session"):
        monkeypatch.delattr(collect, name)
    assert world.ask(*requests) == [world.header] * 2


def test_a_file_of_this_machine_that_changed_is_read_anew(world: World) -> None:
    request = on_host("/x", from_controller=str(world.file))
    world.ask(request)
    making.dense(world.file, vocabulary=7)
    (header,) = world.ask(request)
    assert isinstance(header, ModelHeader) and header.array_lengths["tokenizer.ggml.tokens"] == 7


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "swapped", "version"])
def test_a_damaged_entry_is_dropped_and_made_again(damage: str, world: World) -> None:
    request = on_host(world.file)
    world.ask(request)
    (entry,) = world.entries()
    content = entry.read_bytes()
    if damage == "cut":
        entry.write_bytes(content[:-10])
    elif damage == "changed":
        entry.write_bytes(content.replace(b'"qwen2"', b'"qwen3"', 1))
    elif damage == "empty":
        entry.write_bytes(b"")
    elif damage == "swapped":
        # Sound, but of another file.
        HeaderCache(entry.parent).put("cd" * 32, "other", world.header.model_copy(update={"architecture": "other"}))
        shutil.copy(next(path for path in world.entries() if path != entry), entry)
    else:
        store = HeaderCache(entry.parent)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collect, "_CACHE_VERSION", 0)
            store.put(SHA256, f"host web1 {world.file} {SHA256}", world.header.model_copy(update={"architecture": "old"}))
        assert entry.read_bytes() != content
    assert world.ask(request) == [world.header]
    assert entry.read_bytes() == content


def test_a_cache_that_cannot_be_written_is_none(world: World) -> None:
    (world.folder / "headers").write_text("a file is in the way")
    assert world.ask(on_host(world.file)) == [world.header]


def test_errors_are_not_kept(world: World) -> None:
    late = world.folder / "late.gguf"
    assert isinstance(world.ask(on_host(late))[0], ModelMissingError)
    shutil.copy(world.file, late)
    assert world.ask(on_host(late)) == [world.header]


PYPI = {"pypi": "tiny-model==1.0", "archive_sha256": "cd" * 32, "member": "tiny/tiny.gguf"}


def test_a_package_that_was_not_fetched_is_unknown_and_no_fault(world: World) -> None:
    for connection in (None, LOCAL):
        (outcome,) = world.ask(on_host("/nowhere/tiny.gguf", connection, **PYPI))
        assert isinstance(outcome, ModelHeaderUnknown) and "has not been fetched yet" in outcome.message


def test_what_the_controller_or_the_host_has_of_a_package_is_read(world: World) -> None:
    assert world.ask(on_host(world.file, **PYPI)) == [world.header]
    for entry in world.entries():
        entry.unlink()
    copy = world.models.model_path(SHA256)
    copy.parent.mkdir(parents=True)
    shutil.copy(world.file, copy)
    assert world.ask(on_host("/nowhere/tiny.gguf", None, **PYPI)) == [world.header]


def test_a_url_that_nobody_answers_may_be_on_the_host_already(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> ModelHeader:
        raise ModelHeaderError("nobody answers")

    calls(monkeypatch, "read_url", unreachable)
    here = on_host(world.file, url="https://models.example/tiny.gguf")
    nowhere = on_host("/none.gguf", url="https://models.example/other.gguf")
    offline = on_host("/x", None, url="https://models.example/third.gguf")
    assert world.ask(here) == [world.header]
    assert [str(outcome) for outcome in world.ask(nowhere, offline)] == ["nobody answers"] * 2


def test_offline_a_file_on_a_host_is_unknown(world: World) -> None:
    (outcome,) = world.ask(on_host(world.file, None))
    assert isinstance(outcome, ModelHeaderUnknown) and "which was not asked" in outcome.message


def test_a_host_that_cannot_be_reached_is_an_error_of_its_models_alone(world: World) -> None:
    variables = {"ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_ssh_common_args": "-F /dev/null"}
    gone = Connection.from_vars("gone", variables)
    good, bad = world.ask(on_host(world.file), HeaderRequest("gone", gone, ModelSpec(path="/m.gguf", sha256=SHA256), "/m.gguf"))
    assert good == world.header
    assert isinstance(bad, UnreachableError)


def test_what_hangs_is_given_up_and_delays_no_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def hang(*_: Any, **__: Any) -> ModelHeader:
        released.wait(60)
        raise ModelHeaderError("late")

    calls(monkeypatch, "read_url", hang)
    monkeypatch.setattr(collect, "_GRACE_S", 0.1)
    hanging = on_host("/x", None, url="https://models.example/tiny.gguf")
    # One at a time: the one behind it comes to its turn all the same.
    stuck, good = world.ask(hanging, on_host("/x", from_controller=str(world.file)), access=Access(timeout_s=1.0, forks=1))
    released.set()
    assert good == world.header
    assert isinstance(stuck, ModelHeaderError) and "was not read within 1 s" in stuck.message
