"""Explain a pasted command line: what each flag means on a pinned build and a card, and the equivalent settings.

:func:`explain` is pure: text, catalog, versions and a card go in, an :class:`~v100ctl.plan.explain.types.Explanation` comes out.
Knowledge stands in the catalog: what a build takes in its parser's rows, what flags mean and why words of old tutorials are
refused in ``llama_cpp_history.yml`` and ``vllm_history.yml``.
"""

from __future__ import annotations

from v100ctl.catalog import Catalog
from v100ctl.catalog.history import load_history
from v100ctl.errors import V100ctlError
from v100ctl.plan.command_line import LOOKED_FOR, Command, Program, find_commands
from v100ctl.plan.explain.build import explain_cmake
from v100ctl.plan.explain.server_llama_cpp import explain_llama_server
from v100ctl.plan.explain.server_vllm import explain_vllm
from v100ctl.plan.explain.types import Card, CommandExplanation, Explanation, Finding

__all__ = ["Card", "CommandExplanation", "Explanation", "Finding", "explain"]


def explain(text: str, catalog: Catalog, *, llama_cpp_build: int, vllm_version: str, card: Card) -> Explanation:
    """Explain every command in ``text``.

    Args:
        text: What was pasted.
        catalog: What is known.
        llama_cpp_build: The build that ``llama-server`` and ``cmake`` commands are judged by; the catalog has its parser.
        vllm_version: The version that ``vllm`` commands are judged by; the catalog has its parser.
        card: What they would run on.

    Raises:
        V100ctlError: no command was found.
    """
    images: dict[str, Program] = {row.prefix: "llama-server" for row in load_history("llama_cpp").images}
    images |= {row.prefix: "vllm" for row in load_history("vllm").images}
    commands = find_commands(text, images)
    if not commands:
        raise V100ctlError("no command was found in the text", hint=f"looked for {', '.join(LOOKED_FOR)}")

    def one(command: Command) -> CommandExplanation:
        if command.program == "vllm":
            return explain_vllm(command, catalog, vllm_version, load_history("vllm"), card)
        history = load_history("llama_cpp")
        if command.program == "cmake":
            return explain_cmake(command, catalog, llama_cpp_build, history, card)
        return explain_llama_server(command, catalog, llama_cpp_build, history, card)

    return Explanation(card, tuple(one(command) for command in commands))
