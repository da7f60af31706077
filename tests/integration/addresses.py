"""Addresses that stay a lab host's own: Docker may give it another one when it is started anew."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from v100ctl.lab.containers import put_file

from .hosts import on_host

if TYPE_CHECKING:
    from v100ctl.lab.hosts import RunningHost

UNIT = """[Unit]
Before=ssh.service
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/sbin/ip address replace {address}/{prefix} dev eth0
[Install]
WantedBy=multi-user.target
"""


def keep_addresses(hosts: Sequence[RunningHost], folder: Path) -> list[RunningHost]:
    """The same hosts under one more address each, which is theirs after every boot. ``folder`` holds what SSH needs."""
    folder.mkdir(exist_ok=True)
    shutil.copy(hosts[0].key_path, folder / "id_ed25519")
    kept = []
    for number, host in enumerate(hosts, 1):
        network = host.address.split(".")[:2]
        # Docker gives out its own from the lower end of the same range; runs beside this one have other process ids.
        address = ".".join([*network, str(100 + os.getpid() % 100), str(number + os.getpid() // 100 % 20 * 10)])
        prefix = host.container.attrs["NetworkSettings"]["IPPrefixLen"]
        put_file(
            host.container,
            "/etc/systemd/system/kept-address.service",
            UNIT.format(address=address, prefix=prefix).encode(),
            mode=0o644,
        )
        on_host(host, "systemctl daemon-reload && systemctl enable --quiet --now kept-address.service")
        with (folder / "known_hosts").open("a", encoding="utf-8") as known:
            known.write(f"{host.name},{address} {host.host_key}\n")
        kept.append(dataclasses.replace(host, address=address, folder=folder))
    return kept
