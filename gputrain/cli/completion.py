"""Completion of commands and options by the shell: a change to typer's script for zsh."""

from typer import _completion_shared

# zsh runs the installed script when Tab is pressed first. Typer's only registers the function for the next Tab.
CALL_IT = '[[ $zsh_eval_context[-1] == loadautofunc ]] && %(complete_func)s "$@"\n'


def complete_at_the_first_tab() -> None:
    """Let the script of --install-completion and --show-completion for zsh also complete when it is loaded."""
    scripts: dict[str, str] = getattr(_completion_shared, "_completion_scripts", {})  # Another typer may have none.
    if "zsh" in scripts and CALL_IT not in scripts["zsh"]:
        scripts["zsh"] = f"{scripts['zsh'].rstrip()}\n{CALL_IT}"
