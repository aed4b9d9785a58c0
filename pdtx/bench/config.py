"""A run's flags out of a YAML file: its keys are the long flags, and its values what would stand behind them."""

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from importlib import resources
from pathlib import Path

import yaml

from pdtx.errors import InputError

_SCENARIOS = resources.files("pdtx.bench") / "scenarios"
_MOST_BYTES = 1 << 20
_NUMBER = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?")
_SUFFIX = ".yaml"

Value = str | list[str]


def scenario_names() -> tuple[str, ...]:
    """Return the names of the configs that come with pdtx."""
    names = (entry.name for entry in _SCENARIOS.iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def read_config(source: str, flags: Collection[str], repeated: Collection[str] = ()) -> dict[str, Value]:
    """Return flags with their texts from a file, or from a scenario by its name.

    flags: the long flags that there are, without dashes before them. Keys may have underscores for dashes. A list
    stands for a text with commas; of the flags in repeated it stays a list, and a mapping becomes KEY=VALUE texts.

    Values are texts as they stand in the file, as they would on a command line: `16:32` is no number to base 60 here,
    and `on` no truth value. Raises InputError for a file that cannot be read and a key that is not among flags, naming
    the nearest one.
    """
    text, where = _text(source)
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it is nested too deeply"
        raise InputError(f"{where} is no YAML{line}: {problem}") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise InputError(f"{where} must have keys, as in 'tokens: [512, 2048]'")
    found = dict[str, Value]()
    for key_node, node in root.value:
        key, at = _flag(key_node, flags, where), f"{where} line {key_node.start_mark.line + 1}"
        if key in found:
            raise InputError(f"{at}: {key} is given twice")
        found[key] = _listed(key, node, at) if key in repeated else _single(key, node, at)
    return found


def dump_config(values: Mapping[str, object]) -> str:
    """Return flags as YAML that read_config takes."""
    return yaml.safe_dump(
        {key: _number(value) for key, value in values.items()},
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=True,
    )


def _number(value: object) -> object:
    """Return a text that is a number as one, alone or in a list, where reading it back gives the same text."""
    if isinstance(value, list):
        return [_number(one) for one in value]
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        number = float(value) if "." in value else int(value)
        return number if str(number) == value else value
    return value


def _text(source: str) -> tuple[str, str]:
    """Return the text of a file or a scenario, and what messages call it. A file goes before a scenario."""
    path = Path(source)
    if source in scenario_names() and not path.exists():
        return (_SCENARIOS / f"{source}{_SUFFIX}").read_text("utf-8"), f"scenario {source}"
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"no config {source}: no such file, and scenarios are {', '.join(scenario_names())}") from None
    except OSError as error:
        raise InputError(f"cannot read the config {source}: {error.strerror}") from None
    if len(data) > _MOST_BYTES:
        raise InputError(f"the config {source} has more than {_MOST_BYTES:,} bytes; it should hold flags")
    try:
        return data.decode("utf-8"), source
    except UnicodeDecodeError:
        raise InputError(f"the config {source} is not UTF-8 text") from None


def _flag(node: yaml.Node, flags: Collection[str], where: str) -> str:
    key = node.value if isinstance(node, yaml.ScalarNode) else ""
    flag = str(key).strip().replace("_", "-")
    if flag in flags:
        return flag
    near = get_close_matches(flag, flags, n=1, cutoff=0.4)
    advice = f"the nearest is {near[0]}" if near else "see --help for those that there are"
    raise InputError(f"{where} line {node.start_mark.line + 1}: no flag {key!r}; {advice}")


def _scalar(key: str, node: yaml.Node, at: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise InputError(f"{at}: {key} takes a value or a list of values, nothing deeper")
    text = str(node.value).strip()
    if not text:
        raise InputError(f"{at}: {key} has no value; leave the line out to have its default")
    return text


def _single(key: str, node: yaml.Node, at: str) -> str:
    if not isinstance(node, yaml.SequenceNode):
        return _scalar(key, node, at)
    if not node.value:
        raise InputError(f"{at}: {key} has an empty list; leave the line out to have its default")
    return ",".join(_scalar(key, item, at) for item in node.value)


def _listed(key: str, node: yaml.Node, at: str) -> list[str]:
    if isinstance(node, yaml.MappingNode):
        return [f"{_scalar(key, name, at)}={_scalar(key, value, at)}" for name, value in node.value]
    items = node.value if isinstance(node, yaml.SequenceNode) else [node]
    return [_scalar(key, item, at) for item in items]
