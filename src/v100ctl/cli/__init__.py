"""The command line: parse, call, print. Nothing is decided here.

Commands live in modules of their own and are imported when they are used, so that ``--help`` and completion stay fast.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from v100ctl import __version__
from v100ctl.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, V100ctlError

#: name -> (module, short help). The help stands here too so that listing commands imports none of them; a test compares.
COMMANDS: dict[str, tuple[str, str]] = {
    "try": ("v100ctl.cli.practice", "The main job on a throw-away host: build, serve, ask, audit."),
    "test": ("v100ctl.cli.selftest", "Run this toolkit's own tests, from unit tests to roles in containers."),
    "init": ("v100ctl.cli.init", "Make a fleet folder to start from."),
    "plan": ("v100ctl.cli.plan", "Show what would change on which host and why; touch nothing."),
    "provision": ("v100ctl.cli.provision", "Make hosts as planned and prove it with a real completion."),
    "rollout": ("v100ctl.cli.rollout", "Change a fleet host by host, gated, and lose no request."),
    "gateway": ("v100ctl.cli.gateway", "Print the fleet's servers for a gateway of your own."),
    "monitoring": ("v100ctl.cli.monitoring", "Print what Prometheus and Grafana are told of the fleet."),
    "rollback": ("v100ctl.cli.rollback", "Bring a host back to its previous good state, and prove it."),
    "history": ("v100ctl.cli.history", "Show what was applied to a host and proved, and when."),
    "recover": ("v100ctl.cli.recover", "Bring a host's cards back without a reboot, or say what alone helps."),
    "status": ("v100ctl.cli.status", "Show what runs where."),
    "logs": ("v100ctl.cli.logs", "Show the journal of an instance."),
    "start": ("v100ctl.cli.start", "Start an instance by hand and wait until it is healthy."),
    "stop": ("v100ctl.cli.stop", "Stop an instance by hand, after its running requests."),
    "restart": ("v100ctl.cli.restart", "Restart an instance by hand, after its running requests."),
    "audit": ("v100ctl.cli.audit", "Report where hosts differ from their plan."),
    "bench": ("v100ctl.cli.bench", "Measure a running instance: decode, prompts, streams, against the card's ceiling."),
    "tune": ("v100ctl.cli.tune", "Find the settings that are fastest on this card, and show them as a diff."),
    "render": ("v100ctl.cli.render", "Print every file and command line of a host; touch nothing."),
    "lab": ("v100ctl.cli.lab", "Test hosts with fake V100s: up, list, ssh, fault, down."),
    "completion": ("v100ctl.cli.completion", "Print the completion script of a shell."),
}


class _LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name][0]).command
        if not isinstance(command, click.Command):
            raise TypeError(f"{COMMANDS[cmd_name][0]} has no command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, short_help) for name, (_, short_help) in COMMANDS.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        import difflib

        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else " `v100ctl --help` lists them."
            raise click.UsageError(f"There is no command `{args[0]}`.{hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done or clean, 1 error or refusal, 2 differences found, 64 wrong usage, 130 interrupted.",
)
@click.version_option(__version__, prog_name="v100ctl")
def cli() -> None:
    """Provision Linux hosts with V100 GPUs, serve models on them, and keep them so.

    Start with `v100ctl try` (a practice host in a container), then `v100ctl init my-fleet` and `v100ctl provision`.
    """


def _print_error(message: str, hint: str | None) -> None:
    """One paragraph on stderr; colour only where it is wanted and can be seen. The text may hold what a host said."""
    from v100ctl.apply.reporter import clean

    message, hint = clean(message), hint and clean(hint)
    color = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    click.echo(f"{click.style('error:', fg='red', bold=True) if color else 'error:'} {message}", err=True)
    if hint:
        click.echo(f"{click.style('hint:', fg='cyan', bold=True) if color else 'hint:'} {hint}", err=True)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: What follows the program's name; ``sys.argv`` by default.
    """
    try:
        result: Any = cli.main(
            args=list(arguments) if arguments is not None else None, prog_name="v100ctl", standalone_mode=False
        )
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return EXIT_USAGE
    except click.UsageError as error:
        usage = error.ctx.get_usage() if error.ctx else ""
        if usage:
            click.echo(usage, err=True)
        _print_error(error.format_message(), None)
        return EXIT_USAGE
    except click.ClickException as error:
        _print_error(error.format_message(), None)
        return EXIT_ERROR
    except V100ctlError as error:
        _print_error(error.message, error.hint)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _print_error("interrupted", "run the same command again: it goes on from what is there")
        return EXIT_INTERRUPTED
    except OSError as error:
        # No room, no permission, a read-only disk: the file and the system's reason say it all.
        _print_error(f"{error.filename or 'the output'}: {error.strerror or error}", None)
        return EXIT_ERROR
    except SystemExit:
        # click exits so, and in no other case, when the reader of stdout has gone (`| head`): not an error.
        return EXIT_OK
    return result if isinstance(result, int) else EXIT_OK


def _terminated(signum: int, frame: object) -> NoReturn:
    # SIGTERM gets the same clean-up as Ctrl-C.
    raise KeyboardInterrupt


def main() -> NoReturn:
    """The ``v100ctl`` program."""
    # Python has no stream where the caller closed one (`>&-`), and what is written there shall go nowhere, not fail halfway.
    sys.stdout = sys.stdout or io.TextIOWrapper(io.FileIO(os.devnull, "w"))
    sys.stderr = sys.stderr or io.TextIOWrapper(io.FileIO(os.devnull, "w"))
    signal.signal(signal.SIGTERM, _terminated)
    sys.exit(run())
