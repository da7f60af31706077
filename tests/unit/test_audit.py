"""Reports: what they hold, in which forms they come, and that no host can break them."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from v100ctl import audit as audit_module
from v100ctl.access import Access
from v100ctl.apply import make_reporter
from v100ctl.apply.runner import ApplyResult, Failure, TaskChange
from v100ctl.audit import MAX_FINDINGS, MAX_TEXT_CHARACTERS, AuditReport, HostAudit, audit
from v100ctl.audit.alike import CardTraits, Traits, odd_ones_out
from v100ctl.audit.deep import unexplained
from v100ctl.audit.fix import fix
from v100ctl.audit.formats import LAYERS, to_json, to_junit, to_prometheus
from v100ctl.audit.page import to_html
from v100ctl.audit.since import compare_with, read_report
from v100ctl.cli.audit import Rendered, parse_output
from v100ctl.errors import ProbeError, UnreachableError, UsageError, V100ctlError
from v100ctl.examine import Examined, decide
from v100ctl.findings import DEEP_FIX, PROVISION, Finding
from v100ctl.fleet import Fleet, FleetHost
from v100ctl.provision import HostResult, ProvisionResult, fixable, roles_that_mend

from .factory import AS_OF, applied_facts, make_config, make_facts, make_plan

ROOT = Path(__file__).parents[2]
PLAN = make_plan()
UNIT = "v100-chat.service"
#: What somebody may write where a text is expected.
HOSTILE = "<script>alert(1)</script>\"'&]]>\x1b[2J\x1b]0;title\x07\u202e\x00\ud800 end\nsecond\tline"


def examined(host: str = "h1", **changes: Any) -> Examined:
    return decide(FleetHost(host, {}, make_config()), None, applied_facts(PLAN, **changes), as_of=AS_OF)


def finding(**changes: Any) -> Finding:
    usual = Finding(
        "file.content:/etc/x", "drifted", "file", "llm_server", "wanted", "found", "error", "`v100ctl provision`", "chat"
    )
    return dataclasses.replace(usual, **changes)


DRIFTED = AuditReport.of(
    {
        "clean": examined(),
        "drifted": examined(units={UNIT: {"unit_file_state": "disabled"}}, cron=[{"path": "/etc/cron.d/x", "words": ["reboot"]}]),
        "gone": Examined(FleetHost("gone", {}, make_config()), error=UnreachableError("no route", hint="look")),
        "odd": Examined(FleetHost("odd", {}, make_config()), error=ProbeError("no document")),
    }
)


def hostile_report() -> AuditReport:
    """A report in which every text is a trap."""
    bad = finding(id=f"file.content:{HOSTILE}", expected=HOSTILE, actual=HOSTILE * 3, fix=HOSTILE, instance=None)
    return AuditReport(
        {
            "h1": HostAudit("drift", audit_module.bounded([bad, bad]), 12.5),
            "h2": HostAudit.of(Examined(FleetHost("h2", {}, make_config()), error=ProbeError(HOSTILE))),
        }
    )


def read_xml(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)  # noqa: S314 - it was written here


def valid(document: dict[str, Any]) -> None:
    schema = json.loads((ROOT / "docs/reference/audit.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(json.loads(json.dumps(document)), schema)


# --- forms --------------------------------------------------------------------------------------------------------------------


def test_junit() -> None:
    root = read_xml(to_junit(DRIFTED))
    suites = {suite.get("name"): suite for suite in root}
    assert {name: (suite.get("tests"), suite.get("failures"), suite.get("errors")) for name, suite in suites.items()} == {
        "clean": ("7", "0", "0"),
        "drifted": ("7", "1", "0"),
        "gone": ("1", "0", "1"),
        "odd": ("1", "0", "1"),
    }
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("16", "1", "2")
    (failure,) = suites["drifted"].iter("failure")
    assert failure.get("message") == "drifted: disabled"
    # A warning fails nothing.
    (output,) = suites["drifted"].iter("system-out")
    assert "file.cron:/etc/cron.d/x" in str(output.text)
    assert [case.get("name") for case in suites["clean"]] == list(LAYERS)


def samples(text: str) -> dict[str, str]:
    """The lines of Prometheus's format, checked by its grammar."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# (HELP|TYPE) v100ctl_audit_[a-z_]+ .+", line)
            continue
        matched = re.fullmatch(r'([a-z_0-9]+(?:\{(?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)*\})?) ([0-9.]+)', line)
        assert matched, line
        assert matched[1] not in found, "a series comes once"
        found[matched[1]] = matched[2]
    return found


