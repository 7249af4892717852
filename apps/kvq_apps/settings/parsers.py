"""The parser of a command line, on top of argparse's public functions.

It remembers its flags, so that shells can complete them. It looks up the defaults in its help when
the help is printed. Its errors are `UsageError`s.
"""

from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

from kvq.errors import UsageError
from kvq_apps.settings.flag_values import with_component_values
from kvq_apps.terminal import output


class Group(Protocol):
    """Describes what flags can be added to: a parser, or a titled part of it."""

    def add_argument(self, *names: str, **options: Any) -> Action:
        """Adds a flag of these spellings."""
        ...

    def add_mutually_exclusive_group(self, *, required: bool = False) -> "Group":
        """Adds a group of flags of which a command line has one at most."""
        ...


_AnyGroup = TypeVar("_AnyGroup", bound=Group)


class PrintAllFlags(Action):
    """Prints the help with the flags that `--help` leaves out, and ends."""

    def __call__(self, parser: ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, Parser)
        parser.hidden = ()
        parser.print_help()
        parser.exit()


class Parser(ArgumentParser):
    """Parses a command line; `command` is the parser of the chosen command, if any.

    The help leaves out the flags whose attributes are `hidden`.
    """

    def __init__(self, **options: Any) -> None:
        self.actions: list[Action] = []
        self.command: Parser | None = None
        self.hidden: Collection[str] = ()
        super().__init__(**options)

    @property
    def spellings(self) -> set[str]:
        """Returns every spelling of every flag."""
        return {spelling for action in self.actions for spelling in action.option_strings}

    def add_argument(self, *names: str, **options: Any) -> Action:
        """Adds a flag, without a synonym that another flag of this parser has already."""
        return self._remember(super().add_argument, *names, **options)

    def add_argument_group(self, *titles: Any, **options: Any):
        """Adds a titled part of the help, whose flags are the parser's too."""
        return self._watch(super().add_argument_group(*titles, **options))

    def add_mutually_exclusive_group(self, *, required: bool = False):
        """Adds a group of flags of which a command line has one at most."""
        return self._watch(super().add_mutually_exclusive_group(required=required))

    def _watch(self, group: _AnyGroup) -> _AnyGroup:
        """Returns the group, whose new flags, also in nested groups, the parser remembers."""
        add_group = group.add_mutually_exclusive_group

        def add_nested_group(*, required: bool = False) -> Group:
            return self._watch(add_group(required=required))

        group.add_argument = partial(self._remember, group.add_argument)
        group.add_mutually_exclusive_group = add_nested_group
        return group

    def _remember(self, add: Callable[..., Action], *names: str, **options: Any) -> Action:
        spellings = self.spellings
        action = add(*names[:1], *(name for name in names[1:] if name not in spellings), **options)
        self.actions.append(action)
        return action

    def format_help(self) -> str:
        """Returns the help, with the values of the `{reference}`s in it."""
        for action in self.actions:
            if action.option_strings and action.dest in self.hidden:
                action.help = SUPPRESS
            action.help = action.help and with_component_values(action.help)
        return super().format_help()

    def print_help(self, file: Any = None) -> None:
        """Prints the help on standard output."""
        output.print_data(self.format_help(), end="")

    def error(self, message: str) -> NoReturn:
        """Raises the message as a `UsageError`."""
        raise UsageError(f"{message} (see `{self.prog} --help`)")
