"""What tells the state of a host to Prometheus: a timer that writes metrics, and exporters that serve them.

The timer's program asks the probe that the controller uses, on the host itself. Whoever brings an exporter of his own names the
folder that it reads.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterator, Mapping
from importlib import resources
from typing import Any

from v100ctl.catalog import Catalog, Distribution
from v100ctl.facts import Facts
from v100ctl.fleet import HostConfig, InstanceSpec
from v100ctl.plan.adoption import ANYWHERE
from v100ctl.plan.driver_actions import NVIDIA_SOURCES
from v100ctl.plan.gateway import address_of, engine_port
from v100ctl.plan.render import MANAGED_HEADER, render
from v100ctl.plan.types import CudaDecision, DriverDecision, Exporter, ManagedFile, MonitoringDecision, Rule

ROLE = "monitoring"
FOLDER = "/opt/v100ctl/monitoring"
PROGRAM = f"{FOLDER}/write_metrics.py"
#: The program looks for it beside itself.
PROBE = f"{FOLDER}/probe.py"
SETTINGS = "/etc/v100ctl/monitoring.json"
DCGM_FIELDS = "/etc/v100ctl/dcgm_fields.csv"
UNITS_DIR = "/etc/systemd/system"
SERVICE = "v100ctl-metrics.service"
TIMER = "v100ctl-metrics.timer"
TEXTFILE_NAME = "v100ctl.prom"
#: What an exporter's unit has of ours.
_DROP_IN = "v100ctl.conf"


def drop_in(unit: str) -> str:
    """The path of our addition to an exporter's unit."""
    return f"{UNITS_DIR}/{unit}.d/{_DROP_IN}"


#: Every file that monitoring may need, for the probe to look at. The exporters' units are those of the catalog.
FILES = (
    SETTINGS,
    DCGM_FIELDS,
    PROGRAM,
    PROBE,
    f"{UNITS_DIR}/{SERVICE}",
    f"{UNITS_DIR}/{TIMER}",
    drop_in("prometheus-node-exporter.service"),
    drop_in("nvidia-dcgm-exporter.service"),
)


@functools.cache
def _program(name: str) -> str:
    return f"# {MANAGED_HEADER}\n" + resources.files("v100ctl").joinpath(name).read_text(encoding="utf-8")


def textfile_directory(config: HostConfig, catalog: Catalog) -> str:
    """Where the node exporter looks for files of others."""
    return config.monitoring_textfile_directory or catalog.monitoring.node_exporter.textfile_directory


def knows_nvidia_repository(
    facts: Facts, driver: DriverDecision | None, cuda: CudaDecision | None, config: HostConfig, catalog: Catalog
) -> bool:
    """Whether packages of NVIDIA's repository can be installed once driver and toolkit are as planned."""
    planned = [file.path for decision in (driver, cuda) if decision is not None for file in decision.files]
    urls = (catalog.nvidia_repository.url, config.nvidia_driver_repository_url or catalog.nvidia_repository.url)
    return NVIDIA_SOURCES in planned or any(source.uri.startswith(urls) for source in facts.apt_sources)


