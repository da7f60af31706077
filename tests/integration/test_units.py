"""Units as the plan renders them, under a real systemd: what a process gets is what was planned.

An engine is not needed for that: Python sleeps in its place.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.unit.factory import AS_OF
from tests.unit.plan.golden import GOLDEN, HOST
from v100ctl.catalog import load_catalog
from v100ctl.facts import Facts
from v100ctl.fleet import is_noncharacter, parse_config
from v100ctl.lab.hosts import LabHost, run_identity
from v100ctl.lab.image import DEFAULT_DEBIAN, ensure_image
from v100ctl.plan import plan
from v100ctl.plan.gateway import UNIT as GATEWAY_UNIT
from v100ctl.plan.tuning import UNIT as TUNING_UNIT
from v100ctl.plan.types import Placement
from v100ctl.plan.units import CHECK_PROGRAM, DEVICES_UNIT, PROGRAMS_DIR, Surroundings, render_unit, unit_name
from v100ctl.plan.upkeep import NIGHTLY_UNIT, WATCHDOG_UNIT

from . import hosts
from .hosts import ROOT

if TYPE_CHECKING:
    from v100ctl.apply.reporter import Reporter
    from v100ctl.lab.hosts import Lab, RunningHost

#: It has a child, as an engine has workers, and no other name than its argv.
SERVER = "import subprocess, time; subprocess.Popen(['sleep', '1000']); time.sleep(1000)"
ARGV = ("/usr/bin/python3", "-c", SERVER)
#: The release of Debian, and whether its systemd is old or new; the default run has Debian 12's (252) alone.
RELEASES = ("12", pytest.param("11", marks=pytest.mark.slow), pytest.param("13", marks=pytest.mark.slow))


def systemd_version(host: RunningHost) -> int:
    """As the probe tells it: 252."""
    return int(on_host(host, "systemctl --version").split()[1])


def on_host(host: RunningHost, command: str) -> str:
    """What a command on the host prints."""
    return hosts.on_host(host, command).strip()


def put(host: RunningHost, path: str, content: str | bytes, mode: str = "0644") -> None:
    """Write a file on the host, whatever its bytes are."""
    raw = content.encode() if isinstance(content, str) else content
    encoded = base64.b64encode(raw).decode()
    folder = shlex.quote(str(Path(path).parent))
    # An argument has at most 128 KiB.
    pieces = [encoded[start : start + 100_000] for start in range(0, len(encoded), 100_000)]
    on_host(host, f"mkdir -p {folder}; : > {shlex.quote(path)}.b64")
    for piece in pieces:
        on_host(host, f"printf %s {piece} >> {shlex.quote(path)}.b64")
    quoted = shlex.quote(path)
    on_host(host, f"base64 -d {quoted}.b64 > {quoted}; rm {quoted}.b64; chmod {mode} {quoted}")


def read(host: RunningHost, path: str) -> bytes:
    """A file on the host as it is."""
    return base64.b64decode(on_host(host, f"base64 -w0 {path}"))


def start(
    host: RunningHost,
    name: str,
    *,
    argv: tuple[str, ...] = ARGV,
    environment: Mapping[str, str] | None = None,
    around: Surroundings | None = None,
    change: Callable[[str], str] = str,
) -> tuple[int, dict[str, str]]:
    """Start an instance; its process and the environment that was planned."""
    file, complete, _ = render_unit(
        name,
        engine="llama_cpp",
        argv=argv,
        environment=environment or {},
        release_path="/opt/v100ctl/engines/llama_cpp/none",
        model_sha256s=(),
        around=around or Surroundings(systemd_version=systemd_version(host)),
    )
    put(host, file.path, change(file.content))
    on_host(host, f"systemctl daemon-reload; systemctl restart {unit_name(name)}")
    return main_pid(host, name), complete


def main_pid(host: RunningHost, name: str) -> int:
    """The main process of an instance; 0 where it has none."""
    return int(on_host(host, f"systemctl show --value --property MainPID {unit_name(name)}"))


def wait_for(what: Callable[[], Any]) -> Any:
    """The first true value of ``what``, which a busy machine may take a while to give."""
    for _ in range(240):
        found = what()
        if found:
            return found
        time.sleep(0.25)
    raise AssertionError("it never came")


def prepare(host: RunningHost) -> None:
    """The account, and the check that runs before a start."""
    on_host(host, "getent passwd v100 >/dev/null || useradd --system --home-dir /var/lib/v100ctl --shell /usr/sbin/nologin v100")
    on_host(host, f"mkdir -p /var/lib/v100ctl {PROGRAMS_DIR}")
    put(host, CHECK_PROGRAM, (ROOT / "roles/llm_server/files/check_start.py").read_bytes(), "0755")


@pytest.fixture(scope="module", params=RELEASES)
def unit_host(request: pytest.FixtureRequest, lab: Lab, lab_reporter: Reporter) -> Iterator[RunningHost]:
    """A host on which units can start, left as it was."""
    own = request.param != DEFAULT_DEBIAN
    if own:
        made = LabHost(f"test-{os.getpid()}-units-{request.param}", owner=run_identity())
        host = lab.up(made, ensure_image(lab.client, lab_reporter, debian=request.param), lab_reporter)
    else:
        host = request.getfixturevalue("lab_host")
    prepare(host)
    yield host
    if own:
        lab.down(host.name)
        return
    on_host(
        host,
        "systemctl stop 'v100-*.service'; rm -rf /etc/systemd/system/v100-*.service /opt/v100ctl /var/lib/v100ctl;"
        "systemctl daemon-reload; systemctl reset-failed; userdel v100; true",
    )


#: What an argument can hold: no NUL, no half of a surrogate pair, none of the code points that the inventory refuses.
NONCHARACTERS = "".join(character for character in map(chr, range(0x110000)) if is_noncharacter(character))
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0" + NONCHARACTERS), max_size=40)
NASTY = (
    "",
    " ",
    "a b",
    "%n %% %i",
    "$HOME ${HOME} $$",
    "'\"`\\",
    "\\x41\\n",
    "a\nb\n",
    "\t\r\v\f\b\a\x1b\x7f",
    ";",
    "#x",
    "-",
    "--",
    "ÄÖü 日本 \U0001f600",
    "\x85\u2028\ufeff",
    '{"rope_type": "yarn", "factor": 4.0}',
    "a" * 5000,
    "\\",
    "end\\",
    "{{ x }}",
    "|", "&&", "*", "~", "!x", "@x", "+x", ":x",
)  # fmt: skip


# Each start takes a second or two, so that the few examples are large; a failure is not made smaller.
@settings(max_examples=3, phases=[Phase.generate], suppress_health_check=list(HealthCheck), derandomize=True)
@given(words=st.lists(TEXT, min_size=150, max_size=250))
def test_every_argument_and_every_value_arrives(unit_host: RunningHost, words: list[str]) -> None:
    argv = (*ARGV, *NASTY, *words)
    environment = {f"X{number}": value for number, value in enumerate((*NASTY, *words))}
    pid, planned = start(unit_host, "words", argv=argv, environment=environment)
    seen = read(unit_host, f"/proc/{pid}/cmdline").split(b"\0")[:-1]
    assert seen == [word.encode() for word in argv]
    pairs = (entry.partition(b"=") for entry in read(unit_host, f"/proc/{pid}/environ").split(b"\0"))
    environ = {name.decode(): value for name, _, value in pairs}
    assert {name: environ.get(name) for name in planned} == {name: value.encode() for name, value in planned.items()}


def test_process_is_the_plans(unit_host: RunningHost) -> None:
    """Limits, processors, memory policy, user, control group and what is forbidden."""
    host = unit_host
    ceiling = {line.split("  ")[0]: line for line in on_host(host, "cat /proc/1/limits").splitlines()}
    cpus = on_host(host, "sed -n 's/^Cpus_allowed_list:\t//p' /proc/1/status")
    first = re.split("[,-]", cpus)[0]
    around = Surroundings(systemd_version=systemd_version(host), placement=Placement((0,), first, "bind"))
    pid, _ = start(host, "bound", around=around)
    free_pid, _ = start(host, "free")
    status = on_host(host, f"cat /proc/{pid}/status")
    assert re.search(rf"^Cpus_allowed_list:\t{first}$", status, re.M)
    assert re.search(r"^NoNewPrivs:\t1$", status, re.M)
    assert re.search(r"^CapBnd:\t0+$", status, re.M)
    assert re.search(r"^Seccomp:\t2$", status, re.M)
    assert on_host(host, f"stat -c %U:%G /proc/{pid}") == "v100:v100"
    assert read(host, f"/proc/{pid}/numa_maps").split(b"\n")[0].split()[1] == b"bind:0"
    assert read(host, f"/proc/{free_pid}/numa_maps").split(b"\n")[0].split()[1] == b"default"
    assert re.search(rf"^Cpus_allowed_list:\t{re.escape(cpus)}$", on_host(host, f"cat /proc/{free_pid}/status"), re.M)
    # What the container cannot give is not got: its ceiling is.
    limits = {line.split("  ")[0]: line for line in on_host(host, f"cat /proc/{pid}/limits").splitlines()}
    for limit in ("Max open files", "Max locked memory"):
        assert limits[limit].split()[3] == ceiling[limit].split()[4], limits[limit]
    assert f"/{unit_name('bound')}" in on_host(host, f"cat /proc/{pid}/cgroup")
    children = on_host(host, f"cat /proc/{pid}/task/{pid}/children").split()
    assert len(children) == 1 and f"/{unit_name('bound')}" in on_host(host, f"cat /proc/{children[0]}/cgroup")


def test_probe_tells_what_is_compared(unit_host: RunningHost) -> None:
    around = Surroundings(systemd_version=systemd_version(unit_host), placement=Placement((0,), "0", "preferred"))
    start(unit_host, "bound", around=around)
    put(unit_host, "/tmp/probe.py", (ROOT / "src/v100ctl/probe/host_script.py").read_bytes())
    facts = json.loads(on_host(unit_host, "python3 -ISB /tmp/probe.py --request '{}'; rm /tmp/probe.py"))
    process = next(item for item in facts["processes"] if item["unit"] == unit_name("bound"))
    assert process["memory_policy"] == "prefer:0"
    assert process["cpus_allowed"] == "0"
    assert process["cgroup_unit"] == unit_name("bound")
    assert process["nofile_soft"] == facts["limits"]["nofile_hard"]
    assert process["memlock_soft_bytes"] == facts["limits"]["memlock_hard_bytes"]
    assert facts["cpu"]["usable_cpus"] == on_host(unit_host, "sed -n 's/^Cpus_allowed_list:\t//p' /proc/1/status")
    assert facts["cpu"]["usable_nodes"]


def test_killed_server_takes_its_children_along_and_comes_back_alone(unit_host: RunningHost) -> None:
    host = unit_host
    first, _ = start(host, "one", change=lambda text: text.replace("RestartSec=5", "RestartSec=0"))
    second, _ = start(host, "two")
    child = on_host(host, f"cat /proc/{first}/task/{first}/children").strip()
    on_host(host, f"kill -9 {first}")
    again = wait_for(lambda: (pid := main_pid(host, "one")) not in (0, first) and pid)
    assert on_host(host, f"ls -d /proc/{child} 2>/dev/null; true") == ""
    assert again != first
    assert main_pid(host, "two") == second


def test_missing_model_is_named_and_ends_in_a_clear_state(unit_host: RunningHost) -> None:
    host = unit_host
    around = Surroundings(model_paths=("/srv/models/none.gguf",), systemd_version=systemd_version(host))
    with pytest.raises(AssertionError, match="control process exited"):
        start(host, "lost", around=around, change=lambda text: text.replace("RestartSec=5", "RestartSec=0"))
    unit = unit_name("lost")
    wait_for(lambda: "failed" in on_host(host, f"systemctl is-active {unit}; true"))
    assert "the model /srv/models/none.gguf is missing" in on_host(host, f"journalctl -u {unit} -o cat --no-pager")
    assert on_host(host, f"systemctl show --value --property NRestarts {unit}") == "5"


def every_unit(version: int) -> dict[str, str]:
    """Each unit that a host may get, by its file's name: the servers of all profiles, and what looks after them."""
    facts = Facts.model_validate_json(HOST.read_bytes())
    assert facts.systemd is not None
    facts = facts.model_copy(update={"systemd": facts.systemd.model_copy(update={"version": version})})
    found: dict[str, str] = {}
    for number, (name, profile) in enumerate(sorted(load_catalog().profiles.items())):
        instance = {
            "engine": profile.engine,
            "profile": name,
            "model": {"path": f"/srv/models/{name}", "sha256": "ab" * 32},
            "gpus": [facts.gpus[1].uuid],
            "nightly_restart": {"window": "03:00-05:00", **({"time_zone": "Europe/Berlin"} if number else {})},
        }
        variables = {"gateway_placement": "host", "gpu_tuning_power_limit_w": 200}
        config = parse_config("h1", {"llm_server_instances": {f"golden{number}": instance}, **variables})
        decided = plan("h1", config, facts, as_of=AS_OF)
        units = {file.path.removeprefix("/etc/systemd/system/"): file.content for file in decided.files}
        found.update({name: text for name, text in units.items() if "/" not in name})
    return found


