"""Print a script that completes commands and options in a shell: `jaxtrain completion bash`."""

import ast
import contextlib
import importlib.util
import io
import pathlib
import re

from jaxtrain import commands

BASH = """_jaxtrain() {{
  local words
  if [ "$COMP_CWORD" = 1 ]; then
    words="{commands}"
  else
    case ${{COMP_WORDS[1]}} in
{options}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _jaxtrain jaxtrain jxt"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"  # zsh then reads bash's


def main(argv: commands.Arguments = None) -> int:
    p = commands.parser(
        "completion",
        "Print a script with which a shell completes the commands and options of `jaxtrain` and `jxt`.",
        "python -m jaxtrain.completion bash > ~/.local/share/bash-completion/completions/jaxtrain",
    )
    p.add_argument("shell", choices=("bash", "zsh", "fish"))
    return commands.main(lambda arguments: print(script(arguments.shell)), p.parse_args(argv))


def script(shell: str) -> str:
    found = {name: options(name) for name in commands.COMMANDS}
    if shell == "fish":
        lines = []
        for program in ("jaxtrain", "jxt"):
            for name, about in commands.COMMANDS.items():
                text = about.replace("'", "\\'")
                lines.append(f"complete -c {program} -n __fish_use_subcommand -f -a {name} -d '{text}'")
                seen = f"complete -c {program} -n '__fish_seen_subcommand_from {name}'"
                lines += [f"{seen} -l {option.removeprefix('--')}" for option in found[name]]
        return "\n".join(lines)
    cases = "\n".join(f'      {name}) words="{" ".join(found[name])}" ;;' for name in commands.COMMANDS)
    return (ZSH if shell == "zsh" else "") + BASH.format(commands=" ".join(commands.COMMANDS), options=cases)


def options(name: str) -> list[str]:
    """Return the options that a command's --help lists."""
    if name == "torchrun":
        return torchrun_options()
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        importlib.import_module(commands.ELSEWHERE.get(name, f"jaxtrain.{name}")).main(["--help"])
    return list(dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", shown.getvalue())))


def torchrun_options() -> list[str]:
    """Read the options of torchrun in its file: importing torch takes longer than everything else here."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return []
    tree = ast.parse((pathlib.Path(spec.origin).parent / "distributed/run.py").read_text("utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    added = [call.args for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    names = [name.value for names in added for name in names if isinstance(name, ast.Constant)]
    return [name for name in names if isinstance(name, str) and name.startswith("--")]


if __name__ == "__main__":
    commands.start(main)
