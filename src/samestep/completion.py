"""Completion of the command line in bash, zsh and fish, written from the parser: verbs, flags, and the values of a flag.

Behind a flag stand its choices, the words given for it (of a layout, of a job's keys, names of profiles), files or folders. A layout is
several words in quotes, of which the last one is completed; a word that ends in `=` is followed by no blank.
"""

from __future__ import annotations

import shlex
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args, get_type_hints

from samestep import hardware
from samestep import job_files as jobs
from samestep.engines.scripts import ENGINES
from samestep.layout import Layout
from samestep.schedules import SCHEDULES
from samestep.simulation import cases

SEVERAL = ("--layout", "--why", "--why-not")
"""Flags behind which several words stand in quotes."""


@dataclass(frozen=True)
class Argument:
    """A flag or a word in one place of a command."""

    flags: tuple[str, ...]
    """The names of the flag; none for a word without one."""
    about: str
    takes_value: bool
    words: tuple[str, ...] = ()
    files: str = ""
    """`files`, `folders`, or the end of the names, such as `.toml`; empty where no path stands."""
    is_several: bool = False


def words_of_flags() -> dict[str, Sequence[str]]:
    """Return the words that may follow flags whose parser has no choices."""
    return {
        **dict.fromkeys(SEVERAL, words_of_layouts()),
        "--set": jobs.settings(),
        "--hardware": hardware.known(),
        "--show": hardware.known(),
        "--on": tuple(ENGINES),
        "--case": ("list", *cases.RUNS, *cases.COMPARISONS),
    }


def words_of_layouts() -> tuple[str, ...]:
    """Return the words of a layout as one begins to write them: `tp=` before a number, else each value."""
    written = ["dp="]
    for name, hint in get_type_hints(Layout).items():
        choices = {"schedule": tuple(SCHEDULES), "zero": (0, 1, 2, 3)}.get(name, get_args(hint))
        if hint is bool:
            written.append(name)
        elif name in ("schedule", "zero") or all(isinstance(choice, str) for choice in choices or (0,)):
            written += [f"{name}={choice}" for choice in choices]
        else:
            written.append(f"{name}=")
    return tuple(written)


def arguments_of(verb: ArgumentParser, words: Mapping[str, Sequence[str]]) -> list[Argument]:
    """Return what the arguments of a verb take; `words` are those of flags whose parser has no choices."""
    return [_argument(action, words) for action in verb._actions if action.help != SUPPRESS]


def _argument(action: Action, words: Mapping[str, Sequence[str]]) -> Argument:
    flags = tuple(action.option_strings)
    given = next((words[flag] for flag in flags if flag in words), ())
    chosen = tuple(map(str, action.choices or given))
    shown = str(action.metavar or "")
    files = ""
    if action.type is Path or shown.endswith(("FILE", "RUN")):
        files = ".toml" if shown.endswith((".toml", "JOB")) else "folders" if shown in ("DIR", "RUN") else "files"
    is_several = bool({*flags} & {*SEVERAL})
    return Argument(flags, action.help or "", action.nargs != 0, chosen, files, is_several)


def script(shell: str, verbs: Mapping[str, tuple[str, ArgumentParser]], words: Mapping[str, Sequence[str]]) -> str:
    """Return the script of a shell: `bash`, `zsh` or `fish`. The verbs have a line about each."""
    table = {name: (about, arguments_of(parser, words)) for name, (about, parser) in verbs.items()}
    return SHELLS[shell](table)


_Table = Mapping[str, tuple[str, list[Argument]]]


def _cases(table: _Table, commands: Callable[[Argument], list[str]]) -> Iterator[tuple[str, str]]:
    """Yield VERB:FLAG for each flag that takes a value, and VERB: for a word without one, with the commands that complete it."""
    for verb, (_, arguments) in table.items():
        for one in arguments:
            if one.flags and one.takes_value:
                yield "|".join(f"{verb}:{flag}" for flag in one.flags), "; ".join(commands(one) or ["true"])
            elif not one.flags:
                yield f"{verb}:", "; ".join(commands(one) or ["true"])


def _quoted(words: Sequence[str]) -> str:
    return shlex.quote(" ".join(words))


def _bash(table: _Table) -> str:
    def commands(one: Argument) -> list[str]:
        words = [f"_samestep_{'several' if one.is_several else 'words'} {_quoted(one.words)}"] if one.words else []
        return [*words, *([f"_samestep_files {one.files}"] if one.files else [])]

    flags = {verb: [flag for one in arguments for flag in one.flags] for verb, (_, arguments) in table.items()}
    by_flag = "\n".join(f"        {place}) {what} ;;" for place, what in _cases(table, commands))
    by_verb = "\n".join(f"        {verb}) flags={_quoted(names)} ;;" for verb, names in flags.items())
    return _BASH.replace("@VERBS@", _quoted([*table])).replace("@FLAGS@", by_verb).replace("@CASES@", by_flag)


