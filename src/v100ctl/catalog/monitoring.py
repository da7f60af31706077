"""Rows about what exports a host's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from v100ctl.catalog.rows import Row


class NodeExporter(Row):
    """The distribution's node exporter, and where it looks for files of others."""

    package: str
    unit: str
    program: str
    defaults_file: str
    textfile_directory: str
    listen_option: str
    port: int
    source: str


class DcgmExporter(Row):
    """NVIDIA's exporter, and the fields that a V100 has: type and help of each."""

    packages: tuple[str, ...]
    unit: str
    program: str
    listen_option: str
    fields_option: str
    port: int
    source: str
    fields: Mapping[str, tuple[Literal["gauge", "counter"], str]]
    fields_source: str


class EngineMetrics(Row):
    """Where an engine tells its metrics, and the names of some of them."""

    path: str
    running: str
    waiting: str
    prompt_tokens: str
    generated_tokens: str
    source: str


class Monitoring(Row):
    """Everything about exporters."""

    node_exporter: NodeExporter
    dcgm: DcgmExporter
    #: By engine.
    engines: Mapping[str, EngineMetrics]
