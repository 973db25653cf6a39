"""``kvq completion``: the script that makes a shell complete kvq's commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_INSTALL = {
    "bash": 'eval "$(kvq completion bash)"   in ~/.bashrc',
    "zsh": 'eval "$(kvq completion zsh)"   in ~/.zshrc',
    "fish": "kvq completion fish > ~/.config/fish/completions/kvq.fish",
}
_HELP = "Print the script that makes SHELL complete kvq's commands and options.\n\n\b\n" + "\n".join(_INSTALL.values())


@click.command("completion", help=_HELP)
@click.argument("shell", type=click.Choice(list(_INSTALL)))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script."""
    completion = get_completion_class(shell)
    assert completion is not None, shell
    script = completion(ctx.find_root().command, {}, "kvq", "_KVQ_COMPLETE").source()
    # Click's script for fish cuts a description off at its first comma.
    click.echo(script.replace('string split ","', 'string split --max 1 ","'))
