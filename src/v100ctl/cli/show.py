"""Tables for people: plans, findings, results. Text from hosts is cleaned of terminal control characters."""

from __future__ import annotations

import contextlib
import difflib
import io
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from v100ctl.apply.reporter import clean, clean_line
from v100ctl.compare import Finding
from v100ctl.examine import Examined
from v100ctl.plan.rules.text import gib
from v100ctl.plan.types import GpuBudget, Instance, Release

if TYPE_CHECKING:
    from v100ctl.audit import AuditReport
    from v100ctl.audit.fix import HostFix
    from v100ctl.audit.since import Since

_SEVERITY_STYLE = {"refuse": "bold red", "warn": "yellow", "info": "dim", "error": "red", "critical": "bold red"}
_WIDE_ENOUGH = 120


class PlainConsole:
    """Where nobody looks at colours: text goes out as it is, and no line is cut or folded to a width.

    The part of :class:`rich.console.Console` that this package uses; a fleet's plan is tens of thousands of lines, for which
    rich's layout takes longer than the planning.
    """

    def __init__(self) -> None:
        self._text = io.StringIO()

    def print(self, *renderables: Text | str) -> None:
        """One line for each text."""
        for renderable in renderables:
            self._text.write(f"{renderable.plain if isinstance(renderable, Text) else renderable}\n")

    @contextlib.contextmanager
    def capture(self) -> Iterator[PlainConsole]:
        """Everything that is printed inside; :meth:`get` has it."""
        self._text = io.StringIO()
        yield self

    def get(self) -> str:
        """What was printed."""
        return self._text.getvalue()


#: Either, as far as commands print to it.
Out = Console | PlainConsole


def console(*, no_color: bool = False, output: Path | None = None) -> Console:
    """The console for data on stdout, or for the file ``output``. Not a terminal: plain lines, never cut to a width."""
    if output is not None or not sys.stdout.isatty():
        return Console(file=sys.stdout, no_color=True, force_terminal=False, highlight=False, width=_WIDE_ENOUGH * 2)
    return Console(file=sys.stdout, no_color=True if no_color else None, highlight=False)


def lines_console(*, no_color: bool = False, output: Path | None = None) -> Out:
    """Like :func:`console`, for output that is all lines of text."""
    if output is not None or not sys.stdout.isatty():
        return PlainConsole()
    return console(no_color=no_color)


def print_host(out: Out, state: Examined, verdict: str) -> None:
    """One host's heading, and the error that kept it from being asked."""
    probe = f"  (probe {state.facts.probe_ms:.0f} ms)" if state.facts else ""
    out.print(Text.assemble((clean_line(state.host.name), "bold"), f"  {verdict}{probe}"))
    if state.error is not None:
        out.print(Text(f"  error: {clean(state.error.message)}"))
        if state.error.hint:
            out.print(Text(f"  hint: {clean(state.error.hint)}"))


