"""The inventory: what is read, what is refused, and how the message helps."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from v100ctl.errors import InventoryError
from v100ctl.fleet import adhoc_fleet, default_inventory, load_fleet, parse_config, parse_target

from .factory import MODEL, make_config


def write_inventory(folder: Path, hosts: dict[str, Any], **variables: Any) -> Path:
    path = folder / "hosts.yml"
    path.write_text(yaml.safe_dump({"all": {"hosts": hosts, "vars": variables}}))
    return path


def test_defaults_come_from_the_roles() -> None:
    config = parse_config("h1", {})
    assert config.llama_cpp_build == 11434
    assert config.llama_cpp_cuda_architectures == "70"
    assert config.llm_server_instances == {}


def test_templates_and_groups_work_as_in_ansible(tmp_path: Path) -> None:
    group_vars = tmp_path / "group_vars"
    group_vars.mkdir()
    (group_vars / "all.yml").write_text("base_port: 8000\n")
    inventory = write_inventory(
        tmp_path,
        {"h1": {"llm_server_instances": {"chat": {"model": MODEL, "port": "{{ base_port + 1 }}"}}}, "h2": None},
        llama_cpp_backend="cpu",
    )
    fleet = load_fleet([inventory])
    assert list(fleet.hosts) == ["h1", "h2"]
    assert fleet.hosts["h1"].config.llm_server_instances["chat"].port == 8001
    assert type(fleet.hosts["h1"].variables["llama_cpp_backend"]) is str


def test_variables_of_others_need_no_value_yet(tmp_path: Path) -> None:
    own = {"llama_farm": "{{ ansible_facts['farm'] }}", "farm": "{{ nowhere }}"}
    model = {**MODEL, "url": None, "from_controller": "{{ inventory_dir }}/x.gguf"}
    inventory = write_inventory(tmp_path, {"h1": None}, llm_server_instances={"chat": {"model": model}}, **own)
    (instance,) = load_fleet([inventory]).hosts["h1"].config.llm_server_instances.values()
    assert instance.model.from_controller == f"{tmp_path}/x.gguf"
    with pytest.raises(InventoryError, match="`llama_cpp_bild` is not known"):
        load_fleet([write_inventory(tmp_path, {"h1": None}, llama_cpp_bild="{{ nowhere }}")])


def test_limit_narrows_and_builders_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text(
        yaml.safe_dump({"all": {"hosts": {"h1": None, "h2": None}, "children": {"builders": {"hosts": {"b1": None}}}}})
    )
    assert list(load_fleet([path]).hosts) == ["h1", "h2"]
    assert list(load_fleet([path], "h2").hosts) == ["h2"]
    with pytest.raises(InventoryError, match="no hosts that match `nothing`"):
        load_fleet([path], "nothing")


@pytest.mark.parametrize("limit", ["", " ", ",", "[", "~[", "all:!h[1", "@empty", "@latin1", "@missing"])
def test_a_limit_that_ansible_would_take_for_all_hosts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    inventory = write_inventory(tmp_path, {"h1": {}, "h2": {}})
    monkeypatch.chdir(tmp_path)
    Path("empty").write_text("\n")
    Path("latin1").write_bytes(b"h\xfc\n")
    with pytest.raises(InventoryError, match="limit"):
        load_fleet([inventory], limit)


@pytest.mark.parametrize("limit", ["h1", "all[0]", "~h[1]", "all:!h2", "@hosts", "h1,"])
def test_usual_limits_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    inventory = write_inventory(tmp_path, {"h1": {}, "h2": {}})
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("h1\n")
    assert list(load_fleet([inventory], limit).hosts) == ["h1"]


def test_no_source_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inventory = write_inventory(tmp_path, {"h1": {}})
    script = tmp_path / "script.sh"
    script.write_text("#!/bin/sh\nprintf '\\033[31mred' >&2; exit 3\n")
    script.chmod(0o755)
    with pytest.raises(InventoryError, match=r"script\.sh"):
        load_fleet([inventory, script])
    said = capsys.readouterr().err
    assert "red" in said
    assert "\x1b" not in said


def test_one_host_changes_one_key(tmp_path: Path) -> None:
    inventory = write_inventory(
        tmp_path,
        {"h1": {"llm_server_instance_overrides": {"chat": {"settings": {"context_length": 512}}}}},
        llm_server_instances={"chat": {"model": MODEL, "settings": {"context_length": 4096, "parallel": 2}}},
    )
    settings = load_fleet([inventory]).hosts["h1"].config.llm_server_instances["chat"].settings
    assert (settings.context_length, settings.parallel) == (512, 2)


@pytest.mark.parametrize(
    ("variables", "message", "hint"),
    [
        ({"llm_server_instances": {"chat": {"model": MODEL, "prot": 1}}}, r"prot`: no such key", "`port`"),
        (
            {"llm_server_instances": {"chat": {"model": MODEL, "settings": {"contextlength": 1}}}},
            "no such key",
            "`context_length`",
        ),
        ({"llm_server_instance": {}}, "`llm_server_instance` is not known", "`llm_server_instances`"),
        ({"llm_server_instances": {"chat": {}}}, r"model`: is missing", None),
        ({"llm_server_instances": {"chat": {"model": {"sha256": "a" * 64}}}}, "exactly one of", None),
        ({"llm_server_instances": {"chat": {"model": {**MODEL, "path": "/x"}}}}, "exactly one of", None),
        ({"llm_server_instances": {"chat": {"model": {"path": "x.gguf", "sha256": "a" * 64}}}}, "absolute path", None),
        ({"llm_server_instances": {"chat": {"model": {"path": "/x/../y", "sha256": "a" * 64}}}}, r"\.\.", None),
        ({"llm_server_instances": {"chat": {"model": {"path": "/x", "sha256": "abc"}}}}, "64 hexadecimal", None),
        ({"llm_server_instances": {"Chat_1": {"model": MODEL}}}, "lower-case", None),
        ({"llm_server_instances": {"chat": {"model": MODEL, "port": 70000}}}, "port", None),
        ({"llm_server_instances": {"chat": {"model": MODEL, "listen": "example.org"}}}, "IP address", None),
        (
            {"llm_server_instances": {"chat": {"model": {"from_controller": "x.gguf", "sha256": "a" * 64}}}},
            "absolute path on this machine",
            None,
        ),
        ({"llm_server_instances": []}, "must be a mapping", None),
        ({"llm_server_instance_overrides": {"other": {}}}, "names other", "known here: none"),
        ({"llama_cpp_backend": "rocm"}, "llama_cpp_backend", None),
        ({"llm_server_instances": {"chat": {"model": MODEL, "settings": {"threads": 2**31}}}}, "2147483647", None),
        (
            {"llm_server_instances": {"chat": {"model": MODEL, "settings": {"context_length": 2**24, "parallel": 128}}}},
            "times `parallel`",
            None,
        ),
        (
            {"llm_server_instances": {"chat": {"model": MODEL, "settings": {"sampling": {"temperature": float("inf")}}}}},
            "finite",
            None,
        ),
        ({"llm_server_instances": {"chat": {"model": MODEL, "extra_args": ["\udcff"]}}}, "not UTF-8", "UTF-8"),
        ({"llm_server_instances": {"chat": {"model": {"path": "/", "sha256": "a" * 64}}}}, "name a file", None),
        ({"llm_server_instances": {"chat": {"model": {"url": "https://", "sha256": "a" * 64}}}}, "name a host", None),
        ({"llm_server_instances": {"chat": {"model": {"url": "https://a/b c", "sha256": "a" * 64}}}}, "no blanks", None),
    ],
)
def test_a_wrong_value_is_named_with_its_host(variables: dict[str, Any], message: str, hint: str | None) -> None:
    with pytest.raises(InventoryError, match=message) as caught:
        parse_config("gpu7", variables)
    assert caught.value.message.startswith("host gpu7: ")
    if hint is not None:
        assert hint in (caught.value.hint or "")


def test_the_greatest_values_are_taken() -> None:
    settings = {"context_length": 2**24, "parallel": 127, "threads": 2**31 - 1, "sampling": {"temperature": 0}}
    model = {"url": "https://example.org/a%20b.gguf?x=1", "sha256": "a" * 64}
    instances = {"chat": {"model": model, "settings": settings, "extra_args": ["\u00e9"]}}
    config = parse_config("h1", {"llm_server_instances": instances})
    assert config.llm_server_instances["chat"].settings.context_length == 2**24


def test_yaml_booleans_are_flash_attention_values() -> None:
    on = make_config({"settings": {"flash_attention": True}}).llm_server_instances["chat"].settings
    off = make_config({"settings": {"flash_attention": False}}).llm_server_instances["chat"].settings
    assert (on.flash_attention, off.flash_attention) == ("on", "off")


def test_an_address_has_one_spelling() -> None:
    """So that the loopback address is known for what it is."""
    assert make_config({"listen": "0:0:0:0:0:0:0:1"}).llm_server_instances["chat"].listen == "::1"


@pytest.mark.parametrize(
    ("changed", "message", "hint"),
    [
        (
            {"model": None, "profile": "llama-16gb-latency"},
            "is missing",
            r"recommends .*IQ4_XS: `model: \{url: https://.*, sha256: \"",
        ),
        ({"model": None, "profile": "vllm-16gb-latency"}, "is missing", "the 3 files of Qwen/Qwen2.5-14B-Instruct-GPTQ-Int4"),
        (
            {"settings": {"temperature": 1}},
            "no such key",
            "known in `llm_server_instances.chat.settings`: context_length, parallel",
        ),
        ({"settings": {"sampling": {"heat": 1}}}, "no such key", "sampling`: temperature, top_p"),
        ({"settings": {"sampling": {"topk": 1}}}, "no such key", r"did you mean `top_k`\?; known in"),
    ],
)
def test_a_hint_names_what_there_is(changed: dict[str, Any], message: str, hint: str) -> None:
    instance = {key: value for key, value in {"model": MODEL, **changed}.items() if value is not None}
    with pytest.raises(InventoryError, match=message) as caught:
        parse_config("h1", {"llm_server_instances": {"chat": instance}})
    assert re.search(hint, caught.value.hint or "")


@pytest.mark.parametrize("profile", ["nothing-like-it", 5])
def test_a_profile_that_does_not_exist_recommends_nothing(profile: Any) -> None:
    with pytest.raises(InventoryError, match="model`: is missing") as caught:
        parse_config("h1", {"llm_server_instances": {"chat": {"profile": profile}}})
    assert "recommends" not in (caught.value.hint or "")


PLACED_GROUP = """\
llama_cpp_backend: cpu
base_port: 70000
model: {path: /x.gguf, sha256: "0123"}
llm_server_instances:
  chat:
    model: {path: /x.gguf, sha256: "%(sha256)s"}
    port: 8000
