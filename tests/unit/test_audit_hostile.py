"""Hosts that lie: whatever one answers, it neither ends the audit, nor fills its memory, nor speaks for others."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from v100ctl import audit as audit_module
from v100ctl import examine
from v100ctl.access import Access
from v100ctl.audit import MAX_HOST_CHARACTERS, MAX_TEXT_CHARACTERS, AuditReport, HostAudit
from v100ctl.audit.alike import CardTraits, Traits, odd_ones_out, traits_of
from v100ctl.audit.formats import to_json, to_junit, to_prometheus
from v100ctl.audit.page import to_html
from v100ctl.compare import compare
from v100ctl.errors import ProbeError, UnreachableError
from v100ctl.examine import Examined, decide
from v100ctl.facts import Facts
from v100ctl.findings import SEAL, seal
from v100ctl.fleet import Fleet, FleetHost, HostConfig, parse_config
from v100ctl.probe import Connection
from v100ctl.probe.run import parse_facts

from .factory import AS_OF, MODEL, applied_facts, make_config, merge
from .test_audit import HOSTILE, finding, page, read_xml, samples
from .test_compare import PLAN

#: The probe sends no halves of surrogate pairs.
ODD = HOSTILE.replace("\ud800", "")
HOSTS = Path(__file__).parent / "plan/hosts"
CUDA = parse_config("h1", {"llm_server_instances": {"chat": {"model": MODEL}}})
CONNECTION = Connection.from_vars("h1", {"ansible_connection": "local"})
PASSWORD, SUDO, KEY, TOKEN = "connect-me-1", "become-root-2", "an-api-key-of-many-characters", "hf_AbCdEfGh12345678"


def reports(report: AuditReport) -> list[str]:
    """The report in every form that has a grammar, each read by that grammar."""
    texts = [to_json(report.to_json()), to_junit(report), to_prometheus(report, now_s=1.0), to_html(report, now_s=1.0)]

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(texts[0], parse_constant=refuse)
    read_xml(texts[1])
    samples(texts[2])
    page(report)
    return texts


# --- any answer ---------------------------------------------------------------------------------------------------------------


def leaves(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each value of a document that holds no others, with its place."""
    inner: Any = document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    for key, value in inner:
        if isinstance(value, dict | list) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def lie(value: Any, chance: random.Random) -> Any:
    """Something else of the same type, which a reader that looks at types alone lets pass."""
    if isinstance(value, bool) or value is None:
        return chance.choice([True, False, None, 1])
    if isinstance(value, int):
        return chance.choice([0, -1, 2**64 - 1, -(2**63), 2**53, 65536])
    if isinstance(value, float):
        return chance.choice([0.0, -1.0, 1e18, -1e18, 1e-300])
    if isinstance(value, str):
        words = [
            "",
            HOSTILE.replace("\ud800", ""),
            "x" * 100_000,
            "../../etc/shadow",
            "/",
            "0-4294967295",
            "-1",
            "1.2.3.4",
            "{{ 7*7 }}",
        ]
        return chance.choice([*words, "[bold]x[/]", "9" * 4000, "\n" * 1000, "v100-../../x.service", "%n%s", "\0"])
    return chance.choice([[], {}])


def documents() -> list[dict[str, Any]]:
    """What hosts have answered: one that is as planned, and those with cards."""
    found = [json.loads(applied_facts(PLAN).model_dump_json(by_alias=True))]
    found += [json.loads(path.read_bytes()) for path in sorted(HOSTS.glob("*.json"))]
    return found


def test_no_answer_ends_the_audit() -> None:
    chance = random.Random(7)
    answers, judged, told = documents(), 0, 0
    for _ in range(120):
        answer = copy.deepcopy(chance.choice(answers))
        places = list(leaves(answer))
        for place, value in chance.sample(places, min(len(places), 6)):
            inner = answer
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = lie(value, chance)
        try:
            facts = parse_facts("h1", json.dumps(answer).encode())
        except ProbeError as error:
            assert error.message.isprintable()
            continue
        judged += 1
        for config in (make_config(), CUDA):
            host = HostAudit.of(examine._judge(FleetHost("h1", {}, config), CONNECTION, facts, headers={}, as_of=AS_OF))
            told += "cannot be judged" not in host.error
            report = AuditReport({"h1": host, "h2": host, "h3": host})
            odd_ones_out({name: each.traits for name, each in report.hosts.items() if each.traits is not None})
        if judged % 10 == 0:
            for text in reports(report):
                assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800]", text)
    assert judged > 50
    # Nearly all are judged as any other: the exceptions are what no file or command line can hold.
    assert told > 1.8 * judged