def shorten(value: str, limit: int = 90) -> str:
    """``value`` as one line of at most ``limit`` characters."""
    line = clean_line(value)
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def findings_table(findings: Iterable[Finding]) -> Table:
    """Findings with what is expected and what is there."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("finding", "kind", "expected", "actual", "fix"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        table.add_row(
            Text(clean_line(finding.id), style=_SEVERITY_STYLE.get(finding.severity, "")),
            finding.kind,
            Text(shorten(finding.expected)),
            Text(shorten(finding.actual)),
            Text(clean_line(finding.fix)),
        )
    return table


_STATUS_STYLE = {"clean": "green", "drift": "yellow", "error": "bold red", "unreachable": "bold red"}
#: Layers in the order in which they build on each other.
_LAYERS = ("package", "driver", "file", "unit", "process", "hardware", "service")


def print_audit(
    out: Out, report: AuditReport, *, since: Since | None = None, fixed: Mapping[str, HostFix] = MappingProxyType({})
) -> None:
    """A report by host and layer. With ``since`` only what is new, and what has gone."""
    for name, host in report.hosts.items():
        probe = f"  (probe {host.probe_ms:.0f} ms)" if host.probe_ms is not None else ""
        out.print(Text.assemble((clean_line(name), "bold"), "  ", (host.status, _STATUS_STYLE[host.status]), probe))
        if name in fixed:
            roles = f" by {', '.join(fixed[name].roles)}" if fixed[name].roles else ""
            reason = f": {clean_line(fixed[name].message)}" if fixed[name].message else ""
            out.print(Text(f"  mended{roles}, {fixed[name].status}{reason}", style="dim"))
        if host.error:
            out.print(Text(f"  error: {clean(host.error)}"))
        if host.hint:
            out.print(Text(f"  hint: {clean(host.hint)}"))
        findings: Sequence[Finding] = host.findings
        if since is not None:
            findings = [finding for finding in findings if finding.id in since.new.get(name, ())]
            out.print(Text(f"  {len(findings)} new, {len(since.gone.get(name, ()))} gone", style="dim"))
            for identifier in since.gone.get(name, ()):
                out.print(Text(f"  gone: {clean_line(identifier)}", style="green"))
        for layer in _LAYERS:
            for number, finding in enumerate(item for item in findings if item.layer == layer):
                if number == 0:
                    out.print(Text(f"  {layer}", style="bold"))
                _print_finding(out, finding)
    _print_totals(out, report)


def _print_finding(out: Out, finding: Finding) -> None:
    style = _SEVERITY_STYLE.get(finding.severity, "")
    out.print(
        Text.assemble("    ", (f"{finding.severity:<8}", style), f" {clean_line(finding.id)}", (f"  {finding.kind}", "dim"))
    )
    if "\n" in finding.expected or "\n" in finding.actual:
        _print_diff(out, finding.actual, finding.expected)
    else:
        out.print(Text(f"        expected: {shorten(finding.expected, _DETAIL)}"))
        out.print(Text(f"        actual:   {shorten(finding.actual, _DETAIL)}"))
    out.print(Text(f"        fix:      {clean_line(finding.fix)}", style="dim"))


def _print_totals(out: Out, report: AuditReport) -> None:
    if len(report.hosts) < 2:
        return
    statuses = Counter(host.status for host in report.hosts.values())
    kinds = Counter(finding.kind for host in report.hosts.values() for finding in host.findings)
    words = [f"{count} {status}" for status, count in statuses.items()]
    words += [f"{count} {kind}" for kind, count in sorted(kinds.items())]
    out.print(Text(f"{len(report.hosts)} hosts: {', '.join(words)}", style="bold"))


#: Characters of one side of a finding that is one line.
_DETAIL = 200
#: Diff lines of one change that are shown; a new file of hundreds of lines would hide everything else.
_DIFF_LINES = 60


def print_changes(out: Out, state: Examined) -> None:
    """What a plan would change on one host: grouped by role, in the order in which roles run, as a diff."""
    by_role: dict[str, list[Finding]] = {}
    for finding in state.changes:
        by_role.setdefault(finding.role, []).append(finding)
    for role in sorted(by_role, key=lambda name: _ROLE_ORDER.index(name) if name in _ROLE_ORDER else len(_ROLE_ORDER)):
        out.print(Text(f"  {role}", style="bold"))
        for finding in by_role[role]:
            _print_change(out, state, finding)


#: The order in which `playbooks/provision.yml` runs them.
_ROLE_ORDER = ("preflight", "nvidia_driver", "cuda_toolkit", "llama_cpp", "vllm", "model_store", "llm_server")
#: What happened, as the middle of a finding's id says -> how a diff marks it.
_SYMBOLS = {"missing": ("+", "green"), "unwanted": ("-", "red")}


def _print_change(out: Out, state: Examined, finding: Finding) -> None:
    kind, _, subject = finding.id.partition(":")
    kind, _, what = kind.rpartition(".")
    symbol, style = _SYMBOLS.get(what, ("~", "yellow"))
    line = Text.assemble((f"    {symbol} ", style), clean_line(f"{kind} {subject}".rstrip()))
    lines = "\n" in finding.expected or "\n" in finding.actual
    if what in _SYMBOLS:
        # That it is not there, or shall not be, the sign says already.
        detail = finding.expected if kind in ("driver", "cuda", "release", "model") and what == "missing" else ""
    else:
        detail = f"{what}" if lines else f"{what}: {shorten(finding.actual)} -> {shorten(finding.expected)}"
    if detail and detail != subject:
        line.append(f"  {clean_line(detail)}", style="dim")
    restarted = [name for name in finding.restarts if name in state.restarts]
    if restarted:
        line.append(f"  restarts {', '.join(restarted)}", style="bold magenta")
    out.print(line)
    if lines:
        _print_diff(out, finding.actual, finding.expected)


def _print_diff(out: Out, before: str, after: str) -> None:
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1))[2:]
    for line in lines[:_DIFF_LINES]:
        style = "green" if line.startswith("+") else "red" if line.startswith("-") else "dim"
        out.print(Text(f"        {clean_line(line)}", style=style))
    if len(lines) > _DIFF_LINES:
        out.print(Text(f"        ... {len(lines) - _DIFF_LINES} more lines; `v100ctl render` prints the whole file", style="dim"))


#: What fills a card, in the order of the bar: label, character, style. Told apart without colours too.
_BAR: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("weights", "#", "blue", ("weights_bytes",)),
    ("KV", "=", "cyan", ("kv_bytes", "state_bytes")),
    ("compute", "+", "magenta", ("compute_bytes", "output_bytes")),
    ("context", "o", "yellow", ("context_bytes",)),
    ("free", ".", "green", ("free_bytes",)),
    ("reserved", "r", "dim", ("reserve_bytes",)),
)
_BAR_CELLS = 40


def bar(budget: GpuBudget) -> Text:
    """A card's memory as a bar of a fixed number of cells; the last cells are a ``!`` each where it does not fit."""
    total = max(budget.total_bytes, 1)
    text = Text("[")
    drawn = 0
    filled_bytes = 0
    for _, character, style, names in _BAR:
        filled_bytes += max(sum(int(getattr(budget, name)) for name in names), 0)
        # Rounded at the borders, so that the cells always add up.
        upto = min(round(filled_bytes / total * _BAR_CELLS), _BAR_CELLS)
        text.append(character * (upto - drawn), style=style)
        drawn = max(drawn, upto)
    text.append("." * (_BAR_CELLS - drawn), style="green")
    text.append("]")
    if budget.free_bytes < 0:
        text.append(f" {gib(-budget.free_bytes)} too much", style="bold red")
    return text