#: The highest by the start of a unit's name. What serves a model has least; what asks for restarts as root has more, what
#: binds ports as root most. Two set cards up at boot and end.
EXPOSURE = {"v100-": 2.5, "v100ctl-gateway": 4.5, "v100ctl-": 4.0}
UNCONFINED = (DEVICES_UNIT, TUNING_UNIT)


def test_every_unit_is_clean_for_systemd(unit_host: RunningHost) -> None:
    """`systemd-analyze verify` finds nothing, no cycle either, and the exposure is low."""
    host = unit_host
    units = every_unit(systemd_version(host))
    assert {*UNCONFINED, GATEWAY_UNIT, WATCHDOG_UNIT, NIGHTLY_UNIT, "v100ctl-nightly@golden1.timer"} <= set(units)
    programs = {path for text in units.values() for path in re.findall(r"^Exec\w+=[-+]?(/\S+)", text, re.M)}
    # What is not installed on this host stands there only to be found.
    missing = [path for path in sorted(programs) if host.execute("test", "-e", path)[0] != 0]
    names = [name.replace("@.", "@golden0.") for name in units]
    try:
        for path in missing:
            put(host, path, "#!/bin/sh\n", "0755")
        for name, text in units.items():
            put(host, f"/etc/systemd/system/{name}", text)
        on_host(host, "systemctl daemon-reload")
        assert on_host(host, f"systemd-analyze verify {' '.join(names)} 2>&1") == ""
        for name in names:
            if name.endswith(".service") and name not in UNCONFINED:
                said = on_host(host, f"systemd-analyze security --no-pager {name}").splitlines()[-1]
                limit = next(limit for start, limit in EXPOSURE.items() if name.startswith(start))
                assert float(re.findall(r"[0-9]+\.[0-9]", said)[0]) <= limit, said
    finally:
        on_host(host, f"cd /etc/systemd/system && rm -f {' '.join(units)} {' '.join(missing)}; systemctl daemon-reload")