def decide_monitoring(
    config: HostConfig,
    facts: Facts,
    driver: DriverDecision | None,
    cuda: CudaDecision | None,
    catalog: Catalog,
) -> tuple[MonitoringDecision | None, tuple[ManagedFile, ...]]:
    """What monitors a host, and the files of that.

    Args:
        config: What the inventory asks for.
        facts: What the probe found.
        driver: What was decided of the driver.
        cuda: What was decided of the toolkit.
        catalog: What is known.
    """
    if not config.monitoring_enabled:
        left = _left_over(facts, ())
        units, paths = left["absent_units"], left["absent_files"]
        textfile = f"{textfile_directory(config, catalog)}/{TEXTFILE_NAME}"
        return (MonitoringDecision("absent", absent_units=units, absent_files=(*paths, textfile)) if paths else None), ()
    textfile = f"{textfile_directory(config, catalog)}/{TEXTFILE_NAME}"
    document = {
        "comment": MANAGED_HEADER,
        "schema": "v100ctl/monitoring/1",
        "output": textfile,
        "interval_s": config.monitoring_interval_s,
        "card_ids": sorted(row.pci_id for row in catalog.gpus),
    }
    values: dict[str, Any] = {
        "program": PROGRAM,
        "directory": textfile_directory(config, catalog),
        "interval_s": config.monitoring_interval_s,
    }
    files = [
        ManagedFile(PROBE, _program("probe/host_script.py"), ROLE),
        ManagedFile(PROGRAM, _program("monitoring/host_script.py"), ROLE, mode="0755"),
        ManagedFile(SETTINGS, json.dumps(document, indent=2, sort_keys=True) + "\n", ROLE),
        ManagedFile(f"{UNITS_DIR}/{SERVICE}", render("systemd/metrics.service.j2", **values), ROLE),
        ManagedFile(f"{UNITS_DIR}/{TIMER}", render("systemd/metrics.timer.j2", **values), ROLE),
    ]
    exporters: list[Exporter] = []
    packages: list[str] = []
    if config.monitoring_node_exporter == "distribution":
        row = catalog.monitoring.node_exporter
        listen = address_of(config.monitoring_listen, config.monitoring_port)
        exporters.append(_exporter(config, row.unit, config.monitoring_port, (f"{row.listen_option}={listen}",)))
        files.append(_drop_in(exporters[-1], "node_exporter", row.program, defaults_file=row.defaults_file))
        packages.append(row.package)
    if config.monitoring_dcgm and driver is not None and knows_nvidia_repository(facts, driver, cuda, config, catalog):
        theirs = catalog.monitoring.dcgm
        listen = address_of(config.monitoring_listen, config.monitoring_dcgm_port)
        words = (theirs.fields_option, DCGM_FIELDS, theirs.listen_option, listen)
        exporters.append(_exporter(config, theirs.unit, config.monitoring_dcgm_port, words))
        lines = [f"# {MANAGED_HEADER}", *(f"{name}, {kind}, {text}." for name, (kind, text) in theirs.fields.items())]
        files += [
            ManagedFile(DCGM_FIELDS, "\n".join(lines) + "\n", ROLE),
            _drop_in(exporters[-1], "dcgm_exporter", theirs.program),
        ]
        packages += theirs.packages
    decided = MonitoringDecision(
        state="started",
        textfile=textfile,
        service=SERVICE,
        units=(TIMER, *(exporter.unit for exporter in exporters)),
        exporters=tuple(exporters),
        packages=tuple(packages),
        missing_packages=tuple(name for name in packages if name not in facts.packages.installed),
        **_left_over(facts, [file.path for file in files]),
    )
    return decided, tuple(files)


def _exporter(config: HostConfig, unit: str, port: int, arguments: tuple[str, ...]) -> Exporter:
    # Where an exporter listens everywhere, the role asks it on loopback.
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.monitoring_listen, config.monitoring_listen)  # noqa: S104 - not bound
    return Exporter(unit, arguments, f"http://{address_of(local, port)}/metrics")


def _drop_in(exporter: Exporter, template: str, program: str, **values: str) -> ManagedFile:
    content = render(f"systemd/{template}.conf.j2", program=program, arguments=exporter.arguments, **values)
    return ManagedFile(drop_in(exporter.unit), content, ROLE)


def _left_over(facts: Facts, planned: Collection[str]) -> dict[str, tuple[str, ...]]:
    """What an earlier plan has left, as fields of the decision.

    An exporter goes with what we have added to its unit: without that it would listen everywhere.
    """
    paths = [path for path in FILES if path not in planned and path in facts.files and facts.files[path].kind == "file"]
    units = [
        path.rpartition("/")[2] if not path.endswith(_DROP_IN) else path.split("/")[-2].removesuffix(".d")
        for path in paths
        if path.startswith(f"{UNITS_DIR}/")
    ]
    return {"absent_files": tuple(paths), "absent_units": tuple(units)}