def test_prometheus() -> None:
    found = samples(to_prometheus(DRIFTED, now_s=1000.5))
    assert found['v100ctl_audit_host_status{host="clean",status="clean"}'] == "1"
    assert found['v100ctl_audit_host_status{host="gone",status="clean"}'] == "0"
    assert found['v100ctl_audit_findings{host="drifted",kind="drifted",layer="unit",severity="error"}'] == "1"
    assert (
        found[f'v100ctl_audit_finding{{host="drifted",id="unit.disabled:{UNIT}",kind="drifted",layer="unit",severity="error"}}']
        == "1"
    )
    assert (found["v100ctl_audit_exit_code"], found["v100ctl_audit_timestamp_seconds"]) == ("1", "1000.5")


class _Page(HTMLParser):
    """What a page is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href", "action", "srcset")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.text.append(data)


def page(report: AuditReport) -> _Page:
    parsed = _Page()
    parsed.feed(to_html(report, now_s=1_795_910_400.0))
    parsed.close()
    assert parsed.open == []
    return parsed


def test_html_is_one_page_that_needs_nothing_else() -> None:
    parsed = page(DRIFTED)
    assert parsed.links == []
    text = " ".join("".join(parsed.text).split())
    for words in ("2026-11-29", f"unit.disabled:{UNIT}", "no route", "hint: look", "disabled", "drifted"):
        assert words in text
    assert page(DRIFTED).tags.count("script") == 1


def test_no_host_can_write_into_a_report() -> None:
    report = hostile_report()
    assert page(report).tags.count("script") == 1
    json.loads(to_json(report.to_json()))
    valid(report.to_json())
    read_xml(to_junit(report))
    samples(to_prometheus(report, now_s=1.0))
    for text in (to_html(report, now_s=1.0), to_junit(report), to_prometheus(report, now_s=1.0), json.dumps(report.to_json())):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800]", text)
        assert "\\u001b" not in text


@given(st.text(max_size=200), st.text(max_size=200))
def test_any_text_gives_readable_reports(first: str, second: str) -> None:
    findings = audit_module.bounded([finding(id=first, expected=second, actual=first, fix=second)])
    report = AuditReport({"h": HostAudit("drift", findings, 1.0)})
    read_xml(to_junit(report))
    samples(to_prometheus(report, now_s=1.0))
    page(report)


def test_tables_show_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    Rendered(hostile_report(), 1.0).write("table", None)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("report.json", ("json", "report.json")),
        ("a/report.HTML", ("html", "a/report.HTML")),
        ("x.xml", ("junit", "x.xml")),
        ("x.prom", ("prometheus", "x.prom")),
        ("html:x", ("html", "x")),
        ("junit:-", ("junit", "-")),
        ("x", ("table", "x")),
        ("odd:name", ("table", "odd:name")),
    ],
)
def test_where_a_report_goes(text: str, expected: tuple[str, str]) -> None:
    name, path = parse_output(text, "table")
    assert (name, str(path)) == expected


def test_a_format_without_a_path_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="a path has to follow"):
        parse_output("html:", "table")


# --- bounds -------------------------------------------------------------------------------------------------------------------


def test_a_host_says_no_more_than_anybody_reads() -> None:
    many = audit_module.bounded(finding(id=f"x:{number}", actual="a" * 10 * MAX_TEXT_CHARACTERS) for number in range(10**6))
    assert len(many) == MAX_FINDINGS + 1
    assert (many[-1].id, many[-1].severity) == ("findings.more", "error")
    assert max(len(item.actual) for item in many) < MAX_TEXT_CHARACTERS + 100


def test_an_interrupted_audit_has_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def each(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Examined]]:
        yield "a", examined("a")
        raise KeyboardInterrupt

    monkeypatch.setattr(audit_module, "examine_each", each)
    hosts = {name: FleetHost(name, {}, make_config()) for name in ("a", "b")}
    report = audit(Fleet(hosts=hosts, sources=()), access=Access(), as_of=AS_OF)
    assert (report.status("a"), report.status("b"), report.exit_code) == ("clean", "error", 130)
    assert "interrupted" in report.hosts["b"].error
    valid(report.to_json())


# --- since --------------------------------------------------------------------------------------------------------------------


def test_since(tmp_path: Path) -> None:
    before = AuditReport(
        {"h": HostAudit("drift", (finding(), finding(id="gone")), 1.0), "away": HostAudit("drift", (finding(),), 1.0)}
    )
    path = tmp_path / "report.json"
    path.write_text(to_json(before.to_json()), encoding="utf-8")
    now = AuditReport(
        {"h": HostAudit("drift", (finding(actual="other"), finding(kind="pending")), 1.0), "away": HostAudit("unreachable")}
    )
    since = compare_with(now, read_report(path))
    assert since.new == {"h": ("file.content:/etc/x",)}
    assert since.gone == {"h": ("gone",)}, "of a host that did not answer nothing has gone"
    valid(Rendered(now, 1.0, since).document())


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"schema": "v100ctl/plan/1", "hosts": {}}',
        '{"schema": "v100ctl/audit/1", "hosts": {"h": 1}}',
        "[" * 10**5,
    ],
)
def test_what_is_no_report_is_said_to_be_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(V100ctlError, match="no report"):
        read_report(path)


# --- mending ------------------------------------------------------------------------------------------------------------------


def test_only_named_roles_run() -> None:
    assert roles_that_mend([finding(role="gpu_tuning")]) == ("gpu_tuning",)
    assert roles_that_mend([finding(role="llama_cpp", restarts=("chat",))]) == ("llama_cpp", "llm_server")
    assert roles_that_mend([finding(kind="external"), finding(layer="service")]) == ()
    assert [fixable(finding(kind=kind)) for kind in ("drifted", "pending", "external")] == [True, True, False]


def test_what_only_hashes_tell_is_mended_with_hashes() -> None:
    (release,) = PLAN.releases
    broken: dict[str, Any] = {
        "releases": [{"path": release.path, "engine": "llama_cpp", "build_id": release.build_id, "problem": "x"}]
    }
    state = examined(units={UNIT: {"unit_file_state": "disabled"}}, **broken)
    for deep, mends in ((False, PROVISION), (True, DEEP_FIX)):
        fixes = {item.id.partition(":")[0]: item.fix for item in HostAudit.of(state, deep=deep).findings}
        assert fixes == {"release.damaged": mends, "unit.disabled": PROVISION}


def test_a_deep_report_is_mended_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ansible's own findings are none that another look would bring."""
    report = AuditReport(
        {
            "a": HostAudit("drift", (finding(id="ansible.changed:x", role="gpu_tuning"), finding(kind="external")), 1.0),
            "b": HostAudit("drift", (finding(kind="external"),), 1.0),
            "c": HostAudit("clean", (), 1.0),
        }
    )
    asked: list[dict[str, Any]] = []

    def provision(fleet: Fleet, **options: Any) -> ProvisionResult:
        asked.append({"hosts": list(fleet.hosts), "more_roles": options["more_roles"], "deep": options["deep"]})
        return ProvisionResult({name: HostResult("changed", examined(name), roles=("x",)) for name in fleet.hosts})

    monkeypatch.setattr("v100ctl.audit.fix.provision", provision)
    fleet = Fleet(hosts={name: FleetHost(name, {}, make_config()) for name in report.hosts}, sources=())
    reporter = make_reporter()
    for deep in (True, False):
        done = fix(fleet, report, access=Access(), reporter=reporter, as_of=AS_OF, deep=deep)
        assert {name: host.status for name, host in done.items()} == {"a": "changed"}
    reporter.close()
    assert asked == [
        {"hosts": ["a"], "more_roles": {"a": ("gpu_tuning",)}, "deep": True},
        {"hosts": ["a"], "more_roles": {}, "deep": False},
    ]