@pytest.mark.parametrize("debian", RELEASES)
def test_instance_stays_on_its_card(make_v100_host: Callable[..., RunningHost], debian: str) -> None:
    """An engine that counts cards gets the number that its card has now; a card that is gone or full is named."""
    host = make_v100_host("2xV100-SXM2-16GB", driver="535", debian=debian if debian != DEFAULT_DEBIAN else None)
    prepare(host)
    uuids = [
        line.split(",")[1].strip()
        for line in on_host(host, "nvidia-smi --query-gpu=index,uuid --format=csv,noheader").splitlines()
    ]
    put(host, f"/etc/systemd/system/{DEVICES_UNIT}", (GOLDEN / DEVICES_UNIT).read_bytes())
    around = Surroundings(cards=(uuids[1],), by_index=True, writes_code=True, systemd_version=systemd_version(host))
    pid, _ = start(host, "card", around=around)
    environ = read(host, f"/proc/{pid}/environ").split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=1" in environ
    assert b"XDG_CACHE_HOME=/var/cache/v100ctl/card" in environ
    assert on_host(host, "stat -c '%U %a' /var/cache/v100ctl/card") == "v100 700"
    # The model takes more than is free there, and somebody is named.
    on_host(host, "mkdir -p /srv/models; truncate -s 15G /srv/models/large.gguf; truncate -s 1G /srv/models/small.gguf")
    check = f"python3 -ISB {CHECK_PROGRAM} --unit v100-card.service --card {uuids[1]} --weights-on-cards --wait-s 0"
    assert on_host(host, f"{check} --model /srv/models/large.gguf") == ""
    occupy = (
        "import json; p='/var/lib/fake-v100/state.json'; d=json.load(open(p));"
        f"d['cards'][1]['processes']=[dict(pid={pid}, name='python3', memory_mib=9000)]; json.dump(d, open(p, 'w'))"
    )
    on_host(host, f"python3 -c {shlex.quote(occupy)}")
    said = on_host(host, f"{check} --model /srv/models/small.gguf 2>&1; true")
    assert "an earlier start still holds its card" in said and f"process {pid}" in said
    said = on_host(host, f"{check.replace('v100-card', 'v100-other')} --model /srv/models/large.gguf 2>&1; true")
    assert "MiB are free" in said and "the model alone takes 11520 MiB" in said
    assert on_host(host, f"{check.replace('v100-card', 'v100-other')} --model /srv/models/small.gguf") == ""
    said = on_host(host, f"{check.replace(uuids[1], 'GPU-gone')} --model /srv/models/small.gguf 2>&1; true")
    assert "card GPU-gone is gone" in said and uuids[0] in said
