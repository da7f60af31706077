"""The fake V100s of the lab: what `nvidia-smi` answers for every card and driver, and what the machine shows on its bus."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import tarfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from v100ctl.catalog import load_catalog
from v100ctl.catalog.hardware import GpuRow
from v100ctl.cli import run
from v100ctl.errors import LabError
from v100ctl.lab.gpu import CARD_FAULTS, FAULTS, FakeCards, FakeDriver, files, specification
from v100ctl.lab.gpu.host import faults, fields, packages, smi
from v100ctl.lab.gpu.host.machine import Machine, module_fields, module_file
from v100ctl.lab.gpu.host.readings import Reading, graphics_clocks
from v100ctl.probe import host_script

ROWS = load_catalog().gpus
ALL_KINDS = [row.pci_id for row in ROWS]
DRIVERS = ("470", "525", "535", "550", "580")
FIXTURES = Path(__file__).parent / "fixtures/nvidia_smi"
PROBE_QUERY = "--query-gpu=" + ",".join(host_script.SMI_FIELDS)


class Host:
    """A machine below a folder, with its driver loaded, and its `nvidia-smi`."""

    def __init__(self, root: Path, cards: FakeCards, driver: FakeDriver, flavour: str = "proprietary") -> None:
        self.machine = Machine(root)
        self.machine.folder.mkdir(parents=True, exist_ok=True)
        (root / "dev").mkdir(exist_ok=True)
        (self.machine.folder / "state.json").unlink(missing_ok=True)
        (self.machine.folder / "spec.json").write_text(json.dumps(specification("h1", cards, driver)), encoding="utf-8")
        if driver.version:
            with self.machine.change() as state:
                self.machine.load_driver(state, driver.version, flavour)

    def smi(self, *arguments: str) -> tuple[int, str]:
        """Exit code and output."""
        written: list[str] = []
        code = smi.Smi(self.machine, written.append).run(list(arguments))
        return code, "".join(written)

    def out(self, *arguments: str) -> str:
        """The output of a call that succeeds."""
        code, output = self.smi(*arguments)
        assert code == 0, output
        return output


MakeHost = Callable[..., Host]


def document_of(host: Host) -> ElementTree.Element:
    """``nvidia-smi -q -x``, read."""
    return ElementTree.fromstring(host.out("-q", "-x"))  # noqa: S314  (what this package has just written)


@pytest.fixture
def make_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeHost:
    """Hosts by their cards (text or :class:`FakeCards`) and driver. Settings are made as root; no device node is."""
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("os.mknod", lambda path, mode, device: Path(path).touch())
    made = iter(range(1000))

    def make(cards: str | FakeCards = "2xV100-PCIE-16GB", driver: str = "535", flavour: str = "proprietary") -> Host:
        root = tmp_path / str(next(made))
        root.mkdir()
        chosen = cards if isinstance(cards, FakeCards) else FakeCards.parse(cards)
        return Host(root, chosen, FakeDriver.parse(driver), flavour)

    return make


# --- what a host may be -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.pci_id)
@pytest.mark.parametrize("count", [1, 8])
def test_cards_are_named_as_the_catalog_names_them(row: GpuRow, count: int) -> None:
    name = row.name.removeprefix("Tesla ")
    cards = FakeCards.parse(f"{count}x{name}")
    assert len(cards.kinds) == count
    assert str(cards) == f"{count}x{name}"
    assert FakeCards.parse(str(cards)) == cards


def test_a_mixed_host_and_one_without_a_card() -> None:
    assert FakeCards.parse("V100-PCIE-16GB, 2xV100-PCIE-32GB").kinds == ("10de:1db4", "10de:1db6", "10de:1db6")
    assert FakeCards.parse("none") == FakeCards()
    assert str(FakeCards()) == "none"


@pytest.mark.parametrize("text", ["9xV100-PCIE-16GB", "0xV100-PCIE-16GB", "A100", "4x", "x", "2xV100-PCIE-16GB,"])
def test_what_no_host_can_be_is_refused(text: str) -> None:
    with pytest.raises(LabError) as caught:
        FakeCards.parse(text)
    assert caught.value.hint


def test_drivers() -> None:
    assert FakeDriver.parse("none") == FakeDriver()
    debian, nvidia = FakeDriver.parse("535"), FakeDriver.parse("580")
    assert (debian.version, debian.revision) == ("535.309.01", "-0+deb12u1")
    assert (nvidia.version.split(".")[0], nvidia.revision) == ("580", "-1")
    assert FakeDriver.parse("535.183.01").version == "535.183.01"
    # Each release numbers its packages, and one that carries two branches names one of them by its branch.
    assert packages.stand_ins({**dataclasses.asdict(FakeDriver.parse("535", debian="11")), "flavour": "proprietary"})[
        "libcuda1"
    ] == ("535.309.01-0+deb11u1")
    tesla = packages.stand_ins({**dataclasses.asdict(FakeDriver.parse("535", debian="13")), "flavour": "proprietary"})
    assert tesla["nvidia-tesla-535-kernel-dkms"] == tesla["libnvidia-tesla-535-ml1"] == "535.274.02-1~deb13u1"
    assert FakeDriver.parse("550", debian="13").revision == "-2"
    for text in ("five", "100", "535.1.2.3", "latest"):
        with pytest.raises(LabError):
            FakeDriver.parse(text)


def test_the_same_host_is_the_same_and_another_has_other_cards() -> None:
    cards, driver = FakeCards.parse("2xV100-SXM2-32GB"), FakeDriver.parse("535")
    assert specification("a", cards, driver) == specification("a", cards, driver)
    uuids = [card["uuid"] for name in ("a", "b") for card in specification(name, cards, driver)["cards"]]
    assert len(set(uuids)) == 4


def test_what_a_host_carries() -> None:
    raw = files("h1", FakeCards.parse("1xV100-PCIE-16GB"), FakeDriver.parse("535"))
    assert raw == files("h1", FakeCards.parse("1xV100-PCIE-16GB"), FakeDriver.parse("535"))
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        entries = {entry.name: entry for entry in archive.getmembers()}
    links = {name: entry.linkname for name, entry in entries.items() if entry.issym()}
    # No `nvidia-smi` yet: a package brings it.
    assert "usr/local/bin/nvidia-smi" not in entries
    for target in links.values():
        assert entries[target.lstrip("/")].mode == 0o755
    assert "usr/local/lib/fake-v100/v100fake/smi.py" in entries


# --- nvidia-smi ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_form_for_every_card(kind: str, driver: str, make_host: MakeHost) -> None:
    host = make_host(FakeCards((kind,) * 2), driver)
    row = next(row for row in ROWS if row.pci_id == kind)
    lines = host.out().splitlines()[1:]
    assert {len(line) for line in lines if line} == {79 if int(driver) < 530 else 89 if int(driver) == 535 else 91}
    log, document = host.out("-q"), document_of(host)
    assert log.count("    Product Name") == 2
    assert [gpu.findtext("product_name") for gpu in document.iter("gpu")] == [row.name] * 2
    for gpu in document.iter("gpu"):
        total = gpu.findtext("fb_memory_usage/total")
        assert total == f"{(row.memory_total_bytes >> 20) - (240 if int(driver) < 510 else 0)} MiB"
        for element in ("uuid", "serial", "pci/pci_bus_id", "temperature/gpu_temp", "ecc_mode/current_ecc", "clocks/sm_clock"):
            value = gpu.findtext(element)
            assert value
            assert f": {value}\n" in log
    assert host.out("-L").count(f": {row.name} (UUID: GPU-") == 2
    assert host.out("topo", "-m").count("\t X \t") == 2
    assert len(host.out("dmon", "-s", "puc", "-c", "1").splitlines()) == 4
    assert host.out("--query-compute-apps=gpu_uuid,pid,used_memory,process_name", "--format=csv,noheader,nounits") == ""


@pytest.mark.parametrize("driver", DRIVERS)
def test_what_is_in_the_document_is_in_the_log(driver: str, make_host: MakeHost) -> None:
    host = make_host("1xV100-SXM2-16GB", driver)
    log = host.out("-q")
    gpu = document_of(host).find("gpu")
    assert gpu is not None
    # What the log shows as a section, or not at all unless it is asked for.
    other = {"mig_devices", "processes", "accounted_processes", "supported_clocks", "supported_gpu_target_temp"}
    for element in gpu:
        if element.tag not in other and not len(element):
            assert re.search(rf": {re.escape(element.text or '')}$", log, re.M), element.tag
    columns = {line.index(": ") for line in log.splitlines() if ": " in line and not line.startswith("GPU ")}
    assert len(columns) == 1, "all colons stand below each other"


def test_tables_are_laid_out_as_real_ones() -> None:
    def shape(text: str) -> list[str]:
        return [re.sub(r"[0-9]", "9", line) for line in text.splitlines()]

    real = (FIXTURES / "v100_sxm2_418.txt").read_text(encoding="utf-8")
    cards = specification("h", FakeCards.parse("2xV100-SXM2-16GB"), FakeDriver.parse("535"))["cards"]
    for card in cards:
        card["persistence"] = True
    made = smi.table("418.40.04", "10.1", [Reading(card, 418) for card in cards])
    rows = [line for line in shape(real)[1:] if line]
    assert shape("\n".join(made))[: len(rows)] == rows
    head = (FIXTURES / "h200_580.txt").read_text(encoding="utf-8").splitlines()[1:8]
    assert smi.table("580.159.04", "13.0", [Reading(card, 580) for card in cards])[: len(head)] == head


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_fields_in_any_order(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    driver = data.draw(st.sampled_from(DRIVERS))
    kinds = data.draw(st.lists(st.sampled_from(ALL_KINDS), min_size=1, max_size=8))
    names = data.draw(st.lists(st.sampled_from(fields.known(int(driver))), min_size=1, max_size=12))
    host = Host(tmp_path_factory.mktemp("host"), FakeCards(tuple(kinds)), FakeDriver.parse(driver))
    query = "--query-gpu=" + ",".join([*(name for name in names if name != "timestamp"), "index"])
    count = query.count(",") + 1
    with_units = host.out(query, "--format=csv").splitlines()
    without = host.out(query, "--format=csv,noheader,nounits").splitlines()
    assert host.out(query, "--format=csv,noheader").splitlines() == with_units[1:]
    assert len(with_units) == len(kinds) + 1
    heads = with_units[0].split(", ")
    assert len(heads) == count
    for shown, bare in zip(with_units[1:], without, strict=True):
        assert len(shown.split(", ")) == len(bare.split(", ")) == count
        for head, long, short in zip(heads, shown.split(", "), bare.split(", "), strict=True):
            unit = re.search(r"\[(.+)\]", head)
            assert long == (f"{short} {unit.group(1)}" if unit and short != "[N/A]" else short)
    assert [row.split(", ")[-1] for row in without] == [str(index) for index in range(len(kinds))]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.from_regex(r"[a-z_.]{1,30}", fullmatch=True))
def test_a_field_that_no_driver_knows_is_refused_by_name(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    if name in fields.known(535):
        return
    host = Host(tmp_path_factory.mktemp("host"), FakeCards.parse("1xV100-PCIE-16GB"), FakeDriver.parse("535"))
    code, output = host.smi(f"--query-gpu=index,{name}", "--format=csv")
    assert (code, output.splitlines()[0]) == (2, f'Field "{name}" is not a valid field to query.')


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_probe_reads_it_with_old_drivers_too(driver: str, make_host: MakeHost) -> None:
    """The probe leaves out what an older driver refuses, as it does with the real program."""
    host = make_host("2xV100-PCIE-16GB", driver)
    asked: tuple[str, ...] = host_script.SMI_FIELDS
    while True:
        code, output = host.smi("--query-gpu=" + ",".join(asked), "--format=csv,noheader,nounits")
        if code == 0:
            break
        unknown = host_script.SMI_UNKNOWN_FIELD.findall(output)
        assert unknown
        asked = tuple(field for field in asked if field not in unknown)
    cards = host_script.parse_smi(output, asked)
    assert sorted(cards) == ["0000:3b:00.0", "0000:5e:00.0"]
    old = int(driver) < 510
    assert cards["0000:3b:00.0"]["memory_total_bytes"] == (16144 if old else 16384) << 20
    assert cards["0000:3b:00.0"]["compute_capability"] == ("" if old else "7.0")
    row = load_catalog().driver(driver)
    assert row is not None
    assert host_script.parse_cuda_version(host.out()) == row.cuda


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-such"],
        ["-q", "-d", "NOTHING"],
        ["--query-gpu=index"],
        ["--query-gpu=index", "--format=tsv"],
        ["topo"],
        ["-pm", "2"],
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_refused(arguments: list[str], make_host: MakeHost) -> None:
    assert make_host().smi(*arguments)[0] == 2


def test_one_section_of_the_log(make_host: MakeHost) -> None:
    host = make_host("1xV100-SXM2-16GB")
    power = host.out("-q", "-d", "POWER")
    assert "Min Power Limit" in power
    assert "Product Name" not in power
    clocks = host.out("-q", "-d", "SUPPORTED_CLOCKS")
    assert clocks.count("Graphics") == len(
        graphics_clocks(specification("h", FakeCards.parse("1xV100-SXM2-16GB"), FakeDriver())["cards"][0])
    )
    assert "Graphics" in clocks
    assert ": 1522 MHz" in clocks


# --- settings -----------------------------------------------------------------------------------------------------------------


def limits(host: Host) -> list[str]:
    return host.out("--query-gpu=power.limit", "--format=csv,noheader,nounits").split()


def test_a_power_limit_stays_only_with_persistence_mode(make_host: MakeHost) -> None:
    host = make_host("2xV100-SXM2-16GB")
    assert "persistence mode is disabled" in host.out("-pl", "200")
    assert limits(host) == ["300.00", "300.00"]
    assert host.out("-i", "1", "-pm", "1") == "Enabled persistence mode for GPU 00000000:07:00.0.\nAll done.\n"
    assert host.out("-i", "1", "-pl", "200") == (
        "Power limit for GPU 00000000:07:00.0 was set to 200.00 W from 300.00 W.\nAll done.\n"
    )
    assert limits(host) == ["300.00", "200.00"]
    code, output = host.smi("-pl", "100")
    assert code == 2
    assert "should be between 150.00 W and 300.00 W" in output
    host.out("-pm", "0")
    assert limits(host) == ["300.00", "300.00"]


def test_application_clocks(make_host: MakeHost) -> None:
    host = make_host("1xV100-PCIE-16GB")
    host.out("-pm", "1")
    assert host.smi("-ac", "877,1381")[0] == 2
    assert host.out("-ac", "877,1380").startswith('Applications clocks set to "(MEM 877, SM 1380)" for GPU 00000000:3B:00.0')
    query = ("--query-gpu=clocks.applications.graphics", "--format=csv,noheader,nounits")
    assert host.out(*query) == "1380\n"
    host.out("-rac")
    assert host.out(*query) == "1245\n"


def test_settings_are_for_root(make_host: MakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host = make_host()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    for arguments in (["-pm", "1"], ["-pl", "200"], ["-ac", "877,1380"], ["-e", "0"], ["-r"]):
        code, output = host.smi(*arguments)
        assert (code, "Insufficient Permissions" in output) == (4, True)


# --- what is wrong ------------------------------------------------------------------------------------------------------------


def test_without_a_driver(make_host: MakeHost) -> None:
    code, output = make_host(driver="none").smi()
    assert code == 9
    assert "couldn't communicate with the NVIDIA driver" in output


def test_open_modules_find_no_device(make_host: MakeHost) -> None:
    host = make_host(flavour="open")
    assert host.smi(PROBE_QUERY, "--format=csv") == (6, "No devices were found\n")
    assert any("GSP" in entry["message"] for entry in host.machine.load()["log"])


def test_a_branch_that_ignores_volta_finds_no_device(make_host: MakeHost) -> None:
    newer = [row for row in load_catalog().drivers if not row.drives_volta and row.first_version]
    assert newer
    host = make_host(driver=newer[0].first_version)
    assert host.smi() == (6, "No devices were found\n")


def test_a_library_of_another_version(make_host: MakeHost) -> None:
    host = make_host()
    folder = host.machine.root / "usr/lib/x86_64-linux-gnu"
    folder.mkdir(parents=True)
    (folder / "libnvidia-ml.so.535.400.01").touch()
    (folder / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.535.400.01")
    code, output = host.smi()
    assert code == 18
    assert host_script.SMI_MISMATCH in output


def test_a_card_that_is_gone_ends_the_call_but_not_one_for_another_card(make_host: MakeHost) -> None:
    host = make_host()
    faults.inject(host.machine, "fallen-off", 1, False)
    assert host.smi() == (255, "Unable to determine the device handle for GPU0000:5E:00.0: Unknown Error\n")
    assert host.out("-i", "0", "-L").count("GPU ") == 1


def test_a_card_without_an_address_is_not_listed(make_host: MakeHost) -> None:
    host = make_host()
    with host.machine.change() as state:
        state["cards"][0]["faults"]["bar1-zero"] = True
    assert host.out("-L").startswith("GPU 1: ")


def test_faults_are_told_alike_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(FAULTS) == {*faults.ALL, *faults.OF_CARDS}
    assert set(faults.OF_CARDS) == CARD_FAULTS
    assert run(["lab", "fault", "--help"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in FAULTS if not re.search(rf"^ +{name}  ", shown, re.M)] == []


@pytest.mark.parametrize("name", ["up", "list", "ssh", "fault", "down"])
def test_help_is_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lab", name, "--help"]) == 0
    assert "Usage: v100ctl lab" in capsys.readouterr().out


def test_names_and_a_number_of_hosts_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lab", "up", "h1", "--hosts", "2"]) == 64


# --- what the machine shows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_bus_as_the_probe_reads_it(kind: str, make_host: MakeHost) -> None:
    host = make_host(FakeCards((kind,) * 8))
    host.machine.show()
    bus = host.machine.run / "pci"
    gpus = host_script.ask_gpus(host_script.collect_gpus(str(bus)), str(bus))
    row = next(row for row in ROWS if row.pci_id == kind)
    assert len(gpus) == 8
    for gpu in gpus:
        assert (gpu["pci_id"], gpu["pci_class"], gpu["kernel_driver"]) == (kind, "0302", "nvidia")
        assert gpu["bar1_bytes"] == row.memory_total_bytes
        assert (gpu["link_width"], gpu["link_speed_gts"], gpu["revision_ff"]) == (16, 8.0, False)
    assert len({gpu["pci_address"] for gpu in gpus}) == 8
    version = (host.machine.run / "proc-driver/nvidia/version").read_text(encoding="utf-8")
    assert host_script.parse_driver_version(version) == {"module_version": "535.309.01", "module_flavour": "proprietary"}


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("fallen-off", {"revision_ff": True, "link_width": None, "link_speed_gts": None}),
        ("link-degraded", {"link_width": 8, "link_speed_gts": 2.5}),
        ("bar1-zero", {"bar1_bytes": 0, "kernel_driver": ""}),
    ],
)
def test_a_broken_card_on_the_bus(name: str, seen: dict[str, object], make_host: MakeHost) -> None:
    host = make_host()
    with host.machine.change() as state:
        state["cards"][0]["faults"][name] = True
    host.machine.show()
    bus = host.machine.run / "pci"
    broken, well = host_script.ask_gpus(host_script.collect_gpus(str(bus)), str(bus))
    assert {key: broken[key] for key in seen} == seen
    assert well["kernel_driver"] == "nvidia"


def test_the_kernel_log_has_records_that_a_reader_of_kmsg_takes(make_host: MakeHost) -> None:
    host = make_host()
    faults.inject(host.machine, "fallen-off", 0, False)
    records = (host.machine.root / "dev/kmsg").read_text(encoding="utf-8").splitlines()
    numbers = []
    for record in records:
        found = re.fullmatch(r"([0-7]),(\d+),(\d+),-;(.+)", record)
        assert found, record
        numbers.append(int(found.group(2)))
    assert numbers == list(range(len(records)))
    assert sum("NVRM: Xid (PCI:0000:3b:00): 79, " in record for record in records) == 1


def test_a_module_file_says_what_it_is() -> None:
    wanted = {"license": "NVIDIA", "version": "535.309.01", "vermagic": "6.1.0 SMP "}
    raw = module_file(wanted)
    assert raw[:4] == b"\x7fELF"
    assert module_fields(raw) == wanted


@pytest.mark.parametrize(
    ("installed", "module"),
    [
        ({"nvidia-kernel-dkms": "535.309.01-0+deb12u1"}, {"version": "535.309.01", "flavour": "proprietary"}),
        ({"nvidia-tesla-535-kernel-dkms": "535.274.02-1~deb13u1"}, {"version": "535.274.02", "flavour": "proprietary"}),
        ({"nvidia-dkms-580-server": "580.178.04-0ubuntu0.24.04.1"}, {"version": "580.178.04", "flavour": "proprietary"}),
        ({"nvidia-dkms-580-open": "580.178.04-0ubuntu1"}, {"version": "580.178.04", "flavour": "open"}),
        ({"nvidia-kernel-open-dkms": "580.159.04-1"}, {"version": "580.159.04", "flavour": "open"}),
        ({"nvidia-driver": "535.309.01-0+deb12u1", "nvidia-smi": "535.309.01-0+deb12u1"}, None),
        ({}, None),
    ],
)
def test_the_module_is_what_the_packages_build(installed: dict[str, str], module: dict[str, str] | None) -> None:
    assert packages.module(installed) == module


def test_a_process_may_play_that_it_holds_memory(make_host: MakeHost) -> None:
    host = make_host()
    first, second = (card["uuid"] for card in host.machine.load()["cards"])

    def process(pid: int, *environment: str) -> None:
        folder = host.machine.root / f"proc/{pid}"
        folder.mkdir(parents=True)
        (folder / "environ").write_text("\0".join(environment))
        (folder / "exe").symlink_to("/opt/engine")

    process(7, "FAKE_CUDA_MEMORY_MIB=13000", f"CUDA_VISIBLE_DEVICES={second}")
    process(8, "FAKE_CUDA_MEMORY_MIB=200", "CUDA_VISIBLE_DEVICES=0,1")
    process(9, "FAKE_CUDA_MEMORY_MIB=", "HOME=/")
    # What looks at the cards for a server that is about to start: the one that asks, and its parent with an odd name.
    asking = os.getpid()
    process(asking, "FAKE_CUDA_MEMORY_MIB=13000")
    (host.machine.root / f"proc/{asking}/stat").write_text(f"{asking} (nvidia-smi) S 6 1 1 0")
    process(6, "FAKE_CUDA_MEMORY_MIB=13000")
    (host.machine.root / "proc/6/stat").write_text("6 (a ) b) S 1 1 1 0")
    shown = host.out("--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory", "--format=csv,noheader,nounits")
    assert shown.splitlines() == [
        f"{first}, 8, /opt/engine, 200",
        f"{second}, 7, /opt/engine, 13000",
        f"{second}, 8, /opt/engine, 200",
    ]
    assert host.out("--query-gpu=memory.used", "--format=csv,noheader,nounits").split() == ["201", "13201"]
    code, output = host.smi("-r", "-i", "1")
    assert code != 0
    assert "In use by another client" in output
    # What runs now is no part of what the machine remembers.
    assert [card["processes"] for card in host.machine.load()["cards"]] == [[], []]