def print_instances(out: Out, state: Examined) -> None:
    """For each instance on cards: a bar of each card's memory, the largest context, and the ceiling of its speed."""
    if state.plan is None:
        return
    cards = {gpu.uuid or gpu.pci_address: gpu for gpu in state.facts.gpus} if state.facts else {}
    for instance in state.plan.instances:
        if not instance.budgets:
            continue
        out.print(Text.assemble("  ", (instance.name, "bold"), f" ({instance.engine})"))
        for key, budget in instance.budgets.items():
            gpu = cards.get(key)
            label = f"card {gpu.index if gpu and gpu.index is not None else key} {gpu.name if gpu else ''}".rstrip()
            out.print(Text.assemble("    ", bar(budget), f" {clean_line(label)}"))
            parts = ", ".join(
                f"{label} {gib(size_bytes)}"
                for label, _, _, names in _BAR
                if (size_bytes := sum(int(getattr(budget, name)) for name in names)) > 0
            )
            out.print(Text(f"      peak {gib(budget.peak_bytes)} of {gib(budget.total_bytes)}: {parts}"))
        asked = _asked(instance)
        largest = instance.largest_context_length
        if largest is not None:
            asked += f"; the largest that fits is {largest}" if largest else "; no context fits"
        out.print(Text(f"      {asked}"))
        if instance.decode_ceiling_tps:
            ceiling = f"memory bandwidth allows one stream at most {instance.decode_ceiling_tps:.0f} tokens/s"
            out.print(Text(f"      {ceiling}" + "".join(f"; {row.in_words()}" for row in instance.published)))


def print_rules(out: Out, state: Examined) -> None:
    """The verdicts of one host's plan, worst first."""
    if state.plan is None:
        return
    order = {"refuse": 0, "warn": 1, "info": 2}
    for rule in sorted(state.plan.rules, key=lambda rule: order[rule.severity]):
        nearest = f"\n    nearest that works: {clean(rule.nearest)}" if rule.nearest else ""
        where = f"{clean_line(rule.instance)}: " if rule.instance else ""
        out.print(
            Text.assemble(
                (f"  {rule.severity}: ", _SEVERITY_STYLE[rule.severity]), f"{where}{clean(rule.reason)} [{rule.id}]{nearest}"
            )
        )


def _engine_label(release: Release) -> str:
    if release.engine == "external":
        return f"{release.build['name']}, which you bring"
    if release.engine == "vllm":
        return f"vllm {release.build['version'] or 'of your own requirements'}, Python {release.build['python']}"
    return f"{release.engine} {release.build['build_number']}, backend {release.build['backend']}"


def _asked(instance: Instance) -> str:
    """The context and the requests at once; 0 where nobody tells the engine."""
    context = f"{instance.context_length} tokens a request" if instance.context_length else "as the engine has it"
    return f"context {context}, {instance.parallel} at once"


def settings_table(state: Examined) -> Table:
    """What was set on a host, instance by instance."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    if state.plan is None:
        return table
    for release in state.plan.releases:
        table.add_row("engine", _engine_label(release))
        table.add_row("release", Text(release.path))
    gateway = state.plan.gateway
    fronts = {front.instance: front.bind for front in gateway.fronts} if gateway is not None else {}
    for instance in state.plan.instances:
        engine = f"{instance.listen}:{instance.port}"
        where = f"{fronts[instance.name]}, behind it {engine}" if instance.name in fronts else engine
        table.add_row("instance", f"{instance.name}: {instance.unit}, {where}")
        table.add_row("model", Text(instance.model_path))
        table.add_row("context", _asked(instance).removeprefix("context "))
        table.add_row("command", Text(shlex.join(instance.argv)))
    return table
