"""``v100ctl completion``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completion", short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of a shell.

    bash: `eval "$(v100ctl completion bash)"` in ~/.bashrc; zsh the same in ~/.zshrc; fish:
    `v100ctl completion fish > ~/.config/fish/completions/v100ctl.fish`.
    """
    from v100ctl.cli import cli

    completion = get_completion_class(shell)
    if completion is None:
        raise click.ClickException(f"click has no completion for {shell}")
    click.echo(completion(cli, {}, "v100ctl", "_V100CTL_COMPLETE").source())