@pytest.mark.parametrize(
    "change",
    [
        {"memory": {"total_bytes": 10**400}},
        {"memory": {"total_bytes": 2**64}},
        {"uptime_s": float("inf")},
        {"probe_ms": float("nan")},
        {"probe_ms": 1e19},
        {"stored_models": {"/var/lib/v100ctl/models/x": -(10**30)}},
    ],
)
def test_numbers_that_nothing_has_are_no_answer(change: dict[str, Any]) -> None:
    answer = merge(json.loads(applied_facts(PLAN).model_dump_json(by_alias=True)), change)
    with pytest.raises(ProbeError, match="did not return a usable document"):
        parse_facts("h1", json.dumps(answer).encode())


def test_an_answer_that_nobody_has_thought_of_costs_its_own_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(host: str, *arguments: Any, **options: Any) -> Any:
        if host == "odd":
            raise ZeroDivisionError("\x1b[2J")
        return PLAN

    local = {"ansible_connection": "local"}
    hosts = {name: FleetHost(name, local, make_config()) for name in ("odd", "h1")}
    monkeypatch.setattr(examine, "plan", plan)
    monkeypatch.setattr(examine, "probe_each", lambda items, **options: ((name, applied_facts(PLAN)) for name in items))
    report = audit_module.audit(Fleet(hosts, ()), access=Access(), as_of=date(2026, 11, 30))
    assert report.hosts["h1"].status == "clean"
    assert report.hosts["odd"].error == "odd: what it answers cannot be judged (ZeroDivisionError: \\x1b[2J)"
    assert report.exit_code == 1


# --- the record -----------------------------------------------------------------------------------------------------------------


def lying_records() -> list[dict[str, Any]]:
    """Records of what was applied, each with a seal that fits: whoever is root there can make one."""
    honest = applied_facts(PLAN).host_json.document
    assert honest is not None
    paths = {"/etc/shadow": {"sha256": "0" * 64}, "../../etc/passwd": {}, "/proc/kcore": 1, "/" + "x" * 5000: {}}
    deep: Any = 1
    for _ in range(30):
        deep = {"instances": deep}
    return [
        {**honest, "host": "another", "hostname": "another", "schema": "v100ctl/host/1"},
        {**honest, "files": {**honest["files"], **paths}},
        {**honest, "cards": ["0000:3b:00.0"] * 100_000, "packages": ["x"] * 100_000},
        {**honest, "cards": [2**64 - 1, -(2**63), 1e300, None, {}, ODD]},
        {**honest, "instances": {ODD: {}, "../../etc": {"port": 2**64 - 1}, "chat": [[]], "x" * 10_000: None}},
        {**honest, "instances": 7, "files": [ODD], "driver": [], "gateway": "x", "firewall": {"ports": [{}], "kind": 7}},
        {**honest, "releases": [{"path": {}}, {"path": ODD}, 3], "models": {"path": []}, "calendars": ODD},
        dict.fromkeys(honest, deep),
        {},
    ]


@pytest.mark.parametrize("number", range(9))
def test_a_record_with_a_seal_that_fits_hides_nothing_and_names_nobody_else(number: int) -> None:
    record = {key: value for key, value in lying_records()[number].items() if key != SEAL}
    record[SEAL] = seal(record)
    unit = "/etc/systemd/system/v100-chat.service"
    honest = applied_facts(PLAN, files={unit: {"sha256": "00", "content": "x"}})
    facts = parse_facts(
        "h1", json.dumps({**json.loads(honest.model_dump_json(by_alias=True)), "host_json": {"document": record}}).encode()
    )
    state = decide(FleetHost("h1", {}, make_config()), None, facts, as_of=AS_OF)
    found = {item.id for item in state.findings}
    assert f"file.content:{unit}" in found
    assert not any("shadow" in item or "kcore" in item for item in found)
    for text in reports(AuditReport({"h1": HostAudit.of(state)})):
        assert "another" not in text


# --- bounds ---------------------------------------------------------------------------------------------------------------------


def test_a_host_has_one_budget_of_text() -> None:
    many = audit_module.bounded(finding(id=f"x:{number}", actual="a" * 150_000, expected="b" * 150_000) for number in range(500))
    kept = sum(len(item.actual) + len(item.expected) for item in many)
    assert len(many) == 500
    assert kept < MAX_HOST_CHARACTERS + 2 * MAX_TEXT_CHARACTERS + 500 * 2200
    assert all(re.search(r"\.\.\. and \d+ more characters$", item.actual) for item in many)


def test_what_is_compared_later_is_short() -> None:
    cards = [
        {"pci_address": f"0000:{number}", "uuid": f"GPU-{number}" + "x" * 10**5, "name": "y" * 10**5} for number in range(99)
    ]
    state = decide(FleetHost("h1", {}, make_config()), None, applied_facts(PLAN, kernel="6" * 10**6, gpus=cards), as_of=AS_OF)
    traits = traits_of(state)
    assert traits is not None
    assert len(repr(dataclasses.replace(traits, told=frozenset()))) < 20_000