%(chat)s
"""


@pytest.mark.parametrize(
    ("chat", "host", "place"),
    [
        # A wrong value, one in a list, one that another variable holds.
        ("    state: gone", "", "group_vars/all.yml:8:12"),
        ("    gpus: [0, {a: 1}]", "", "group_vars/all.yml:8:15"),
        ("  more: {model: {path: /x.gguf, sha256: '{{ model.sha256 }}'}}", "", "group_vars/all.yml:3:32"),
        # A key that does not exist, one that is missing, a value that YAML has made a truth value.
        ("    settings:\n      thread: 3", "", "group_vars/all.yml:9:7"),
        ("  more:\n    port: 3", "", "group_vars/all.yml:8:3"),
        ("    settings: {load_mode: yes}", "", "group_vars/all.yml:8:16"),
        # What one host says about the group's instance, and about a variable.
        ("", "llm_server_instance_overrides: {chat: {port: nine}}", "hosts.yml:4:52"),
        ("", "llm_server_instance_overrides: {chat: {prot: 9}}", "hosts.yml:4:46"),
        ("", "llm_server_instance_overrides: {other: {}}", "hosts.yml:4:39"),
        ("", "llm_server_instance_overrides: [1]", "hosts.yml:4:38"),
        ("", "llama_cpp_backend: rocm", "hosts.yml:4:26"),
        ("", "llama_cpp_bild: 5", "hosts.yml:4:7"),
        # The key is known, but not which file's value counts.
        ("", "llama_cpp_backend: true", None),
        # A text that cannot be templated.
        ("    served: '{{ nowhere }}'", "", "group_vars/all.yml:8:13"),
    ],
)
def test_an_inventory_error_names_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chat: str, host: str, place: str | None
) -> None:
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/all.yml").write_text(PLACED_GROUP % {"sha256": "a" * 64, "chat": chat})
    (tmp_path / "hosts.yml").write_text(f"all:\n  hosts:\n    h1:\n      {host}\n")
    with pytest.raises(InventoryError) as caught:
        load_fleet([tmp_path / "hosts.yml"])
    found = re.findall(rf"\({re.escape(str(tmp_path))}/([^ )]+)\)", caught.value.message)
    assert set(found) == ({place} if place else set())
    # As short as it can be for somebody who stands in the folder; the group's variables are found from there too.
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InventoryError) as caught:
        load_fleet(["hosts.yml"])
    assert not place or f"({place})" in caught.value.message


@pytest.mark.parametrize(
    ("text", "place"),
    [("a: 1\nb: {c\n", "group_vars/all.yml:3:1"), ("a: 1\nb: c: d\n", "group_vars/all.yml:2:5")],
)
def test_a_file_that_is_not_yaml_is_named_with_its_line(tmp_path: Path, text: str, place: str) -> None:
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/all.yml").write_text(text)
    inventory = write_inventory(tmp_path, {"h1": None})
    with pytest.raises(InventoryError, match=rf"\({re.escape(str(tmp_path))}/{place}\)"):
        load_fleet([inventory])


def test_an_ini_inventory_knows_its_lines(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("[gpus]\nh1 llama_cpp_backend=rocm\n")
    with pytest.raises(InventoryError, match=r"\(.*/hosts:2\)"):
        load_fleet([tmp_path / "hosts"])


def test_an_ansible_without_marks_costs_only_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inventory = write_inventory(tmp_path, {"h1": {"llama_cpp_backend": "rocm"}})
    monkeypatch.setitem(sys.modules, "ansible._internal._datatag._tags", None)
    with pytest.raises(InventoryError, match="llama_cpp_backend") as caught:
        load_fleet([inventory])
    assert str(tmp_path) not in caught.value.message


def test_other_variables_are_left_alone() -> None:
    parse_config("h1", {"my_own": 1, "llm_server_proof_max_tokens": 4, "ansible_user": "x"})


@pytest.fixture
def vault_inventory(tmp_path: Path) -> Path:
    """An inventory with one encrypted value, and an encrypted file of group variables; the password is in ``password``."""
    from ansible.parsing.vault import VaultLib, VaultSecret

    (tmp_path / "password").write_text("of the vault\n")
    vault = VaultLib([("default", VaultSecret(b"of the vault"))])
    indented = "".join(f"        {line}\n" for line in vault.encrypt(b"s3cret").decode().splitlines())
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(f"all:\n  hosts:\n    h1:\n      ansible_become_password: !vault |\n{indented}")
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/all.yml").write_bytes(vault.encrypt(b"ansible_user: admin\n"))
    return inventory


def test_vault_values_are_read(vault_inventory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ansible import constants

    password = vault_inventory.parent / "password"
    for _ in range(2):
        fleet = load_fleet([vault_inventory], vault_password_files=[password])
        assert fleet.hosts["h1"].variables["ansible_become_password"] == "s3cret"
        assert fleet.hosts["h1"].variables["ansible_user"] == "admin"
    fleet = load_fleet([vault_inventory], vault_password="of the vault")
    assert fleet.hosts["h1"].variables["ansible_become_password"] == "s3cret"
    assert fleet.vault_arguments == ("--ask-vault-password",)
    # Without a word the file counts that Ansible is configured for.
    monkeypatch.setattr(constants, "DEFAULT_VAULT_PASSWORD_FILE", str(password))
    fleet = load_fleet([vault_inventory])
    assert fleet.hosts["h1"].variables["ansible_become_password"] == "s3cret"
    assert fleet.vault_arguments == ("--vault-password-file", str(password))


@pytest.mark.parametrize("password", [None, "another"])
def test_a_vault_that_cannot_be_opened_is_one_error(vault_inventory: Path, password: str | None) -> None:
    with pytest.raises(InventoryError, match="vault"):
        load_fleet([vault_inventory], vault_password=password)
    (vault_inventory.parent / "group_vars/all.yml").write_text("{}\n")
    with pytest.raises(InventoryError, match="host h1"):
        load_fleet([vault_inventory], vault_password=password)


@pytest.mark.parametrize("content", ["", "[1, 2", "all: {hosts: 5}", "\x00"])
def test_an_unreadable_inventory_is_one_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text(content)
    with pytest.raises(InventoryError):
        load_fleet([path])


def test_without_an_inventory_the_error_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("V100CTL_INVENTORY", raising=False)
    with pytest.raises(InventoryError, match="V100CTL_INVENTORY") as caught:
        default_inventory()
    assert "v100ctl init" in (caught.value.hint or "")
    monkeypatch.setenv("V100CTL_INVENTORY", "somewhere")
    assert default_inventory() == Path("somewhere")
    with pytest.raises(InventoryError, match="does not exist"):
        load_fleet()


@pytest.mark.parametrize(
    ("target", "name", "connection"),
    [
        ("gpu1", "gpu1", {"ansible_host": "gpu1"}),
        ("admin@gpu1.example", "gpu1.example", {"ansible_host": "gpu1.example", "ansible_user": "admin"}),
        ("admin@10.0.0.5:2222", "10.0.0.5", {"ansible_host": "10.0.0.5", "ansible_user": "admin", "ansible_port": 2222}),
        ("[fe80::1]:22", "fe80::1", {"ansible_host": "fe80::1", "ansible_port": 22}),
        ("localhost", "localhost", {"ansible_connection": "local", "ansible_python_interpreter": "/usr/bin/python3"}),
    ],
)
def test_targets(target: str, name: str, connection: dict[str, Any]) -> None:
    assert parse_target(target) == (name, connection)


@pytest.mark.parametrize("target", ["", "a b", "-oProxyCommand=x", "user@-x", "a@b@c", "h:99999", "h:0", "x;y", "$(x)", "h\n"])
def test_what_is_no_host_is_refused(target: str) -> None:
    with pytest.raises(InventoryError, match="is not a host"):
        parse_target(target)


@given(st.text(max_size=40))
def test_no_target_can_smuggle_an_option(target: str) -> None:
    try:
        name, connection = parse_target(target)
    except InventoryError:
        return
    for value in (name, connection.get("ansible_host", name), connection.get("ansible_user", "x")):
        assert not str(value).startswith("-")
        assert not set(str(value)) & set(" \t\r\n;|&$`'\"\\")


def test_hosts_of_the_command_line_make_a_fleet() -> None:
    fleet = adhoc_fleet(["admin@gpu1", "localhost"], {"llm_server_instances": {"chat": {"model": MODEL}}})
    assert list(fleet.hosts) == ["gpu1", "localhost"]
    assert fleet.document is not None
    assert fleet.document["all"]["hosts"]["gpu1"]["ansible_user"] == "admin"
    with pytest.raises(InventoryError, match="named twice"):
        adhoc_fleet(["a@gpu1", "b@gpu1"], {})


def test_no_cause_of_an_error_quotes_a_key() -> None:
    """Ansible prints the causes of an error too."""
    with pytest.raises(InventoryError) as caught:
        make_config({"api_keys": ["s3cret"], "listen": "nowhere", "port": 0})
    error: BaseException | None = caught.value
    while error is not None:
        assert "s3cret" not in str(error)
        error = error.__cause__
    with pytest.raises(InventoryError) as caught:
        make_config({"api_keys": "s3cret", "model": {"path": "/x"}})
    assert "s3cret" not in f"{caught.value} {caught.value.__cause__}"


def test_secrets_do_not_show_in_a_repr() -> None:
    fleet = adhoc_fleet(["gpu1"], {"ansible_become_password": "s3cret"})
    assert "s3cret" not in repr(fleet.hosts["gpu1"])
    assert "s3cret" not in repr(make_config({"api_keys": ["s3cret"]}))
