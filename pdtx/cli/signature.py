"""Commands whose options are the fields of configs: a flat typer signature out of nested dataclasses, and back.

A field annotated with a pdtx.node.options.Option is an option of the same name: `block_size` is `--block-size`.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

import typer

from pdtx.node.check import OptionField, nested_configs, option_fields
from pdtx.node.options import PANELS, Option

T = TypeVar("T")


def as_typer(alias: object) -> Any:  # noqa: ANN401 - typer's own return type
    """Return typer's form of the Option that a type is annotated with, as in Annotated[int, Option(...)]."""
    option = next(one for one in getattr(alias, "__metadata__", ()) if isinstance(one, Option))
    return typer_option(option)


def typer_option(option: Option) -> Any:  # noqa: ANN401 - typer's own return type
    """Return typer's form of an option."""
    return typer.Option(
        *option.flags,
        help=option.help,
        min=option.min,
        max=option.max,
        rich_help_panel=option.panel,
        show_default=option.show_default,
    )


class Given:
    """The values of all options, as given on the command line, in the environment, or by default."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def has(self, name: str) -> bool:
        """Whether an option has a value: one without a default may have none."""
        return self._values.get(name) is not None

    def make(self, config: type[T]) -> T:
        """Return a config of the values; fields that are no options keep their defaults. Raises what its class does."""
        owner: Any = config
        names = [field.name for field in option_fields(owner)]
        values = {name: self._values[name] for name in names if name in self._values}
        return config(**values, **{name: self.make(kind) for name, kind in nested_configs(owner).items()})


def config_command(
    function: Callable[[Given], None],
    *configs: type[Any],
    env_prefix: str,
    first: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
) -> typer.Typer:
    """Return an app of one command whose options are the fields of configs, those of nested ones among them.

    Options can be given as PREFIX_OPTION in the environment as well. A name that several configs have is one option, as
    the first of them declares it. first: options that come first on their panel of the help page. without: fields that
    are not options of this command.
    """

    def command(**values: object) -> None:
        function(Given(values))

    found = dict[str, OptionField]()
    for config in configs:
        for field in _flat(config):
            if field.name not in without:
                found.setdefault(field.name, field)
    order = sorted(found.values(), key=lambda field: (PANELS.index(field.option.panel), _rank(field.name, first)))
    parameters = [_parameter(field) for field in order]
    command.__doc__ = function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings={"auto_envvar_prefix": env_prefix})(command)
    return app


def _rank(name: str, first: tuple[str, ...]) -> int:
    return first.index(name) if name in first else len(first)


def _flat(config: type[Any], default: object = None) -> Iterator[OptionField]:
    """Yield the option fields of a config, and of those in it where they stand.

    default: an instance that has the defaults; None for the class's own.
    """
    owner: Any = config
    options, nested = {field.name: field for field in option_fields(owner)}, nested_configs(owner)
    for field in dataclasses.fields(config):
        if field.name in options:
            value = getattr(default, field.name) if default is not None else field.default
            yield dataclasses.replace(options[field.name], default=value)
        elif field.name in nested:
            yield from _flat(nested[field.name], field.default)


def _parameter(field: OptionField) -> inspect.Parameter:
    required = field.default is dataclasses.MISSING
    kind = field.kind | None if required else field.kind
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if required else field.default,
        annotation=Annotated[kind, typer_option(field.option)],
    )