def test_the_playbook_knows_every_role_that_a_finding_may_name() -> None:
    playbook = (ROOT / "playbooks/provision.yml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"_v100ctl_all_roles: \[(.+)\]", playbook)
    named = set(listed.split(", "))
    assert named == {path.name for path in (ROOT / "roles").iterdir()} & set(re.findall(r"name: (\w+)\n", playbook)) - {
        "preflight"
    } | {"cuda_toolkit"}
    for role in named:
        assert f"'{role}'" in playbook, f"{role} is run only where it is asked for"


def test_what_ansible_would_change_is_explained_or_told() -> None:
    report = AuditReport({"h": HostAudit("drift", (finding(role="llm_server"),), 1.0), "clean": HostAudit("clean", (), 1.0)})
    changes = (
        TaskChange("h", "llm_server", "Write the files"),
        TaskChange("clean", "gpu_tuning", "Write the settings", "-a\n+b"),
        TaskChange("elsewhere", "gpu_tuning", "x"),
    )
    failures = (Failure("clean", "gateway", "Check", "no room", None),)
    found = unexplained(report, ApplyResult({}, failures, {}, Path("log"), changes))
    assert {host: [(item.id, item.layer, item.actual) for item in items] for host, items in found.items()} == {
        "clean": [
            ("ansible.changed:gpu_tuning:Write the settings", "hardware", "-a\n+b"),
            ("ansible.failed:gateway:Check", "unit", "no room"),
        ]
    }
    assert report.with_findings(found).status("clean") == "drift"


# --- like hosts and like cards ------------------------------------------------------------------------------------------------


def like(count: int, **odd: str) -> dict[str, Traits]:
    """Hosts of one kind, the last of which differs."""
    hosts = {f"h{number}": Traits(("x86_64",), {"kernel": "6.1", "memory": "64 GiB"}) for number in range(count)}
    last = f"h{count - 1}"
    return {**hosts, last: dataclasses.replace(hosts[last], values={**hosts[last].values, **odd})}


def test_the_odd_host_is_named() -> None:
    found = odd_ones_out(like(5, kernel="5.10"))
    ((item,),) = found.values()
    assert (list(found), item.id, item.kind, item.layer, item.severity) == (
        ["h4"],
        "host.odd:kernel",
        "external",
        "driver",
        "warn",
    )
    assert (item.expected, item.actual) == ("6.1, as on h0, h1, h2 and 1 more", "5.10")


@pytest.mark.parametrize(
    "hosts",
    [
        like(5),
        like(2, kernel="5.10"),
        # Two halves: nobody is odd.
        {**like(3), **{f"o{number}": Traits(("x86_64",), {"kernel": "5.10"}) for number in range(3)}},
        # Of another kind.
        {**like(3), "o": Traits(("aarch64",), {"kernel": "5.10"})},
        # Unknown is no difference.
        {**like(3), "o": Traits(("x86_64",), {})},
    ],
)
def test_where_there_is_no_odd_one_nobody_is_named(hosts: dict[str, Traits]) -> None:
    assert odd_ones_out(hosts) == {}


def test_the_odd_card_is_named_once() -> None:
    cards = [CardTraits(f"GPU-{number}", "V100", {"lanes": "16 lanes", "ecc": "enabled"}) for number in range(4)]
    odd = CardTraits("GPU-9", "V100", {"lanes": "8 lanes", "ecc": "disabled"})
    hosts = {"a": Traits((), {}, tuple(cards)), "b": Traits((), {}, (odd,), told=frozenset({"gpu.link-degraded:GPU-9"}))}
    ((item,),) = odd_ones_out(hosts).values()
    assert (item.id, item.actual) == ("gpu.odd:ecc:GPU-9", "disabled")
    assert "4 cards of its kind on a" in item.expected


def test_the_slow_one_of_its_kind_is_named() -> None:
    speeds = {"a": 50.0, "b": 52.0, "c": 48.0, "d": 30.0}
    hosts = {name: Traits((name,), {}, speeds={("engine", "model"): ("chat", speed)}) for name, speed in speeds.items()}
    ((name, (item,)),) = odd_ones_out(hosts).items()
    assert (name, item.id, item.layer) == ("d", "service.slower:chat", "service")


def test_a_clean_host_has_nothing_odd() -> None:
    states = {name: HostAudit.of(examined(name, baselines={"chat": {"digest": "x"}})) for name in "abc"}
    assert odd_ones_out({name: host.traits for name, host in states.items() if host.traits}) == {}
    assert AuditReport(states).exit_code == 0


def test_a_bare_host_is_all_pending() -> None:
    state = decide(FleetHost("h", {}, make_config()), None, make_facts(), as_of=AS_OF)
    assert {item.kind for item in HostAudit.of(state).findings} == {"pending"}