def monitoring_rules(
    config: HostConfig,
    facts: Facts,
    driver: DriverDecision | None,
    cuda: CudaDecision | None,
    public: Mapping[str, InstanceSpec],
    distribution: Distribution | None,
    catalog: Catalog,
) -> Iterator[Rule]:
    """Rules about monitoring. ``public``: the instances as the inventory has them."""
    if not config.monitoring_enabled:
        return
    row = catalog.monitoring.node_exporter
    ports = {config.monitoring_port: row.unit} if config.monitoring_node_exporter == "distribution" else {}
    if distribution is not None and config.monitoring_node_exporter == "distribution" and "monitoring" in distribution.refused:
        yield Rule(
            "monitoring-unsupported",
            "refuse",
            f"{distribution.name}: {distribution.refused['monitoring']}",
            "`monitoring_node_exporter: none`, an exporter of your own, and its folder as `monitoring_textfile_directory`",
        )
    if config.monitoring_node_exporter == "none" and not config.monitoring_textfile_directory:
        yield Rule(
            "monitoring-directory-unknown",
            "refuse",
            "`monitoring_node_exporter: none`: nobody knows which folder your own node exporter reads",
            "`monitoring_textfile_directory`, its `--collector.textfile.directory`",
        )
    if config.monitoring_node_exporter == "distribution" and textfile_directory(config, catalog) != row.textfile_directory:
        yield Rule(
            "monitoring-directory-unread",
            "refuse",
            f"`monitoring_textfile_directory: {config.monitoring_textfile_directory}`: the distribution's exporter reads "
            f"{row.textfile_directory}",
            '`monitoring_textfile_directory: ""`, or `monitoring_node_exporter: none` and an exporter of your own',
        )
    if config.monitoring_dcgm and driver is not None:
        if knows_nvidia_repository(facts, driver, cuda, config, catalog):
            if config.monitoring_dcgm_port in ports:
                yield Rule(
                    "monitoring-port-twice",
                    "refuse",
                    f"both exporters are to listen on port {config.monitoring_port}",
                    "another `monitoring_dcgm_port`",
                )
            ports[config.monitoring_dcgm_port] = catalog.monitoring.dcgm.unit
        else:
            where = distribution.name if distribution else "the distribution"
            yield Rule(
                "monitoring-dcgm-no-repository",
                "warn",
                f"no DCGM exporter is installed: {where} has no package of it, and the host does not have NVIDIA's repository",
                "`nvidia_driver_source: nvidia_repository`, or `monitoring_dcgm: false`: the cards' state is told without it too",
            )
    taken = {spec.port: f"the instance {name}" for name, spec in public.items()}
    if config.gateway_placement == "host":
        taken |= {engine_port(spec.port): f"the engine of {name}" for name, spec in public.items()}
    for listener in facts.listeners:
        if listener.port in ports and listener.unit != ports[listener.port] and listener.port not in taken:
            taken[listener.port] = listener.unit or listener.command or "another program"
    for port, unit in sorted(ports.items()):
        if port in taken:
            variable = "monitoring_dcgm_port" if unit == catalog.monitoring.dcgm.unit else "monitoring_port"
            yield Rule(
                "monitoring-port-taken",
                "refuse",
                f"{unit} is to listen on port {port}, which {taken[port]} has",
                f"another `{variable}`"
                + (
                    ""
                    if variable == "monitoring_dcgm_port"
                    else ", or `monitoring_node_exporter: none` where that is your own exporter"
                ),
            )
    if ports and (config.monitoring_listen == "::1" or config.monitoring_listen.startswith("127.")):
        yield Rule(
            "monitoring-loopback",
            "info",
            f"the exporters listen on {config.monitoring_listen}, where a Prometheus on another host does not reach them",
            "`monitoring_listen` with an address of the network that Prometheus is in",
        )
    elif ports:
        yield Rule(
            "monitoring-open",
            "info",
            f"whoever reaches {config.monitoring_listen} can read what the exporters tell of this host"
            + (": every network that it is in" if config.monitoring_listen in ANYWHERE else ""),
            "the address of a network of yours alone, or a firewall",
        )
