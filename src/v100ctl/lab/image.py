"""The image that lab hosts boot from: a small Debian with systemd, sshd, sudo and Python; Debian 12 unless another is asked for.

Its tag holds a digest of the whole recipe, so a changed recipe is another image and an image is never half of one. The base is
``debian:12`` from a registry, or, where none answers within seconds, a system bootstrapped with ``mmdebstrap`` from the apt
sources that this machine uses itself. Where nobody asks for a release, the latter gives this machine's own: an Ubuntu mirror has
no Debian 12. Debian's mirrors hold its other releases beside it, so a Debian machine bootstraps each of :data:`DEBIAN_SUITES`;
their signatures are checked with the keys that this machine's apt trusts.
Either way the same packages go in and the same script finishes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.models.containers import Container
from docker.models.images import Image

from v100ctl.apply.reporter import Reporter
from v100ctl.errors import LabError
from v100ctl.lab import LABEL, lab_dir
from v100ctl.lab.containers import execute, put_file, remove_container
from v100ctl.lab.engine import engine_errors, explanation, install_packages, os_release
from v100ctl.locks import exclusive

REPOSITORY = "v100ctl/lab-host"
#: On the image and whatever is made on the way to it; the value is the recipe's digest.
IMAGE_LABEL = f"{LABEL}.image"
#: The account that tests and `v100ctl try` log in with; it may become root without a password.
ADMIN = "admin"
#: A file in the host whose keys open every account but root's.
AUTHORIZED_KEYS = "/etc/ssh/lab-authorized-keys"

#: The release of Debian that a lab host is made of where nobody asks for another.
DEFAULT_DEBIAN = "12"
_BASE = ("debian", DEFAULT_DEBIAN)
#: The releases of Debian that lab hosts are made of, and what its archive calls them.
DEBIAN_SUITES: Mapping[str, str] = {"11": "bullseye", "12": "bookworm", "13": "trixie"}
#: Components that a release has not, though later ones have them.
_NOT_YET: Mapping[str, frozenset[str]] = {"bullseye": frozenset({"non-free-firmware"})}
_PACKAGES = (
    "ca-certificates",
    "dbus",
    "iproute2",
    "openssh-server",
    "procps",
    "python3",
    "sudo",
    "systemd",
    "systemd-sysv",
)
#: Shell commands that make sshd let :data:`ADMIN` in, by the keys in :data:`AUTHORIZED_KEYS`.
SSHD_SETUP = """\
cat > /etc/ssh/sshd_config.d/10-lab.conf <<'EOF'
HostKey /etc/ssh/ssh_host_ed25519_key
AuthorizedKeysFile .ssh/authorized_keys AUTHORIZED_KEYS
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin no
UseDNS no
EOF
""".replace("AUTHORIZED_KEYS", AUTHORIZED_KEYS)
#: Shell commands that make the account.
ADMIN_SETUP = """\
useradd --create-home --shell /bin/bash ADMIN
# No password fits `*`, while `!` would have sshd refuse the account altogether.
usermod --password '*' ADMIN
mkdir -m 0755 -p /etc/sudoers.d
echo 'ADMIN ALL=(ALL:ALL) NOPASSWD: ALL' > /etc/sudoers.d/lab-admin
chmod 0440 /etc/sudoers.d/lab-admin
""".replace("ADMIN", ADMIN)
# Run by /bin/sh in a container of the base; what it does has to be right for any release that the base may be.
_SETUP = (
    r"""
set -eu

# Every host makes its own identity at its first boot. An *absent* machine-id would make systemd apply unit presets then.
: > /etc/machine-id
rm -f /var/lib/dbus/machine-id /etc/ssh/ssh_host_* /var/lib/systemd/random-seed
mkdir -p /etc/systemd/system/ssh.service.d
cat > /etc/systemd/system/ssh.service.d/lab-host-key.conf <<'EOF'
[Service]
ExecStartPre=
ExecStartPre=/bin/sh -c 'test -s /etc/ssh/ssh_host_ed25519_key || ssh-keygen -q -t ed25519 -N "" -f /etc/ssh/ssh_host_ed25519_key'
ExecStartPre=/usr/sbin/sshd -t
EOF
# Socket activation (Ubuntu's default) would start sshd only for the first guest, and its key with it.
systemctl disable ssh.socket 2>/dev/null || true
systemctl enable ssh.service

