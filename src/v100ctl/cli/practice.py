"""``v100ctl try``."""

from __future__ import annotations

import click

from v100ctl.cli.options import launcher_options, output_options, today
from v100ctl.errors import EXIT_OK


@click.command("try", short_help="The main job on a throw-away host: build, serve, ask, audit.")
@click.option("--question", metavar="TEXT", help="What to ask the model.")
@click.option("--down", "take_down", is_flag=True, help="Remove the practice host; image and caches stay.")
@click.option("--purge", is_flag=True, help="Remove the practice host, its image, all caches, keys and logs.")
@launcher_options
@output_options
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
    practice.print_summary(result, no_color=no_color)
    return result.exit_code
