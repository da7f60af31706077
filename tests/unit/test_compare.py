"""One list of things to check: a clean host has no findings, and each fault has its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.plan.test_cases import decide
from v100ctl.compare import _AILMENTS, compare, keyed_digest, restarts
from v100ctl.facts import Facts
from v100ctl.plan import DIGEST_VARIABLE, plan

from .factory import AS_OF, GIB, applied_facts, make_config, make_facts, make_plan, merge

UNIT = "v100-chat.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
PLAN = make_plan()
RELEASE = PLAN.releases[0]
MODEL_PATH = PLAN.models[0].path
PROCESS = {"pid": 100, "unit": UNIT, "executable": PLAN.instances[0].argv[0], "argv": PLAN.instances[0].argv, "user": "v100"}


HOST_JSON = "/etc/v100ctl/host.json"
#: No record of what was applied.
NO_RECORD: dict[str, Any] = {"document": []}


#: A container that gives less than a unit asks for.
LIMITED = {"limits": {"nofile_hard": 20000, "memlock_hard_bytes": 8388608}}


def changed_process(**changes: Any) -> dict[str, Any]:
    return {"processes": [{**PROCESS, "environ": dict(PLAN.instances[0].environment), **changes}]}


def test_a_host_as_planned_is_clean() -> None:
    facts = applied_facts(PLAN)
    assert compare(PLAN, facts) == ()
    assert restarts(PLAN.to_role_variables(), facts.model_dump(by_alias=True)) == []


CASES = Path(__file__).parent / "plan/cases"


@pytest.mark.parametrize(
    ("case", "identifier", "kind", "layer", "severity", "role", "fix"),
    [
        ("driver-hangs", "driver.wedged", "external", "driver", "critical", "nvidia_driver", "reboot"),
        ("library-and-module-differ", "driver.library-mismatch", "external", "driver", "error", "nvidia_driver", "recover h1"),
        ("driver-installed-and-not-loaded", "driver.not-loaded", "pending", "driver", "error", "nvidia_driver", "provision"),
        ("nouveau-is-loaded", "driver.nouveau", "pending", "driver", "error", "nvidia_driver", "provision"),
        ("unified-memory-is-poisoned", "driver.uvm-poisoned", "external", "driver", "critical", "gpu_tuning", "recover h1"),
        ("card-that-has-left-the-bus", "gpu.gone", "external", "hardware", "error", "gpu_tuning", "power the host off"),
        (
            "card-fallen-off-the-bus",
            "gpu.fallen-off:CARD",
            "external",
            "hardware",
            "critical",
            "gpu_tuning",
            "power the host off",
        ),
        ("bar1-unassigned", "gpu.bar1-unassigned:CARD", "external", "hardware", "error", "gpu_tuning", "Above 4G"),
        ("link-with-eight-lanes", "gpu.link-degraded:CARD", "external", "hardware", "warn", "gpu_tuning", "riser"),
        ("card-too-hot", "gpu.throttled:CARD", "external", "hardware", "warn", "gpu_tuning", "air"),
        (
            "page-to-be-retired-after-a-double-bit-error",
            "gpu.retirement-pending:CARD",
            "external",
            "hardware",
            "error",
            "gpu_tuning",
            "recover h1",
        ),
        (
            "page-that-could-not-be-retired",
            "gpu.memory-failing:CARD",
            "external",
            "hardware",
            "error",
            "gpu_tuning",
            "another card",
        ),
        ("page-that-could-not-be-retired", "gpu.xid:CARD", "external", "hardware", "warn", "gpu_tuning", "riser"),
    ],
)
def test_what_ails_driver_and_cards(
    case: str, identifier: str, kind: str, layer: str, severity: str, role: str, fix: str
) -> None:
    decided = decide(CASES / case)
    facts = Facts.model_validate_json((CASES / case / "facts.json").read_bytes())
    findings = {finding.id: finding for finding in compare(decided, facts)}
    uuid = facts.gpus[0].uuid or facts.gpus[0].pci_address
    found = findings[identifier.replace("CARD", uuid)]
    assert (found.kind, found.layer, found.severity, found.role) == (kind, layer, severity, role)
    assert fix in found.fix
    assert found.actual in [rule.reason for rule in decided.rules]


def test_a_card_in_good_health_ails_nothing() -> None:
    for case in ("card-in-good-health", "errors-of-a-program", "hot-card-that-nothing-uses", "card-at-its-power-limit"):
        facts = Facts.model_validate_json((CASES / case / "facts.json").read_bytes())
        findings = compare(decide(CASES / case), facts)
        assert [finding.id for finding in findings if finding.layer == "hardware" and finding.kind == "external"] == []
        assert [finding.id for finding in findings if finding.layer == "driver" and finding.kind == "external"] == []


def test_a_card_that_nothing_uses_is_a_warning() -> None:
    case = CASES / "bar1-unassigned-on-a-card-that-is-not-used"
    facts = Facts.model_validate_json((case / "facts.json").read_bytes())
    found = [finding for finding in compare(decide(case), facts) if finding.id.startswith("gpu.bar1")]
    assert [finding.severity for finding in found] == ["warn"]


def test_every_ailment_is_a_rule() -> None:
    source = Path(__file__).parents[2] / "src/v100ctl/plan"
    text = "".join(path.read_text(encoding="utf-8") for path in source.rglob("*.py"))
    assert [rule for rule in _AILMENTS if f'"{rule}"' not in text] == []


def test_a_linked_folder_is_the_administrators_choice() -> None:
    assert compare(PLAN, faulty({"files": {"/opt/v100ctl": {"kind": "symlink", "mode": "0777"}}})) == ()


def test_on_a_bare_host_everything_is_pending() -> None:
    findings = compare(PLAN, make_facts())
    assert {finding.kind for finding in findings} == {"pending"}
    assert {finding.role for finding in findings} >= {"preflight", "llama_cpp", "model_store", "llm_server"}


FAULTS: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("package removed", {"packages": {"installed": {"libgomp1": None}}}, "package.missing:libgomp1", "drifted", "package"),
    ("user removed", {"accounts": {"v100": None}}, "account.missing:v100", "drifted", "unit"),
    ("release removed", {"releases": []}, f"release.missing:{RELEASE.build_id}", "drifted", "file"),
    (
        "release damaged",
        {"releases": [{"path": RELEASE.path, "problem": "lib/libllama.so.0 is missing"}]},
        f"release.damaged:{RELEASE.build_id}",
        "drifted",
        "file",
    ),
    (
        "model removed",
        {"models": {MODEL_PATH: {"exists": False, "sha256": ""}}},
        f"model.missing:{MODEL_PATH}",
        "drifted",
        "file",
    ),
    ("model replaced", {"models": {MODEL_PATH: {"sha256": "cd" * 32}}}, f"model.wrong:{MODEL_PATH}", "drifted", "file"),
    ("model touched", {"models": {MODEL_PATH: {"sha256": ""}}}, f"model.unverified:{MODEL_PATH}", "drifted", "file"),
    ("folder removed", {"files": {"/opt/v100ctl": None}}, "directory.missing:/opt/v100ctl", "drifted", "file"),
    (
        "folder opened",
        {"files": {"/etc/v100ctl/instances": {"mode": "0777"}}},
        "directory.mode:/etc/v100ctl/instances",
        "drifted",
        "file",
    ),
    ("unit file removed", {"files": {UNIT_FILE: None}}, f"file.missing:{UNIT_FILE}", "drifted", "file"),
    ("unit file is a link", {"files": {UNIT_FILE: {"kind": "symlink"}}}, f"file.missing:{UNIT_FILE}", "drifted", "file"),
    (
        "unit file edited",
        {"files": {UNIT_FILE: {"sha256": "00", "content": "x"}}},
        f"file.content:{UNIT_FILE}",
        "drifted",
        "file",
    ),
    ("unit file opened", {"files": {UNIT_FILE: {"mode": "0666"}}}, f"file.mode:{UNIT_FILE}", "drifted", "file"),
    ("unit not loaded", {"units": {UNIT: {"load_state": "not-found"}}}, f"unit.missing:{UNIT}", "drifted", "unit"),
    ("unit disabled", {"units": {UNIT: {"unit_file_state": "disabled"}}}, f"unit.disabled:{UNIT}", "drifted", "unit"),
    (
        "unit masked",
        {"units": {UNIT: {"load_state": "masked", "unit_file_state": "masked"}}},
        f"unit.masked:{UNIT}",
        "drifted",
        "unit",
    ),
    ("unit not reloaded", {"units": {UNIT: {"need_daemon_reload": True}}}, f"unit.stale:{UNIT}", "drifted", "unit"),
    ("unit failed", {"units": {UNIT: {"active_state": "failed"}}, "processes": []}, f"unit.failed:{UNIT}", "drifted", "unit"),
    (
        "unit stopped",
        {"units": {UNIT: {"active_state": "inactive"}}, "processes": []},
        f"unit.inactive:{UNIT}",
        "drifted",
        "unit",
    ),
    (
        "unit at its start limit",
        {"units": {UNIT: {"active_state": "failed", "result": "start-limit-hit"}}, "processes": []},
        f"unit.start-limit:{UNIT}",
        "drifted",
        "unit",
    ),
    (
        "unit that systemd has given up",
        {"units": {UNIT: {"active_state": "failed", "result": "exit-code", "restarts_count": 5}}, "processes": []},
        f"unit.start-limit:{UNIT}",
        "drifted",
        "unit",
    ),
    ("unit that crashes", {"units": {UNIT: {"restarts_count": 3}}}, f"unit.crashes:{UNIT}", "external", "unit"),
    (
        "unit of others",
        {"units": {"v100-x.service": {"load_state": "loaded", "active_state": "active"}}},
        "unit.foreign:v100-x.service",
        "external",
        "unit",
    ),
    (
        "gateway's drop-in",
        {"units": {"v100ctl-gateway.service": {"load_state": "loaded", "drop_in_paths": ["/etc/y.conf"]}}},
        "unit.drop-in:/etc/y.conf",
        "external",
        "unit",
    ),
    (
        "packages half configured",
        {"packages": {"half_configured": ["libc6"]}},
        "package.half-configured",
        "external",
        "package",
    ),
    (
        "job of others",
        {"cron": [{"path": "/etc/cron.d/x", "words": ["v100-chat"]}]},
        "file.cron:/etc/cron.d/x",
        "external",
        "file",
    ),
    (
        "keys of nobody",
        {"files": {"/etc/v100ctl/instances/old.keys": {"kind": "file", "mode": "0640"}}},
        "file.unknown:/etc/v100ctl/instances/old.keys",
        "external",
        "file",
    ),
    ("record removed", {"files": {HOST_JSON: None}, "host_json": NO_RECORD}, f"file.missing:{HOST_JSON}", "drifted", "file"),
    (
        "record that is no JSON",
        {"files": {HOST_JSON: {"sha256": "00", "content": "{"}}, "host_json": {**NO_RECORD, "problem": "not valid JSON"}},
        f"file.content:{HOST_JSON}",
        "drifted",
        "file",
    ),
    ("drop-in added", {"units": {UNIT: {"drop_in_paths": ["/etc/x.conf"]}}}, "unit.drop-in:/etc/x.conf", "external", "unit"),
    ("process of no plan", changed_process(environ={}), "process.stale:chat", "drifted", "process"),
    (
        "process with replaced libraries",
        changed_process(deleted_libraries=["/usr/lib/libssl.so.3"]),
        "process.libraries:chat",
        "external",
        "process",
    ),
    (
        "process that has grown",
        {
            "baselines": {"chat": {"digest": PLAN.instances[0].digest, "anonymous_bytes": GIB}},
            **changed_process(rss_anonymous_bytes=2 * GIB, swap_bytes=1024**2),
        },
        "process.memory-growth:chat",
        "external",
        "process",
    ),
    ("process in swap", changed_process(swap_bytes=GIB), "process.swapped:chat", "external", "process"),
    (
        "server for everybody",
        {"listeners": [{"address": "0.0.0.0", "port": 8000, "pid": 100, "command": "llama-server", "unit": UNIT}]},
        "service.exposed:chat",
        "external",
        "service",
    ),
    (
        "port of another program",
        {"listeners": [{"address": "127.0.0.1", "port": 8000, "pid": 9, "command": "nc", "unit": ""}]},
        "service.port-taken:chat",
        "external",
        "service",
    ),
    (
        "another model",
        {"identity": {"chat": {"status": 200, "models": ["other"]}}},
        "service.model:chat",
        "external",
        "service",
    ),
    ("process of a deleted program", changed_process(executable_deleted=True), "process.executable:chat", "drifted", "process"),
    ("process with other words", changed_process(argv=["x"]), "process.argv:chat", "drifted", "process"),
    ("process of another user", changed_process(user="root"), "process.user:chat", "drifted", "process"),
    (
        "process with another variable",
        changed_process(environ={**PLAN.instances[0].environment, "OMP_NUM_THREADS": "1", DIGEST_VARIABLE: "x"}),
        "process.stale:chat",
        "drifted",
        "process",
    ),
    (
        "process with few files",
        {**LIMITED, **changed_process(nofile_soft=1024)},
        "process.limit-nofile:chat",
        "drifted",
        "process",
    ),
    (
        "process with little locked memory",
        {**LIMITED, **changed_process(memlock_soft_bytes=65536)},
        "process.limit-memlock:chat",
        "drifted",
        "process",
    ),
    (
        "process on few processors",
        {"cpu": {"usable_cpus": "0-3"}, **changed_process(cpus_allowed="0")},
        "process.cpus:chat",
        "drifted",
        "process",
    ),
    ("process in a login's group", changed_process(cgroup_unit="ssh.service"), "process.cgroup:chat", "drifted", "process"),
    ("server loading", {"health": {"chat": {"status": 503}}}, "service.unhealthy:chat", "drifted", "service"),
    ("server mute", {"health": {"chat": {"status": None, "error": "timed out"}}}, "service.unhealthy:chat", "drifted", "service"),
]


def faulty(changes: dict[str, Any]) -> Facts:
    """A clean host with one fault; ``None`` in a mapping removes the entry."""
    document = applied_facts(PLAN).model_dump(by_alias=True)

    def apply(target: dict[str, Any], change: dict[str, Any]) -> None:
        for key, value in change.items():
            if value is None and key not in ("status", "systemd"):
                del target[key]
            elif value == []:
                target[key] = None if key == "document" else value
            elif isinstance(value, dict) and isinstance(target.get(key), dict):
                apply(target[key], value)
            else:
                target[key] = value

    apply(document, changes)
    return Facts.model_validate(document)


@pytest.mark.parametrize(("name", "changes", "identifier", "kind", "layer"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_one_fault_is_one_finding(name: str, changes: dict[str, Any], identifier: str, kind: str, layer: str) -> None:
    findings = compare(PLAN, faulty(changes))
    assert [(finding.id, finding.kind, finding.layer) for finding in findings] == [(identifier, kind, layer)]
    (finding,) = findings
    assert finding.expected != finding.actual
    assert finding.fix


def test_a_changed_inventory_is_pending_and_names_the_restart() -> None:
    applied = applied_facts(PLAN)
    moved_on = plan("h1", make_config({"settings": {"context_length": 1024}}), applied, as_of=AS_OF)
    findings = compare(moved_on, applied)
    assert {finding.kind for finding in findings} == {"pending"}
    assert {name for finding in findings for name in finding.restarts} == {"chat"}
    assert restarts(moved_on.to_role_variables(), applied.model_dump(by_alias=True)) == ["chat"]


def test_a_removed_instance_is_pending_until_it_is_gone() -> None:
    applied = applied_facts(PLAN)
    without = plan("h1", make_config(llm_server_instances={}), applied, as_of=AS_OF)
    assert f"unit.unwanted:{UNIT}" in {finding.id for finding in compare(without, applied)}
    gone = faulty({"files": {UNIT_FILE: None}, "units": {UNIT: None}, "processes": [], "listeners": [], "health": {}})
    assert f"unit.unwanted:{UNIT}" not in {finding.id for finding in compare(without, gone)}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"processes": []}, ["chat"]),
        ({"units": {UNIT: {"active_state": "failed"}}}, ["chat"]),
        ({"units": {UNIT: {"active_state": "activating"}}}, ["chat"]),
        (changed_process(environ={}), ["chat"]),
        (changed_process(executable_deleted=True), ["chat"]),
        (changed_process(argv=["x"]), ["chat"]),
        (changed_process(user="root"), ["chat"]),
        # /opt/v100ctl is a link to another disk: the kernel names the program by its real path.
        (changed_process(executable=f"/data{PROCESS['executable']}"), []),
        (changed_process(executable=f"{PROCESS['executable']}-other"), ["chat"]),
        # A script: the kernel runs its interpreter, with the words of its first line before its own.
        (changed_process(executable="/usr/bin/python3.11", argv=["/usr/bin/python3", "-B", *PROCESS["argv"]]), []),
        (changed_process(executable="/usr/bin/python3.11", argv=["/usr/bin/python3", *PROCESS["argv"], "--more"]), ["chat"]),
        (changed_process(executable="/usr/bin/python3.11", executable_deleted=True, argv=["py", *PROCESS["argv"]]), ["chat"]),
        (changed_process(cgroup_unit="ssh.service"), ["chat"]),
        # A host's ceilings are expected, and whoever has more than was asked for has enough.
        ({**LIMITED, **changed_process(nofile_soft=20000, memlock_soft_bytes=8388608)}, []),
        ({**LIMITED, **changed_process(nofile_soft=1048576)}, []),
        ({**LIMITED, **changed_process(nofile_soft=19999)}, ["chat"]),
        (changed_process(nofile_soft=1048576), []),
        (changed_process(nofile_soft=20000), ["chat"]),
        (changed_process(memlock_soft_bytes=8388608), ["chat"]),
        ({"cpu": {"usable_cpus": "0-3"}, **changed_process(cpus_allowed="0-1,2-3")}, []),
        ({"cpu": {"usable_cpus": "0-3"}, **changed_process(cpus_allowed="0-2")}, ["chat"]),
        # Without a node of its own any policy will do: an engine may set one itself.
        (changed_process(memory_policy="interleave:0-1"), []),
        # Enabling and reloading a unit restart nothing.
        ({"units": {UNIT: {"unit_file_state": "disabled", "need_daemon_reload": True}}}, []),
        # A mode that was changed needs no restart: the process is the planned one.
        ({"files": {UNIT_FILE: {"mode": "0666"}}}, []),
    ],
)
def test_restarts_are_decided_on_the_running_process(changes: dict[str, Any], expected: list[str]) -> None:
    facts = faulty(changes)
    assert restarts(PLAN.to_role_variables(), facts.model_dump(by_alias=True)) == expected
    said = {name for finding in compare(PLAN, facts) for name in finding.restarts}
    assert sorted(said) == expected or not facts.processes, "what the roles restart is what the plan says"


NUMA_CASE = Path(__file__).parent / "plan/cases/numa-node-of-the-card"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"cpus_allowed": "20-39,60-79", "memory_policy": "prefer:1"}, set()),
        # The kernel adds flags to a policy, and does not always tell one.
        ({"cpus_allowed": "20-39,60-79", "memory_policy": "prefer=static:1"}, set()),
        ({"cpus_allowed": "20-39,60-79", "memory_policy": ""}, set()),
        ({"cpus_allowed": "0-79", "memory_policy": "default"}, {"process.cpus:chat", "process.memory-policy:chat"}),
        ({"cpus_allowed": "20-39,60-79", "memory_policy": "prefer:0"}, {"process.memory-policy:chat"}),
        ({"environ": "CUDA_VISIBLE_DEVICES"}, {"process.environment:chat"}),
    ],
)
def test_a_process_is_where_its_card_is(changes: dict[str, Any], expected: set[str]) -> None:
    decided = decide(NUMA_CASE)
    (instance,) = decided.instances
    environment = {name: value for name, value in instance.environment.items() if name != changes.get("environ")}
    process = {
        "pid": 100,
        "unit": UNIT,
        "executable": instance.argv[0],
        "argv": list(instance.argv),
        "user": "v100",
        **changes,
        "environ": environment,
    }
    facts = applied_facts(decided, processes=[process])
    findings = {finding.id for finding in compare(decided, facts) if finding.layer == "process"}
    assert findings == expected
    assert restarts(decided.to_role_variables(), facts.model_dump(by_alias=True)) == (["chat"] if expected else [])


KEYED = make_plan(config=make_config({"api_keys": ["0123456789abcdef"]}))
KEYS_FILE = "/etc/v100ctl/instances/chat.keys"


@pytest.mark.parametrize(
    ("current", "kind"),
    # A server has the keys that were applied: where the file has others, somebody else wrote it.
    [(True, "pending"), (False, "drifted")],
)
def test_a_file_of_keys_that_differs_shows_that_and_nothing_else(current: bool, kind: str) -> None:
    assert compare(KEYED, applied_facts(KEYED)) == ()
    process = applied_facts(KEYED).processes[0].model_dump() | {"keys_current": current}
    facts = applied_facts(KEYED, files={KEYS_FILE: {"keyed_digest": "00"}}, processes=[process])
    found = {finding.id: finding for finding in compare(KEYED, facts)}
    finding = found.pop(f"file.content:{KEYS_FILE}")
    assert (finding.kind, finding.expected, finding.actual) == (kind, "the planned secrets", "others")
    assert finding.restarts == ("chat",)
    assert set(found) == (set() if current else {"process.keys:chat"})


def test_the_digest_of_a_file_of_keys_is_another_in_each_document() -> None:
    content = next(file.content for file in KEYED.files if file.path == KEYS_FILE)
    assert keyed_digest("00" * 16, content) != keyed_digest("01" * 16, content)
    # A document without a salt, as of an older probe, tells nothing of keys.
    assert compare(KEYED, applied_facts(KEYED, secret_salt="", files={KEYS_FILE: {"keyed_digest": ""}})) == ()


def test_keys_are_missing_too_open_or_left_over() -> None:
    gone = applied_facts(KEYED).model_dump(by_alias=True)
    del gone["files"][KEYS_FILE]
    (finding,) = compare(KEYED, Facts.model_validate(gone))
    assert (finding.id, finding.kind, finding.restarts) == (f"file.missing:{KEYS_FILE}", "drifted", ("chat",))
    (finding,) = compare(KEYED, applied_facts(KEYED, files={KEYS_FILE: {"mode": "0644"}}))
    assert finding.id == f"file.mode:{KEYS_FILE}"
    left = applied_facts(KEYED)
    unkeyed = make_plan(left)
    assert unkeyed.absent_files == ("/etc/v100ctl/instances/chat.env", KEYS_FILE)
    assert f"file.unwanted:{KEYS_FILE}" in {finding.id for finding in compare(unkeyed, left)}


@pytest.mark.parametrize(("kind", "identity"), [("file", "file.unwanted"), ("symlink", "file.unknown")])
def test_keys_of_nobody_are_told_once(kind: str, identity: str) -> None:
    """A role removes files; what else goes by such a name is left to its owner."""
    path = "/etc/v100ctl/instances/old.keys"
    facts = applied_facts(PLAN, files={path: {"kind": kind, "mode": "0640"}})
    assert [finding.id for finding in compare(make_plan(facts), facts)] == [f"{identity}:{path}"]


def test_a_server_with_older_keys_is_started_anew() -> None:
    plan = KEYED.to_role_variables()
    assert restarts(plan, applied_facts(KEYED).model_dump(by_alias=True)) == []
    process = applied_facts(KEYED).processes[0].model_dump() | {"keys_current": False}
    assert restarts(plan, applied_facts(KEYED, processes=[process]).model_dump(by_alias=True)) == ["chat"]


# --- what a difference is called ----------------------------------------------------------------------------------------------

#: The same host after its inventory has moved on.
MOVED_ON = plan("h1", make_config({"settings": {"context_length": 1024}}), applied_facts(PLAN), as_of=AS_OF)


def test_what_was_applied_is_pending_where_the_plan_has_moved_on() -> None:
    found = {finding.id: finding.kind for finding in compare(MOVED_ON, applied_facts(PLAN))}
    assert found == {
        f"file.content:{UNIT_FILE}": "pending",
        f"file.content:{HOST_JSON}": "pending",
        "process.stale:chat": "pending",
    }


def test_what_somebody_changed_is_drifted_also_where_the_plan_has_moved_on() -> None:
    facts = faulty({"files": {UNIT_FILE: {"sha256": "00", "content": "x"}}, **changed_process(environ={DIGEST_VARIABLE: "y"})})
    found = {finding.id: finding for finding in compare(MOVED_ON, facts)}
    assert {name: finding.kind for name, finding in found.items()} == {
        f"file.content:{UNIT_FILE}": "drifted",
        f"file.content:{HOST_JSON}": "pending",
        "process.stale:chat": "drifted",
    }
    (planned,) = (file for file in MOVED_ON.files if file.path == UNIT_FILE)
    assert found[f"file.content:{UNIT_FILE}"].expected == planned.content


def test_a_mode_that_was_applied_is_pending() -> None:
    import dataclasses

    other = dataclasses.replace(PLAN, files=tuple(dataclasses.replace(file, mode="0600") for file in PLAN.files))
    assert {finding.kind for finding in compare(other, applied_facts(PLAN)) if finding.id.startswith("file.mode")} == {"pending"}


def test_a_process_that_is_older_than_its_unit_says_so() -> None:
    facts = faulty({"files": {UNIT_FILE: {"mtime_s": 200.0}}, **changed_process(environ={}, started_s=100.0)})
    (finding,) = compare(PLAN, facts)
    assert "started before its unit was changed" in finding.actual


@pytest.mark.parametrize(
    "document",
    [
        {"files": 7, "instances": ["x"], "packages": {}, "releases": 3, "models": [[]], "driver": "535", "gateway": None},
        {"files": {UNIT_FILE: 1, "/": None}, "instances": {"chat": "x"}, "releases": [{"path": {}}], "digest": {}},
        {"schema": "v100ctl/host/1", "digest": "0" * 16},
    ],
)
def test_a_lying_record_hides_nothing(document: dict[str, Any]) -> None:
    facts = faulty({"files": {UNIT_FILE: {"sha256": "00", "content": "x"}, HOST_JSON: {"sha256": "11", "content": "{}"}}})
    lying = facts.model_copy(update={"host_json": facts.host_json.model_copy(update={"document": document})})
    found = {finding.id for finding in compare(PLAN, lying)}
    assert found == {f"file.content:{UNIT_FILE}", f"file.content:{HOST_JSON}"}


def test_a_record_that_was_edited_is_not_believed() -> None:
    facts = faulty({"files": {UNIT_FILE: {"sha256": "00", "content": "x"}}})
    assert facts.host_json.document is not None
    # Whoever edits a unit may write its hash into the record, so that the change looks like one that was applied.
    files = {**facts.host_json.document["files"], UNIT_FILE: {"sha256": "00", "mode": "0644", "owner": "root", "group": "root"}}
    edited = {**facts.host_json.document, "files": files}
    lying = facts.model_copy(update={"host_json": facts.host_json.model_copy(update={"document": edited})})
    (finding,) = compare(PLAN, lying)
    assert (finding.id, finding.kind) == (f"file.content:{UNIT_FILE}", "drifted")


def test_every_finding_names_a_role_that_is_there() -> None:
    roles = {path.name for path in (Path(__file__).parents[2] / "roles").iterdir()}
    named = set()
    for case in sorted(path for path in CASES.iterdir() if (path / "facts.json").is_file()):
        facts = Facts.model_validate_json((case / "facts.json").read_bytes())
        named |= {finding.role for finding in compare(decide(case), facts)}
    assert named <= roles
    assert named >= {"external_engine", "llama_cpp", "llm_server", "nvidia_driver", "gpu_tuning"}


def test_a_script_with_other_words_is_told_by_its_words() -> None:
    words = ["/usr/bin/python3", *PROCESS["argv"], "--more"]
    (finding,) = compare(PLAN, faulty(changed_process(executable="/usr/bin/python3.11", argv=words)))
    assert finding.id == "process.argv:chat"
    assert finding.actual.endswith("--more")


CARD_CASE = CASES / "card-in-good-health"


@pytest.mark.parametrize(
    ("card", "facts", "expected"),
    [
        ({"processes": [{"pid": 7, "command": "python3 train.py", "memory_bytes": GIB}]}, {}, {"gpu.foreign-process": "error"}),
        ({"processes": [{"pid": 7, "command": "llama-server", "memory_bytes": GIB}]}, {}, {"gpu.orphan": "error"}),
        ({"processes": [{"pid": 7, "command": "x", "unit": UNIT}]}, {}, {}),
        ({"ecc_uncorrected_volatile": 2}, {}, {"gpu.ecc-errors": "warn"}),
        ({"temperature_c": 70, "memory_temperature_c": 86}, {}, {"gpu.hot": "warn"}),
        ({"temperature_c": 83, "memory_temperature_c": 85}, {}, {}),
        (
            {},
            {"apt_preferences": [{"path": "/etc/apt/preferences.d/x", "packages": ["nvidia-*"]}]},
            {"package.preference": "warn"},
        ),
        ({}, {"apt_preferences": [{"path": "/etc/apt/preferences.d/v100ctl-nvidia-driver"}]}, {}),
        (
            {},
            {
                "apt_preferences": [
                    {"path": "/etc/apt/preferences.d/p", "packages": ["nvidia-*"], "owner": "nvidia-driver-pinning-580"}
                ]
            },
            {},
        ),
        (
            {},
            {"unattended_upgrades": True, "packages": {"installed": {"nvidia-driver": "535.309.01-1"}, "held": []}},
            {"package.unattended-upgrades": "warn"},
        ),
        (
            {},
            {"unattended_upgrades": False, "packages": {"installed": {"nvidia-driver": "535.309.01-1"}, "held": []}},
            {},
        ),
    ],
)
def test_what_others_do_around_a_card(card: dict[str, Any], facts: dict[str, Any], expected: dict[str, str]) -> None:
    document = Facts.model_validate_json((CARD_CASE / "facts.json").read_bytes()).model_dump(by_alias=True)
    document["gpus"][0].update(card)
    found = compare(decide(CARD_CASE), Facts.model_validate(merge(document, facts)))
    before = compare(decide(CARD_CASE), Facts.model_validate_json((CARD_CASE / "facts.json").read_bytes()))
    new = {finding.id.partition(":")[0]: finding for finding in found if finding.id not in {item.id for item in before}}
    assert {name: finding.severity for name, finding in new.items() if finding.kind == "external"} == expected


NEXT = "6.1.0-58-amd64"
#: Two kernels, of which the newer one does not run yet.
UPGRADED: dict[str, Any] = {"kernels_installed": ["6.1.0-57-amd64", NEXT]}
#: What this toolkit leaves where it has installed the driver itself.
INSTALLED_HERE: dict[str, Any] = {
    "files": {"/etc/apt/preferences.d/v100ctl-nvidia-driver": {"kind": "file", "content": "# driver 535, installed from x\n"}}
}


def next_boot(*changes: dict[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """What is found of the next boot on a healthy host with these changes: kind, severity, expected, actual, fix."""
    document = Facts.model_validate_json((CARD_CASE / "facts.json").read_bytes()).model_dump(by_alias=True)
    for change in changes:
        document = merge(document, change)
    facts = Facts.model_validate(document)
    found = [item for item in compare(decide(CARD_CASE, facts), facts) if item.id == "driver.next-boot"]
    assert {(item.layer, item.role) for item in found} <= {("driver", "nvidia_driver")}
    return [(item.kind, item.severity, item.expected, item.actual, item.fix) for item in found]


def next_module(version: str | None, flavour: str = "proprietary") -> dict[str, Any]:
    return {"nvidia": {"next_boot_module_version": version, "next_boot_module_flavour": flavour}}


@pytest.mark.parametrize(
    "changes",
    [
        # The kernel that runs boots next; the one to come has its modules; nobody could look; a container.
        ({},),
        (UPGRADED, next_module("535.309.01")),
        (UPGRADED, next_module(None)),
        ({"errors": {"nvidia.module_file": "x"}, "nvidia": {"on_disk_module_version": ""}},),
        ({"kernels_installed": []}, next_module("")),
        # Library and modules were upgraded together, and the next boot brings both.
        (UPGRADED, next_module("535.310.01"), {"nvidia": {"library_version": "535.310.01"}}),
        # No library to go by, as where the modules alone are there.
        (UPGRADED, next_module("535.310.01", ""), {"nvidia": {"library_version": ""}}),
    ],
)
def test_a_next_boot_that_brings_the_driver_is_no_finding(changes: tuple[dict[str, Any], ...]) -> None:
    assert next_boot(*changes) == []


def test_a_next_boot_without_modules_is_told() -> None:
    ((kind, severity, expected, actual, fix),) = next_boot(UPGRADED, next_module("", ""))
    assert (kind, severity) == ("external", "error")
    assert (expected, actual) == (f"modules of driver 535.309.01 for kernel {NEXT}, which boots next", "no modules")
    assert f"dkms autoinstall -k {NEXT}" in fix and fix.endswith("or boot 6.1.0-57-amd64")
    # DKMS was removed under the loaded module: the same kernel boots, and finds nothing.
    ((_, _, expected, _, _),) = next_boot({"nvidia": {"on_disk_module_version": "", "on_disk_module_flavour": ""}})
    assert "6.1.0-57-amd64, which boots next" in expected


@pytest.mark.parametrize(
    ("module", "actual"),
    [
        (("550.163.01", "proprietary"), "550.163.01, proprietary modules"),
        (("535.309.01", "open"), "535.309.01, open modules"),
    ],
)
def test_a_next_boot_with_other_modules_is_told(module: tuple[str, str], actual: str) -> None:
    ((_, _, _, found, _),) = next_boot(UPGRADED, next_module(*module))
    assert found == actual


def test_a_build_that_failed_names_its_log() -> None:
    failed = {"dkms": [{"name": "nvidia-current", "version": "535.309.01", "failed": NEXT}]}
    ((_, _, _, actual, _),) = next_boot(UPGRADED, next_module(""), failed)
    assert actual.endswith("see /var/lib/dkms/nvidia-current/535.309.01/build/make.log on the host")
    other = {"dkms": [{"name": "nvidia-current", "version": "535.309.01", "failed": "5.10.0-1-amd64"}]}
    ((_, _, _, actual, _),) = next_boot(UPGRADED, next_module(""), other)
    assert actual == "no modules"


def test_a_role_builds_for_the_next_boot_of_a_driver_that_it_installed() -> None:
    ((kind, _, _, _, fix),) = next_boot(UPGRADED, INSTALLED_HERE, next_module(""))
    assert (kind, fix) == ("pending", "`v100ctl provision`")
    applied = {"host_json": {"document": {"driver": {"branch": "535"}}}}
    ((kind, _, _, _, _),) = next_boot(UPGRADED, INSTALLED_HERE, next_module(""), applied)
    assert kind == "drifted"
    # A kernel of somebody's own is none that packages have headers for.
    own = {"kernels_installed": ["6.1.0-57-amd64", "6.12.1-custom"]}
    ((kind, _, _, _, _),) = next_boot(own, INSTALLED_HERE, next_module(""), applied)
    assert kind == "external"
