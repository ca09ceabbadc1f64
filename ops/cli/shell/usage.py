"""How the commands show their help, and how they tell wrong usage: in one sentence, like every other mistake."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from fedemu.ops.cli.shell.complete import offer
from fedemu.ops.experiment.near import did_you_mean, near
from fedemu.ops.experiment.presets import DEFAULT, JOINT, example_of, is_preset, kind_of, part_names
from fedemu.ops.running.codes import INTERRUPTED
from fedemu.ops.running.exits import complain, end_output, exit_code_of
from fedemu.protocol.wording import demand

_BOTH_BOUNDS = re.compile(r"(\S+)<=x<=([^\];]+)")
_ONE_BOUND = re.compile(r"x([<>])=([^\];]+)")
_BOUND_WORDS = {">": "at least", "<": "at most"}
_EMPTY = "is empty; is a variable of the shell not set?"


class Command(TyperCommand):
    """One command. Its help names arguments as the usage line does, and says ranges in words.

    An empty word is refused, unless it is the default of its option: as a path it would be the working folder.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words behind the name of the command."""
        if not ctx.resilient_parsing:
            try:
                given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
            except Exception as error:
                wrong: Any = error
                if getattr(wrong, "ctx", ctx) is None:  # the parser does not say of which command an option is
                    wrong.ctx = ctx
                raise
            parameter: Any
            for parameter in self.params:
                value = given.get(parameter.name)
                if "" in (value if isinstance(value, list | tuple) else [value]) and parameter.default != "":
                    raise typer.BadParameter(_EMPTY, ctx, parameter)
        return list(super().parse_args(ctx, args))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words behind the name of the command in the usage line."""
        names = [_name(argument) for argument in self.params if argument.param_type_name == "argument"]
        return ["[OPTIONS]", *names]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options, each with its help."""
        _write_options(self, ctx, formatter)


class Commands(TyperGroup):
    """The group of all commands."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, then the commands."""
        _write_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> Any:
        """Run a command. Wrong usage is one sentence."""
        kwargs["standalone_mode"] = False
        offer()
        try:
            code = super().main(*args, **kwargs)
        except typer.Abort:
            complain("interrupted")
            code = INTERRUPTED
        except SystemExit as ended:
            # So typer ends if nobody reads the help that it writes.
            if not isinstance(ended.__context__, BrokenPipeError):
                raise
            code = 0
        except OSError as error:
            code = exit_code_of(partial(_raise, error))
        except Exception as error:
            # What typer raises for wrong usage has this method in every version, and a public class only in the latest.
            if not hasattr(error, "format_message"):
                raise
            code = _tell(error)
        code = end_output(code or 0)
        if standalone_mode:
            sys.exit(code)
        return code


def _raise(error: Exception) -> NoReturn:
    raise error


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    arguments, options = [], []
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is None:
            continue
        if parameter.param_type_name == "argument":
            arguments.append((_name(parameter), _plain(record[1]).replace("  [required]", "")))
        else:
            options.append((_plain(record[0]), _plain(record[1])))
    for title, records in (("Arguments", arguments), ("Options", options)):
        if records:
            with formatter.section(title):
                formatter.write_dl(records)


def _name(argument: Any) -> str:
    """An argument in the usage line: in brackets if it may be left out."""
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def _plain(text: str) -> str:
    """A line of help with ranges in words."""
    text = _BOTH_BOUNDS.sub(r"\1 to \2", text)
    return _ONE_BOUND.sub(lambda found: f"{_BOUND_WORDS[found[1]]} {found[2]}", text)


def _tell(error: Any) -> int:
    """Tell what was wrong with the arguments, and return the exit code. Without any arguments, show the help."""
    said = error.format_message().strip().rstrip(".")
    if said.startswith("Usage:"):
        error.show()
        return int(error.exit_code)
    command = error.ctx.command_path if error.ctx else "fedemu"
    told = next(_better(error, said), f"{said[:1].lower()}{said[1:]}")
    complain(f"{told}{' See' if told.endswith('?') else '; see'} {command} --help")
    return int(error.exit_code)


def _better(error: Any, said: str) -> Iterator[str]:
    """A clearer sentence than typer's, if there is one for this mistake."""
    kind = type(error).__name__
    if kind == "BadParameter" and error.param is not None:
        name = error.param.opts[0] if error.param.param_type_name == "option" else _name(error.param).strip("[]")
        if error.message == _EMPTY:
            yield f"{name} {_EMPTY}"
        cause = error.__cause__
        if cause is not None and hasattr(cause, "errors"):
            detail = cause.errors()[0]
            yield f"{name} {_quoted(detail['input'])} must be {_must(detail, error.param)}"
        if found := re.search(r"'(.*)' is not (?:a valid|one of) (.*)", said):
            yield f"{name} {_quoted(found[1])} is not {found[2].replace('integer', 'whole number')}"
    if kind == "NoSuchOption":
        known = [name for parameter in error.ctx.command.params for name in parameter.opts] if error.ctx else []
        yield f"there is no option {error.option_name}{did_you_mean(error.option_name, known, 2)}"
    if "requires an argument" in said:
        yield f"{error.option_name} needs a value after it"
    if found := re.match(r"Missing (argument|option) '([^' ]+)'?", said):
        yield f"{found[2]} is missing"
    if found := re.match(r"No such command '(.*?)'", said):
        yield _no_command(found[1], list(getattr(error.ctx.command, "commands", ())))
    if found := re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", said):
        yield _extra(found[1], error.ctx)


def _must(detail: dict[str, Any], parameter: Any) -> str:
    """What a value must be. The choices of an option come in a sentence of typer's own."""
    if found := re.search(r"is not one of (.*)", str(detail["msg"])):
        choices = found[1].replace("'", "").rstrip(".")
        given = str(detail["input"])
        # Two short words, such as gpu and cpu, are alike in their letters only.
        near_by = did_you_mean(given, choices.split(", ")) if len(given) > 3 else ""
        return f"one of {choices}{near_by}"
    least, most = getattr(parameter, "min", None), getattr(parameter, "max", None)
    if detail["type"].startswith(("greater", "less")) and None not in (least, most):
        return f"from {least} to {most}"
    return demand(detail)


def _no_command(given: str, commands: list[str]) -> str:
    if is_preset(given) or given.endswith(".toml"):
        return f"{given} is an experiment: write fedemu run {given}"
    if given in part_names():
        return f"{given} is a {kind_of(given)}, which follows a preset: write fedemu run {example_of(given)}"
    hint = did_you_mean(f"fedemu {given}", [f"fedemu {name}" for name in commands]) if near(given, commands) else ""
    return f"there is no command {_quoted(given)}{hint}"


def _extra(given: str, ctx: Any) -> str:
    """What to say of words that are too many. A part that stands apart from its preset is joined to it."""
    words = given.split()
    if words and all(word.strip(JOINT) in part_names() for word in words):
        first = next((str(value) for name, value in ctx.params.items() if name == "experiment" and value), DEFAULT)
        return f"{' '.join(words)} stands apart: write {JOINT.join([first, *(word.strip(JOINT) for word in words)])}"
    return f"{given} is one word too many" if len(words) == 1 else f"{given} are words too many"


def _quoted(value: Any) -> str:
    text = str(value)
    return text if text and text.isprintable() and " " not in text else repr(text)
