"""``v100ctl audit``."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from v100ctl.cli.options import HostOptions, host_options, output_options, today, verbosity_option, write_output, write_table
from v100ctl.errors import UsageError

if TYPE_CHECKING:
    from v100ctl.audit import AuditReport
    from v100ctl.audit.fix import HostFix
    from v100ctl.audit.since import Since

FORMATS = ("table", "json", "junit", "html", "prometheus")
#: By a file's ending.
_ENDINGS: Mapping[str, str] = {
    ".json": "json",
    ".xml": "junit",
    ".html": "html",
    ".htm": "html",
    ".prom": "prometheus",
    ".txt": "table",
}


@dataclass(frozen=True)
class Rendered:
    """A report and what belongs to it, each written in one of the formats."""

    report: AuditReport
    now_s: float
    since: Since | None = None
    fixed: Mapping[str, HostFix] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The report with what was mended and what is new."""
        document = self.report.to_json()
        if self.since is not None:
            document["since"] = self.since.to_json()
        if self.fixed:
            document["fixed"] = {name: host.to_json() for name, host in self.fixed.items()}
        return document

    def write(self, name: str, output: Path | None, *, no_color: bool = False) -> None:
        """Write it as ``name`` says, to a file or to stdout."""
        from v100ctl.audit import formats

        if name == "json":
            write_output(formats.to_json(self.document()), output)
        elif name == "junit":
            write_output(formats.to_junit(self.report), output)
        elif name == "prometheus":
            write_output(formats.to_prometheus(self.report, now_s=self.now_s), output)
        elif name == "html":
            from v100ctl.audit.page import to_html

            write_output(to_html(self.report, now_s=self.now_s), output)
        else:
            self._table(output, no_color=no_color)

    def _table(self, output: Path | None, *, no_color: bool) -> None:
        from v100ctl.cli.show import console, print_audit

        out = console(no_color=no_color, output=output)
        with out.capture() as captured:
            print_audit(out, self.report, since=self.since, fixed=self.fixed)
        write_table(captured.get(), output)


def parse_output(text: str, default: str) -> tuple[str, Path]:
    """``FORMAT:PATH``, or a path whose ending tells the format."""
    name, separator, path = text.partition(":")
    if separator and name in FORMATS:
        if not path:
            raise UsageError(f"-o {text}: a path has to follow")
        return name, Path(path)
    return _ENDINGS.get(Path(text).suffix.lower(), default), Path(text)


@click.command("audit", short_help="Report where hosts differ from their plan.")
@host_options
@click.option("--deep", is_flag=True, help="Hash releases and models, and ask Ansible what it would change (`--check --diff`).")
@click.option("--speed", is_flag=True, help="Ask each model a question and compare its tokens/s with when it was proved.")
@click.option("--fix", is_flag=True, help="Run just the roles that the findings name, then audit again.")
@click.option("-y", "--yes", is_flag=True, help="With --fix: restart servers without asking.")
@click.option(
    "--since",
    metavar="REPORT",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Show what is new since an earlier report (JSON).",
)
@click.option(
    "-o",
    "--output",
    "outputs",
    multiple=True,
    metavar="[FORMAT:]FILE",
    help="Write to this file instead of stdout; the format may come from its ending. May be given more than once.",
)
@click.option("--json", "output_format", flag_value="json", help="Short for `--format json`.")
@click.option(
    "--format", "output_format", type=click.Choice(FORMATS), default=FORMATS[0], show_default=True, help="How to print."
)
@output_options
@verbosity_option
def command(
    hosts: HostOptions,
    deep: bool,
    speed: bool,
    fix: bool,
    yes: bool,
    since: Path | None,
    outputs: tuple[str, ...],
    output_format: str,
    no_color: bool,
    verbosity: int,
) -> int:
    """Report where hosts differ from their plan: packages, driver, files, units, processes, hardware, services.

    A finding is *drifted* (somebody changed the host), *pending* (the inventory has moved on) or *external* (not ours, but
    harmful). One round trip a host; nothing is changed without `--fix`. Exit code 0: all clean, or warnings alone. 2: drift, or
    some that `--fix` has left. 1: a host is refused or cannot be reached.

    \b
    v100ctl audit --limit rack1
    v100ctl audit -o report.html -o report.json -o junit:audit.xml
    v100ctl audit --since report.json
    v100ctl audit --format prometheus -o /var/lib/prometheus/node-exporter/v100ctl.prom
    """
    from v100ctl.audit import audit
    from v100ctl.audit.since import compare_with, read_report

    targets = [parse_output(text, output_format) for text in outputs]
    before = read_report(since) if since else None
    fleet = hosts.fleet()
    access = hosts.access(deep=deep)
    report = audit(fleet, access=access, as_of=today(), deep=deep)
    fixed: Mapping[str, HostFix] = {}
    if (deep or fix or speed) and not report.interrupted:
        from v100ctl.apply import make_reporter
        from v100ctl.audit.deep import check_hosts

        reporter = make_reporter(color=False if no_color else None, verbosity=verbosity)
        try:
            if deep:
                report = check_hosts(fleet, report, access=access, reporter=reporter, as_of=today())
            if fix:
                from v100ctl.audit.fix import fix as mend

                def confirm(question: str) -> bool:
                    return yes or (sys.stdin.isatty() and click.confirm(question, err=True))

                fixed = mend(
                    fleet,
                    report,
                    access=access,
                    reporter=reporter,
                    as_of=today(),
                    confirm=confirm,
                    verbosity=verbosity,
                    deep=deep,
                )
                if fixed:
                    report = audit(fleet, access=access, as_of=today(), deep=deep)
                    if deep and not report.interrupted:
                        report = check_hosts(fleet, report, access=access, reporter=reporter, as_of=today())
            if speed and not report.interrupted:
                from v100ctl.audit.speed import ask_speeds

                report = ask_speeds(fleet, report, access=access, reporter=reporter)
        finally:
            reporter.close()
    rendered = Rendered(report, time.time(), compare_with(report, before) if before is not None else None, fixed)
    if not targets:
        rendered.write(output_format, None, no_color=no_color)
    for name, path in targets:
        rendered.write(name, path, no_color=no_color)
    return report.exit_code