"""
    + SSHD_SETUP
    + r"""
# What belongs to hardware, consoles or the one kernel that all containers share; and apt's own timers, which would take its lock
# at a moment of their choosing.
systemctl mask \
    apt-daily.timer apt-daily-upgrade.timer console-getty.service dev-hugepages.mount dev-mqueue.mount e2scrub_all.timer \
    e2scrub_reap.service fstrim.timer getty-static.service getty.target motd-news.timer sys-fs-fuse-connections.mount \
    sys-kernel-config.mount sys-kernel-debug.mount sys-kernel-tracing.mount systemd-binfmt.service systemd-firstboot.service \
    systemd-logind.service systemd-modules-load.service systemd-pcrphase-sysinit.service systemd-pcrphase.service \
    systemd-pstore.service systemd-remount-fs.service systemd-udev-trigger.service systemd-udevd-control.socket \
    systemd-udevd-kernel.socket systemd-udevd.service
systemctl set-default multi-user.target

"""
    + ADMIN_SETUP
    + r"""
# The network settings of the machine that made the image; a host gets its own when it is started.
rm -f /etc/apt/apt.conf.d/99mmdebstrap
apt-get clean
rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log /var/log/alternatives.log /tmp/*
"""
)

_INSTALL = """
set -eu
printf 'APT::Install-Recommends "false";\n' > /etc/apt/apt.conf.d/90no-recommends
apt-get update
apt-get install --yes "$@"
rm -f /etc/apt/apt.conf.d/90no-recommends
"""

_BUILD_APT_SETTINGS = "/.v100ctl-lab-apt.conf"
_FIRST_ANSWER_TIMEOUT_S = 10.0
_STALL_TIMEOUT_S = 60.0
_MMDEBSTRAP_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what is in the image."""

    packages: tuple[str, ...] = _PACKAGES
    install: str = _INSTALL
    setup: str = _SETUP

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that change with the recipe, and with the machine's architecture."""
        text = json.dumps([self.packages, self.install, self.setup, platform.machine()])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def tag(self, distribution: str, version: str) -> str:
        """The full name of this recipe's image made of a distribution's release."""
        return f"{REPOSITORY}:{distribution}-{version}-{self.digest}"


def ensure_image(
    client: docker.DockerClient, reporter: Reporter, *, debian: str | None = None, recipe: Recipe | None = None
) -> Image:
    """The lab host image, made first where it is not there yet.

    Two programs that need it at once make it once. Until it is whole it has no name, so one that was interrupted is made anew.

    Args:
        client: An engine that answers.
        reporter: Is told what takes long.
        debian: Insists on a release of :data:`DEBIAN_SUITES`. Else it is Debian 12, or what this machine's mirror gives.
        recipe: What goes in; the lab's own when not given.

    Raises:
        LabError: Neither a registry nor this machine's own package mirror gave a base system, or packages could not be installed.
    """
    if debian is not None and debian not in DEBIAN_SUITES:
        raise LabError(f"lab hosts cannot be made of Debian {debian}", hint=f"one of {', '.join(sorted(DEBIAN_SUITES))}")
    recipe = recipe or Recipe()
    found = _find(client, recipe, debian)
    if found is not None:
        return found
    with exclusive(
        lab_dir() / "image.lock", lambda: reporter.note("another v100ctl is making the lab host image; waiting for it")
    ):
        found = _find(client, recipe, debian)
        if found is not None:
            return found
        _remove_unfinished(client)
        with reporter.phase("making the lab host image"), engine_errors("make the lab host image"):
            try:
                return _make(client, reporter, recipe, debian)
            except BaseException:
                _remove_unfinished(client)
                raise


def remove_images(client: docker.DockerClient) -> list[str]:
    """Removes every image of the lab and whatever was left on the way to one.

    Returns:
        The names of images that stay because a container, which is not the lab's to remove, uses them.
    """
    _remove_unfinished(client)
    kept = []
    for image in client.images.list(filters={"label": IMAGE_LABEL}):
        try:
            client.images.remove(image.id or "", force=False)
        except ImageNotFound:
            continue
        except APIError as error:
            if error.status_code != requests.codes.conflict:
                raise
            # Several names, or in use: names first, so that only what is in use is left.
            for tag in image.tags:
                try:
                    client.images.remove(tag)
                except ImageNotFound:
                    continue
                except APIError:
                    kept.append(tag)
    return kept


# --- finding ----------------------------------------------------------------------------------------------------------


def own_release() -> tuple[str, str, str]:
    """This machine's distribution, version and suite as ``os-release`` has them; empty texts where it does not say."""
    release = os_release()
    return release.get("ID", ""), release.get("VERSION_ID", ""), release.get("VERSION_CODENAME", "")


def _find(client: docker.DockerClient, recipe: Recipe, debian: str | None) -> Image | None:
    distribution, version, _ = own_release()
    tags = [recipe.tag(*_BASE), recipe.tag(distribution or "linux", version or "0")]
    for tag in dict.fromkeys(tags if debian is None else [recipe.tag("debian", debian)]):
        try:
            return client.images.get(tag)
        except ImageNotFound:
            continue
    return None


def _working_name() -> str:
    """The container that the image is made in; one for each lab folder, as the lock is."""
    return f"v100ctl-image-{hashlib.sha256(str(lab_dir()).encode()).hexdigest()[:8]}"


def _remove_unfinished(client: docker.DockerClient) -> None:
    """Containers and nameless images that an interrupted run left. The caller holds the lock, or removes everything anyway."""
    # By name: a container inherits the labels of its image, so the label is on all that anybody ever made of it.
    with suppress(NotFound):
        remove_container(client.containers.get(_working_name()))
    for image in client.images.list(filters={"label": IMAGE_LABEL, "dangling": True}):
        try:
            client.images.remove(image.id or "")
        except APIError:
            # Gone, or in use by a host whose tag has moved on: it is removed with that host.
            continue


# --- making -----------------------------------------------------------------------------------------------------------


def _make(client: docker.DockerClient, reporter: Reporter, recipe: Recipe, debian: str | None) -> Image:
    wanted = _BASE if debian is None else ("debian", debian)
    base = registry_base(client, reporter, *wanted)
    if base is not None:
        with _container(client, recipe, base) as container:
            _run(
                container,
                ["/bin/sh", "-c", recipe.install, "install", *recipe.packages],
                "install packages",
                apt_text=apt_settings(),
            )
            return _finish(client, container, recipe, *wanted)
    distribution, version, suite = own_release()
    if debian is not None:
        if distribution != "debian":
            raise LabError(
                f"no registry gives debian:{debian}, and the package mirror of this machine is for {distribution} {version}",
                hint=f"make `docker pull debian:{debian}` work, or leave the release open",
            )
        version, suite = debian, DEBIAN_SUITES[debian]
    elif (distribution, suite) != ("debian", "bookworm"):
        reporter.note(f"lab hosts are made of {distribution} {suite}, this machine's own release, whose mirror it knows")
    base = bootstrap(client, reporter, recipe.packages, distribution, suite, labels={IMAGE_LABEL: recipe.digest})
    with _container(client, recipe, base) as container:
        return _finish(client, container, recipe, distribution, version)


@contextmanager
def _container(client: docker.DockerClient, recipe: Recipe, base: str) -> Iterator[Container]:
    """A container of ``base`` that waits for commands; removed afterwards."""
    container = client.containers.run(
        base,
        ["sleep", "infinity"],
        name=_working_name(),
        detach=True,
        labels={IMAGE_LABEL: recipe.digest},
        stop_signal="SIGKILL",
    )
    try:
        yield container
    finally:
        remove_container(container)


def _run(container: Container, command: Sequence[str], what: str, *, apt_text: str = "") -> None:
    """Runs one step of the recipe.

    The proxy is given to this command rather than to the container, whose environment would become the image's.
    """
    environment = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8", **reachable_proxies(os.environ)}
    if apt_text:
        put_file(container, _BUILD_APT_SETTINGS, apt_text.encode(), mode=0o600)
        environment["APT_CONFIG"] = _BUILD_APT_SETTINGS
    code, output = execute(container, command, environment=environment)
    if apt_text:
        execute(container, ["rm", "-f", _BUILD_APT_SETTINGS])
    if code != 0:
        lines = [line for line in output.splitlines() if line.strip()]
        complaints = [line for line in lines if line.startswith("E: ")] or lines[-3:]
        raise LabError(
            f"the lab host image could not be made: the step to {what} failed: {'; '.join(complaints[:3])}",
            hint="check that this machine's containers reach the package mirror, then run this again",
        )


def _finish(client: docker.DockerClient, container: Container, recipe: Recipe, distribution: str, version: str) -> Image:
    _run(container, ["/bin/sh", "-c", recipe.setup], "set the system up")
    changes = ['CMD ["/sbin/init"]', "ENV container=docker", f"LABEL {IMAGE_LABEL}={recipe.digest}"]
    image = container.commit(changes=changes)
    repository, _, tag = recipe.tag(distribution, version).rpartition(":")
    # The name comes last: what has it is whole.
    image.tag(repository, tag)
    return client.images.get(f"{repository}:{tag}")


def registry_base(client: docker.DockerClient, reporter: Reporter, distribution: str, version: str) -> str | None:
    """``debian:12`` and the like, local or pulled; ``None`` when no registry answers in time."""
    name = f"{distribution}:{version}"
    try:
        client.images.get(name)
        return name
    except ImageNotFound:
        pass
    try:
        for event in _bounded(lambda: client.api.pull(distribution, version, stream=True, decode=True)):
            if "error" in event:
                raise DockerException(str(event["error"]))
            detail = event.get("progressDetail") or {}
            if "current" in detail and event.get("status") == "Downloading":
                reporter.host_progress(
                    "", f"downloading {name}", int(detail["current"]), int(detail.get("total") or 0) or None, "bytes"
                )
        client.images.get(name)
        return name
    except (DockerException, requests.RequestException, TimeoutError) as error:
        reporter.note(f"no registry gives {name} ({explanation(error)}); bootstrapping it from this machine's package mirror")
        return None


def _bounded(request: Callable[[], Iterator[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """The events that a request brings, as long as they keep coming.

    The engine may try an address that never answers for minutes, and its client library has no time limit for this call.

    Raises:
        TimeoutError: Nothing came for too long. The engine then goes on by itself; nothing waits for it.
    """
    items: queue.SimpleQueue[dict[str, Any] | BaseException | None] = queue.SimpleQueue()

    def read() -> None:
        try:
            for event in request():
                items.put(event)
            items.put(None)
        except BaseException as error:
            items.put(error)

    threading.Thread(target=read, daemon=True).start()
    timeout_s = _FIRST_ANSWER_TIMEOUT_S
    while True:
        try:
            item = items.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no answer for {timeout_s:.0f} s") from None
        if item is None:
            return
        if isinstance(item, BaseException):
            raise item
        timeout_s = _STALL_TIMEOUT_S
        yield item


def bootstrap(
    client: docker.DockerClient,
    reporter: Reporter,
    packages: Sequence[str],
    distribution: str,
    suite: str,
    *,
    labels: Mapping[str, str],
) -> str:
    """A base system with these packages, made of this machine's own apt sources. Returns the nameless image's id.

    Raises:
        LabError: This machine cannot make one, or its package mirror does not answer.
    """
    if distribution not in {"debian", "ubuntu"} or not suite:
        raise LabError(
            "no registry gives an image, and only Debian and Ubuntu machines can bootstrap a system from their own mirror",
            hint="make a registry reachable (`docker pull debian:12` has to work), or load the image with `docker load`",
        )
    if shutil.which("mmdebstrap") is None:
        if os.geteuid() != 0:
            raise LabError(
                "no registry gives an image, and mmdebstrap, which makes one without it, is not installed",
                hint="run `sudo apt-get install -y mmdebstrap`, or run this as root",
            )
        install_packages(reporter, ["mmdebstrap"], purpose="a container image")
    sources = apt_sources(distribution, suite)
    log_path = lab_dir() / "mmdebstrap.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="v100ctl-image-") as folder:
        # Options and sources go through files: a proxy or mirror may have a password in its URL.
        options_file, sources_file = Path(folder) / "apt.conf", Path(folder) / "sources.list"
        options_file.write_text(apt_settings(), encoding="utf-8")
        sources_file.write_text("".join(f"{line}\n" for line in sources), encoding="utf-8")
        command = [
            "mmdebstrap",
            "--variant=minbase",
            f"--include={','.join(packages)}",
            f"--aptopt={options_file}",
            "--format=tar",
            suite,
            "-",
            str(sources_file),
        ]
        with (
            log_path.open("wb") as log,
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            ) as process,
        ):
            # Its children hold the pipe as well, so the limit ends the whole session.
            timer = threading.Timer(_MMDEBSTRAP_TIMEOUT_S, _end_session, [process.pid])
            timer.start()
            try:
                changes = [f"LABEL {name}={value}" for name, value in labels.items()]
                answer = client.api.import_image_from_stream(process.stdout, changes=changes)
                code = process.wait()
            except BaseException:
                _end_session(process.pid)
                raise
            finally:
                timer.cancel()
    if code != 0:
        reason = _mmdebstrap_complaint(log_path)
        raise LabError(
            f"mmdebstrap could not make a {distribution} {suite} system from this machine's package mirror: {reason}",
            hint=f"check that `apt-get update` works here; the whole output is in {log_path}",
        )
    events = [json.loads(line) for line in str(answer).splitlines() if line.strip()]
    identity = next(
        (str(event["status"]) for event in reversed(events) if str(event.get("status", "")).startswith("sha256:")), None
    )
    if identity is None:
        raise LabError(f"Docker Engine did not take the bootstrapped system: {answer}", hint="see the engine's log")
    return identity


def _end_session(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGTERM)
    except ProcessLookupError:
        return


def _mmdebstrap_complaint(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    complaints = [line for line in lines if line.startswith(("E: ", "dpkg: error"))]
    return "; ".join(complaints[:3]) or (lines[-1] if lines else "it said nothing")


# --- apt's view of the network ----------------------------------------------------------------------------------------


def apt_sources(distribution: str, suite: str) -> list[str]:
    """The distribution's own sources as this machine has them configured, in apt's one-line form.

    For another release of Debian than those that are configured, they are this machine's own with that release's names.
    """
    fields = "$(SITE)|$(REPO_URI)|$(RELEASE)|$(CODENAME)|$(COMPONENT)|$(ORIGIN)"
    result = subprocess.run(
        ["apt-get", "indextargets", "--format", fields, "Created-By: Packages"], capture_output=True, text=True, check=False
    )
    own_distribution, _, own_suite = own_release()
    derive = own_distribution == distribution == "debian" and own_suite != suite
    return parse_sources(result.stdout, distribution, suite, derive_from=own_suite if derive else "")


def parse_sources(text: str, distribution: str, suite: str, *, derive_from: str = "") -> list[str]:
    """The lines of ``apt-get indextargets`` that are the distribution's release, its updates or its security updates.

    Args:
        text: One source a line: site, URI, release, code name, component and origin, separated by ``|``.
        distribution: ``debian`` or ``ubuntu``; sources of another origin are somebody else's packages.
        suite: The release's code name.
        derive_from: The code name of a release whose places hold the other one too, if that is not among them.

    Raises:
        LabError: The release itself is not among them.
    """
    found = _release_lines(text, distribution, suite)
    if not found and derive_from:
        lacks = _NOT_YET.get(suite, frozenset())
        found = [
            (uri, f"{suite}{name.removeprefix(derive_from)}", name, component)
            for uri, _, name, component in _release_lines(text, distribution, derive_from)
            if component not in lacks
        ]
    if not found:
        raise LabError(
            f"this machine's apt does not know {distribution} {suite}", hint="run `sudo apt-get update`, then run this again"
        )
    return list(dict.fromkeys(f"deb {uri} {release} {component}" for uri, release, _, component in found))


def _release_lines(text: str, distribution: str, suite: str) -> list[tuple[str, str, str, str]]:
    """Place, release as it is named there, its code name and component of each source; none where the release itself lacks."""
    wanted = {suite, f"{suite}-updates", f"{suite}-security"}
    lines: list[tuple[str, str, str, str]] = []
    for line in text.splitlines():
        parts = line.strip().split("|")
        if len(parts) != 6:
            continue
        _, uri, release, codename, component, origin = parts
        # Debian's Release files give `bookworm-security` as the code name, Ubuntu's `jammy` for all: what was asked for decides.
        name = release if release in wanted else codename
        if origin.lower() == distribution and name in wanted and re.match(r"https?://|file:/|mirror", uri):
            lines.append((uri, release, name, component))
    return lines if any(name == suite for _, _, name, _ in lines) else []


# What apt has to know to reach the same mirrors from elsewhere. What it may trust stays each system's own affair.
_NETWORK_OPTION = re.compile(
    r"Acquire::(?:https?|ftp|Retries|ForceIPv[46]|Check-Date|Check-Valid-Until|Max-FutureTime)\b.*", re.IGNORECASE
)


def apt_settings(dump: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    """This machine's apt settings for reaching its mirrors (proxies, retries, time checks), as the text of an ``apt.conf`` file.

    Args:
        dump: The output of ``apt-config dump``; asked for when not given, empty on machines without apt.
        environment: Where proxy variables are looked up; the process's own when not given.
    """
    if dump is None:
        program = shutil.which("apt-config")
        dump = subprocess.run([program, "dump"], capture_output=True, text=True, check=False).stdout if program else ""
    lines = []
    for line in dump.splitlines():
        match = re.fullmatch(r'(\S+) "(.*)";', line)
        if match and match[2] and _NETWORK_OPTION.fullmatch(match[1]) and not _is_local_only(match[1], match[2]):
            lines.append(line)
    proxies = reachable_proxies(os.environ if environment is None else environment)
    for scheme in ("http", "https"):
        proxy = proxies.get(f"{scheme}_proxy")
        if proxy and '"' not in proxy and "\n" not in proxy:
            lines.append(f'Acquire::{scheme}::Proxy "{proxy}";')
    return "".join(f"{line}\n" for line in lines)


_LOOPBACK = re.compile(r"(?:[a-z0-9+]+://)?(?:[^@/]*@)?(?:localhost|127\.[0-9.]+|\[::1\])(?:[:/]|$)", re.IGNORECASE)


def _is_local_only(option: str, value: str) -> bool:
    """Whether a setting makes sense on this machine only: an address, program or certificate file of its own."""
    lowered = option.lower()
    return bool(_LOOPBACK.match(value)) or "proxy-auto" in lowered or "proxyautodetect" in lowered or value.startswith("/")


def reachable_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """The proxy variables that also hold inside a container: set, and not an address that means "this machine"."""
    found: dict[str, str] = {}
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        value = environment.get(name) or environment.get(name.upper()) or ""
        if value and not _LOOPBACK.match(value):
            found[name] = value
    return found
