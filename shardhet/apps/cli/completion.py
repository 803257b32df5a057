"""Tab completion in bash for ``shardhet COMMAND key=value ...``.

    eval "$(shardhet train -sc install=bash)"

Hydra knows what may follow, but its own script only completes programs without subcommands and
changes how bash splits words everywhere.
"""

from collections.abc import Iterable, Sequence

FLAGS = ("-sc", "--shell-completion")
CONFIGURED_COMMANDS = (
    "train",
    "measure",
    "plan",
    "simulate",
)  # commands for which Hydra composes a configuration

_INSTALL = """\
_shardhet_complete()
{
    local line="${COMP_LINE:0:COMP_POINT}" words word answer
    read -ra words <<< "$line"
    [[ "$line" == *" " ]] && words+=("")
    word="${words[${#words[@]}-1]}"
    if (( ${#words[@]} <= 2 )); then
        compopt +o nospace 2> /dev/null
        COMPREPLY=($(compgen -W "@COMMANDS@" -- "$word"))
    elif [[ " @CONFIGURED@ " == *" ${words[1]} "* ]]; then
        line="shardhet ${line#*" ${words[1]} "}"
        answer="$(COMP_LINE="$line" COMP_POINT="${#line}" \\
            "${words[0]}" "${words[1]}" -sc query=bash 2> /dev/null)"
        COMPREPLY=($(compgen -W "$answer" -- "$word"))
        if [[ "$word" == *=* && "$COMP_WORDBREAKS" == *=* ]]; then
            COMPREPLY=("${COMPREPLY[@]#"${word%=*}="}")  # bash replaces what follows the =
        fi
    fi
}
complete -o nospace -o default -F _shardhet_complete shardhet
"""
_UNINSTALL = """\
complete -r shardhet
unset -f _shardhet_complete
"""


def bash_script(arguments: Sequence[str], commands: Iterable[str]) -> str | None:
    """What ``-sc install=bash`` or ``-sc uninstall=bash`` prints; None for any other line."""
    if not set(FLAGS) & set(arguments):
        return None
    if "uninstall=bash" in arguments:
        return _UNINSTALL
    if "install=bash" in arguments:
        names = _INSTALL.replace("@CONFIGURED@", " ".join(CONFIGURED_COMMANDS))
        return names.replace("@COMMANDS@", " ".join(commands))
    return None
