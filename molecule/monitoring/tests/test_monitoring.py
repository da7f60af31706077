"""After the role."""

import re

from testinfra.host import Host

TEXTFILE = "/var/lib/prometheus/node-exporter/v100ctl.prom"
FETCH = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:9100/metrics', timeout=30).read().decode())"


def read(text: str) -> dict[str, float]:
    """Prometheus' text, by series; labels in the order of their names, as the exporter has them."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name, _, labels = series.partition("{")
            sorted_labels = ",".join(sorted(re.findall(r'\w+="[^"]*"', labels)))
            found[f"{name}{{{sorted_labels}}}" if labels else name] = float(value)
    return found


def test_the_timer_runs_and_comes_back_after_a_reboot(host: Host) -> None:
    timer = host.service("v100ctl-metrics.timer")
    assert timer.is_running
    assert timer.is_enabled
    assert host.check_output("systemctl show --value --property Result v100ctl-metrics.service") == "success"


def test_the_units_are_sound(host: Host) -> None:
    assert host.run("systemd-analyze verify v100ctl-metrics.service v100ctl-metrics.timer").stderr == ""


def test_nobody_but_root_writes_the_file_and_the_exporter_reads_it(host: Host) -> None:
    file = host.file(TEXTFILE)
    assert (file.user, file.mode) == ("root", 0o644)
    assert host.run(f"runuser -u prometheus -- cat {TEXTFILE}").rc == 0
    # What is written aside is gone.
    assert [name for name in host.file("/var/lib/prometheus/node-exporter").listdir() if name.startswith(".")] == []


def test_the_exporter_serves_it_where_it_was_told(host: Host) -> None:
    assert host.service("prometheus-node-exporter").is_enabled
    assert not host.socket("tcp://:::9100").is_listening
    assert not host.socket("tcp://0.0.0.0:9100").is_listening
    found = read(host.check_output("python3 -c %s", FETCH))
    assert found["node_textfile_scrape_error"] == 0
    assert found[f'node_textfile_mtime_seconds{{file="{TEXTFILE}"}}'] > 0
    served = {name for name in found if name.startswith("v100ctl_")}
    assert served == set(read(host.file(TEXTFILE).content_string))


def test_what_it_says_of_the_cards_is_what_the_driver_says(host: Host) -> None:
    found = read(host.file(TEXTFILE).content_string)
    uuids = host.check_output("nvidia-smi --query-gpu=uuid --format=csv,noheader").split()
    for name in ("temperature_celsius", "memory_temperature_celsius", "link_width_lanes", "persistence_enabled"):
        series = [series for series in found if series.startswith(f"v100ctl_gpu_{name}{{")]
        assert sorted(re.findall(r'uuid="([^"]+)"', " ".join(series))) == sorted(uuids), name
    assert found["v100ctl_cards_present"] == 2
    assert found["v100ctl_driver_mismatch"] == 0
    assert found['v100ctl_nvidia_smi_status{status="ok"}'] == 1
    assert found["v100ctl_kernel_log_readable"] == 1
    assert found["v100ctl_metrics_probe_errors"] == 0
    assert not [series for series in found if series.startswith("v100ctl_gpu_xids")]


def test_no_dcgm_without_nvidias_repository(host: Host) -> None:
    assert not host.file("/etc/systemd/system/nvidia-dcgm-exporter.service.d").exists
