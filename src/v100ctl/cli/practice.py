"""``v100ctl try``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from v100ctl.cli.options import launcher_options, output_options, today, verbosity_option, write_table
from v100ctl.errors import EXIT_OK

if TYPE_CHECKING:
    from v100ctl.practice import Practice


@click.command("try", short_help="The main job on a throw-away host: build, serve, ask, audit.")
@click.option("--question", metavar="TEXT", help="What to ask the model.")
@click.option("--down", "take_down", is_flag=True, help="Remove the practice host; image and caches stay.")
@click.option("--purge", is_flag=True, help="Remove the practice host, its image, all caches, keys and logs.")
@launcher_options
@output_options
@verbosity_option
def command(question: str | None, take_down: bool, purge: bool, no_color: bool, verbosity: int) -> int:
    """Do the main job on a throw-away host.

    Start a container that boots like a host, provision it over SSH with the playbook that a real host gets, ask the served model
    a question, audit it.

    Needs root on Debian or Ubuntu; Docker Engine is installed from the distribution's packages where there is none. The first run
    compiles the engine (about ten minutes on two cores); later runs use that release and take seconds.
    """
    from v100ctl import practice
    from v100ctl.apply import make_reporter

    if take_down and purge:
        raise click.UsageError("--purge includes --down: give one of them")
    if (take_down or purge) and question is not None:
        raise click.UsageError("--question does not go with --down or --purge")
    reporter = make_reporter(color=False if no_color else None, verbosity=verbosity)
    try:
        if purge:
            practice.purge(reporter)
            return EXIT_OK
        if take_down:
            removed = practice.down(reporter)
            reporter.note(f"removed: {', '.join(removed)}" if removed else "there was no practice host")
            return EXIT_OK
        result = practice.run_try(reporter, question=question or practice.DEFAULT_QUESTION, as_of=today(), verbosity=verbosity)
    finally:
        reporter.close()
    print_summary(result, no_color=no_color)
    return result.exit_code


def print_summary(result: Practice, *, no_color: bool = False) -> None:
    """What came out of it, on stdout: the answer, what was set, the audit, and how to go on."""
    from rich.text import Text

    from v100ctl import practice
    from v100ctl.apply.reporter import clean
    from v100ctl.cli.show import console, findings_table, settings_table

    out = console(no_color=no_color)
    with out.capture() as captured:
        if result.answer is not None:
            speed = result.answer.tokens_per_second
            out.print(Text(f"Q: {clean(result.question)}", style="bold"))
            out.print(Text(f"A: {clean(result.answer.text)}"))
            rate = f", {speed:.1f} tokens/s" if speed else ""
            out.print(Text(f"   {result.answer.tokens} tokens{rate}", style="dim"))
            out.print()
        out.print(settings_table(result.result.examined))
        if result.audit is not None:
            out.print()
            status = result.audit.status(practice.HOST)
            out.print(Text.assemble("audit: ", (status, "green" if status == "clean" else "bold red")))
            if result.audit.hosts[practice.HOST].findings:
                out.print(findings_table(result.audit.hosts[practice.HOST].findings))
        if result.answer is not None:
            out.print()
            for command, purpose in practice.next_steps(result):
                out.print(Text.assemble((command, "cyan"), f"\n    {purpose}"), soft_wrap=True)
    write_table(captured.get(), None)