_BASH = r"""# completion of samestep for bash: samestep completion bash > ~/.local/share/bash-completion/completions/samestep
_samestep_words() {
    local reply
    for reply in $1; do
        [[ $reply == "$current"* ]] || continue
        [[ $reply == *= ]] && compopt -o nospace
        [[ $quote ]] || reply=${reply#"${current%"${current##*=}"}"}  # readline begins a new word behind =
        COMPREPLY+=("$reply")
    done
}
_samestep_several() {
    local before="" index
    if [[ $quote && $current == *" "* ]]; then
        before="${current% *} "
        current=${current##* }
    fi
    compopt -o nospace
    _samestep_words "$1"
    for index in "${!COMPREPLY[@]}"; do COMPREPLY[index]=$before${COMPREPLY[index]}; done
}
_samestep_files() {
    compopt -o filenames
    local -a found
    mapfile -t found < <(compgen -d -- "$current"; [[ $1 == files ]] && compgen -f -- "$current"; [[ $1 == .* ]] && compgen -f -X "!*$1" -- "$current")
    COMPREPLY+=("${found[@]}")
}
_samestep_at() {
    case $1 in
@CASES@
        *) return 1 ;;
    esac
    return 0
}
_samestep() {
    local -a words=()
    local index word before="" verb="" flags="" current quote=""
    for ((index = 1; index <= COMP_CWORD; index++)); do
        word=${COMP_WORDS[index]}
        if ((${#words[@]})) && [[ $word == = || ${COMP_WORDS[index - 1]} == = ]]; then
            words[-1]+=$word
        else
            words+=("$word")
        fi
    done
    current=${words[-1]}
    ((${#words[@]} > 1)) && before=${words[-2]}
    for word in "${words[@]:0:${#words[@]}-1}"; do
        [[ $word == -* ]] || { verb=$word; break; }
    done
    if [[ $current == --*=* ]]; then
        before=${current%%=*}
        current=${current#*=}
    fi
    if [[ $current == [\"\']* ]]; then
        quote=${current:0:1}
        current=${current:1}
    fi
    COMPREPLY=()
    case $verb in
        "") _samestep_words @VERBS@; return 0 ;;
@FLAGS@
    esac
    [[ $before == -* ]] && _samestep_at "$verb:$before" && return
    if [[ $current == -* ]]; then _samestep_words "$flags"; else _samestep_at "$verb:"; fi
    return 0
}
complete -F _samestep samestep
"""


def _zsh(table: _Table) -> str:
    def commands(one: Argument) -> list[str]:
        words = f"_samestep_{'several' if one.is_several else 'words'} {' '.join(map(shlex.quote, one.words))}"
        files = {"files": "_files", "folders": "_files -/"}.get(one.files, f"_files -g '*{one.files}'")
        return [words] * bool(one.words) + [files] * bool(one.files)

    flags = {verb: [flag for one in arguments for flag in one.flags] for verb, (_, arguments) in table.items()}
    by_flag = "\n".join(f"        ({place}) {what} ;;" for place, what in _cases(table, commands))
    by_verb = "\n".join(
        f"        ({verb}) flags=({' '.join(map(shlex.quote, names))}) ;;" for verb, names in flags.items()
    )
    return _ZSH.replace("@VERBS@", " ".join(table)).replace("@FLAGS@", by_verb).replace("@CASES@", by_flag)


_ZSH = r"""#compdef samestep
# completion of samestep for zsh: samestep completion zsh > a folder of $fpath/_samestep
_samestep_words() {
    local -a open closed
    open=(${(M)@:#*=}) closed=(${@:#*=})
    (($#open)) && compadd -Q -S '' -- $open
    (($#closed)) && compadd -Q -- $closed
}
_samestep_several() {
    compset -P '* '
    compadd -Q -S '' -- "$@"
}
_samestep_at() {
    case $1 in
@CASES@
        (*) return 1 ;;
    esac
    return 0
}
_samestep() {
    local verb="" before="" word
    local -a flags
    for word in ${words[2,CURRENT-1]}; do
        [[ $word == -* ]] || { verb=$word; break }
    done
    [[ ${words[CURRENT-1]} == -* ]] && before=${words[CURRENT-1]}
    if compset -P '--*='; then before=${IPREFIX%=}; fi
    case $verb in
        ('') compadd -- @VERBS@; return 0 ;;
@FLAGS@
    esac
    [[ $before ]] && _samestep_at $verb:$before && return
    if [[ $PREFIX == -* ]]; then compadd -- $flags; else _samestep_at $verb: ; fi
}
if [[ $funcstack[1] == _samestep ]]; then _samestep "$@"; else compdef _samestep samestep; fi
"""


def _fish(table: _Table) -> str:
    lines = ["# completion of samestep for fish: samestep completion fish > ~/.config/fish/completions/samestep.fish"]
    lines += ["complete -c samestep -f"]
    for verb, (about, arguments) in table.items():
        lines.append(f"complete -c samestep -n __fish_use_subcommand -a {verb} -d {_fish_quoted(about)}")
        for one in arguments:
            words = ["complete", "-c", "samestep", "-n", _fish_quoted(f"__fish_seen_subcommand_from {verb}")]
            for flag in one.flags:
                words += ["-l" if flag.startswith("--") else "-s", flag.lstrip("-")]
            if one.takes_value and one.flags:
                words.append("-r" if one.files else "-x")
            if one.files:
                words += ["-F"] if one.files == "files" else ["-a", _fish_quoted(_FISH_PATHS[one.files])]
            if one.words:
                words += ["-a", _fish_quoted(" ".join(one.words))]
            lines.append(" ".join([*words, "-d", _fish_quoted(one.about)]))
    return "\n".join(lines) + "\n"


_FISH_PATHS = {"folders": "(__fish_complete_directories)", ".toml": "(__fish_complete_suffix .toml)"}


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: Mapping[str, Callable[[_Table], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