def test_one_host_outvotes_no_others() -> None:
    """A host that claims very many cards, all set alike, makes none of the others' cards the odd one."""
    card = {"name": "Tesla V100-SXM2-16GB", "power_limit_w": 300.0}
    liar = applied_facts(PLAN, gpus=[{"pci_address": f"0:{n}", "uuid": f"L{n}", **card} for n in range(5000)])
    state = decide(FleetHost("liar", {}, make_config()), None, liar, as_of=AS_OF)
    traits = traits_of(state)
    assert traits is not None
    honest = {
        f"h{number}": Traits(
            (), {}, tuple(CardTraits(f"{number}-{n}", "Tesla V100-SXM2-16GB", {"power-limit": "250 W"}) for n in range(4))
        )
        for number in range(10)
    }
    assert set(odd_ones_out({"liar": traits, **honest})) == {"liar"}


@pytest.mark.parametrize(
    "change",
    [
        {"packages": {"installed": {f"package-{number}": "1" for number in range(100_000)}}},
        {"listeners": [{"address": "0.0.0.0", "port": 8000, "command": "x"}] * 50_000},
        {"files": {f"/etc/systemd/system/v100-{number}.service": {"content": "x"} for number in range(25_000)}},
        {"units": {f"v100-{number}.service": {"load_state": "loaded", "active_state": "failed"} for number in range(25_000)}},
    ],
    ids=["packages", "listeners", "files", "units"],
)
def test_a_very_long_answer_is_judged(change: dict[str, Any]) -> None:
    answer = merge(json.loads(applied_facts(PLAN).model_dump_json(by_alias=True)), change)
    document = json.dumps(answer).encode()
    facts = parse_facts("h1", document)
    host = HostAudit.of(decide(FleetHost("h1", {}, make_config()), None, facts, as_of=AS_OF))
    assert len(host.findings) <= audit_module.MAX_FINDINGS + 1


# --- secrets --------------------------------------------------------------------------------------------------------------------


def secretive() -> HostConfig:
    """A configuration with an API key and a token for the hub."""
    return parse_config(
        "h1",
        {
            "llama_cpp_backend": "cpu",
            "model_store_hf_token": TOKEN,
            "llm_server_instances": {"chat": {"model": MODEL, "api_keys": [KEY]}},
        },
    )


def test_what_a_host_was_told_stands_in_no_report() -> None:
    """A host that repeats the password that it was given, in whatever it says."""
    secrets = {"ansible_password": PASSWORD, "ansible_become_password": SUDO}
    connection = Connection.from_vars("h1", secrets)
    said = f"sudo: no, {SUDO} is wrong, and so is {PASSWORD}; {KEY} {TOKEN}"
    host = FleetHost("h1", secrets, secretive())
    failed = HostAudit.of(Examined(host, connection, error=UnreachableError(said, hint=said)))
    state = Examined(
        host,
        connection,
        facts=applied_facts(PLAN),
        plan=PLAN,
        findings=(finding(id=said, actual=said * 9000, expected=said, fix=said),),
    )
    report = AuditReport({"h1": HostAudit.of(state), "h2": failed})
    later = report.with_findings({"h1": [finding(id="x", actual=said)], "h2": [finding(id="y", expected=said)]})
    for text in (*reports(later), repr(later.hosts["h1"]), repr(later.hosts["h2"])):
        assert "sudo: no, (hidden) is wrong" in text
        assert not any(secret in text for secret in (PASSWORD, SUDO, KEY, TOKEN))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("llama-server --api-key abcdef123456 --port 1", "llama-server --api-key (hidden) --port 1"),
        ("Environment=HF_TOKEN=abcdef123456\nUser=v100", "Environment=HF_TOKEN=(hidden)\nUser=v100"),
        ("ExecStart=/x --api-key='a b c' -m /y", "ExecStart=/x --api-key=(hidden) -m /y"),
        ("https://user:word@host/x", "https://(hidden)@host/x"),
        ("--max-num-batched-tokens 4096 --api-key-file /etc/x", "--max-num-batched-tokens 4096 --api-key-file /etc/x"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str, shown: str) -> None:
    (kept,) = audit_module.bounded([finding(actual=text)])
    assert kept.actual == shown


def test_a_key_on_a_command_line_that_somebody_typed_is_hidden() -> None:
    unit = "v100-chat.service"
    planned = PLAN.instances[0]
    process = {"pid": 1, "unit": unit, "executable": planned.argv[0], "argv": [*planned.argv, "--api-key", "typed-by-hand"]}
    process |= {"user": "v100", "environ": dict(planned.environment)}
    facts: Facts = applied_facts(PLAN, processes=[process])
    (found,) = [item for item in compare(PLAN, facts) if item.id == "process.argv:chat"]
    assert "typed-by-hand" not in found.actual
    assert found.actual.endswith("--api-key '(hidden)'")
