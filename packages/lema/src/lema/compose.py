"""From what was typed to a LemaConfig: groups through Hydra, then the user's file, then ``key=value``.

Later ones win: LemaConfig's defaults, the groups' YAML files (``+model=NAME``, ``storage=resident``), the file of
``--config``, options on the command line. Hydra only composes here: nothing is written and the working folder stays.
Names are checked against LemaConfig and the files that exist; Hydra would let ``+key=value`` pass unseen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lema.config import LemaConfig
from lema_core.errors import ConfigError, PluginError
from lema_core.plugins import get_plugin_manager
from lema_core.suggest import did_you_mean, unknown_name

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

#: the package whose config.yaml is where every composition starts
PRIMARY = "lema.conf"


@dataclass(frozen=True)
class GroupChoice:
    """One YAML file of a group: ``+model=NAME``. ``about`` is its first line of comment."""

    group: str
    name: str
    package: str
    file: Traversable

    @property
    def about(self) -> str:
        lines = (
            line[1:].strip() for line in self.file.read_text(encoding="utf-8").splitlines() if line.startswith("#")
        )
        return next((line for line in lines if line and not line.startswith("@package")), "")


@cache
def group_choices() -> Mapping[str, Mapping[str, GroupChoice]]:
    """Every group's choices, from lema and the plugins; of two files of one name the first package's counts."""
    groups: dict[str, dict[str, GroupChoice]] = {}
    for package in _config_packages():
        for folder in sorted(resources.files(package).iterdir(), key=lambda each: each.name):
            if not folder.is_dir() or folder.name.startswith(("_", ".")):
                continue
            for file in sorted(folder.iterdir(), key=lambda each: each.name):
                if file.name.endswith(".yaml"):
                    name = file.name.removesuffix(".yaml")
                    groups.setdefault(folder.name, {}).setdefault(name, GroupChoice(folder.name, name, package, file))
    return groups


def compose(overrides: Iterable[str] = (), config_file: str | Path | None = None) -> LemaConfig:
    """The config of a command line.

    ``overrides`` are ``key=value``, ``+group=choice``; a plus may be given or left out everywhere. What files of groups
    have as ``model_overrides`` counts for init=random alone, beneath those that are typed.
    ``config_file`` is a YAML mapping of options and groups. Raises ConfigError in one line for whatever does not exist.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    groups: dict[str, str] = {}
    values: dict[str, Any] = {}
    typed: dict[str, Any] = {}
    if config_file is not None:
        for key, value in load_yaml(Path(config_file), "--config").items():
            _sort_in(key, value, groups, values, where=f"{config_file}: ")
    for override in overrides:
        key, value = _parse_override(override)
        _sort_in(key, value, groups, typed)
    composed = _compose_groups(groups)
    init = next((each["init"] for each in (typed, values, composed) if "init" in each), LemaConfig().init)
    if str(init).lower() != "random":
        # a preset's are for trying it without its checkpoint, which says itself what the model is
        composed.pop("model_overrides", None)
    try:
        merged = OmegaConf.merge(LemaConfig().to_dict(), composed, values, typed)
        resolved = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"cannot read the options: {_first_line(error)}") from error
    assert isinstance(resolved, dict)
    return LemaConfig.from_dict({str(key): value for key, value in resolved.items()})


def _sort_in(key: str, value: Any, groups: dict[str, str], values: dict[str, Any], where: str = "") -> None:
    """File one ``key: value`` as a choice or as an option. Raises ConfigError for a name that does not exist."""
    known = group_choices()
    if key in LemaConfig.options():
        earlier = values.get(key) if LemaConfig.option(key).mapping else None
        values[key] = {**earlier, **value} if isinstance(earlier, dict) and isinstance(value, dict) else value
    elif key in known:
        if str(value) not in known[key]:
            raise ConfigError(f"{where}{unknown_name(key, str(value), known[key])}{_left_out()}")
        groups[key] = str(value)
    else:
        near = did_you_mean(key, [*LemaConfig.options(), *known])
        raise ConfigError(f"{where}unknown option {key!r}{near or '; python -m lema --help lists all'}{_left_out()}")


def _config_packages() -> list[str]:
    """The primary package, then the plugins'. Raises PluginError when lema's own plugin is not loaded."""
    packages = get_plugin_manager().config_packages()
    if PRIMARY not in packages:
        raise PluginError(
            f"lema's own YAML files are not registered; is its plugin disabled or not installed?{_left_out()}"
        )
    return [PRIMARY, *(package for package in packages if package != PRIMARY)]


def _left_out() -> str:
    """A plugin that was left out may be the one whose name was typed."""
    problems = get_plugin_manager().problems
    return "".join(f"; plugin {each.package} is left out: {each.error}" for each in problems)


def _parse_override(override: str) -> tuple[str, Any]:
    """``+key=value`` to its key and value. Text and lists are taken as they stand, other values in Hydra's grammar."""
    match = re.fullmatch(r"\+{0,2}([^=\s]+)=(.*)", override, re.DOTALL)
    if match is None:
        raise ConfigError(f"{override!r} is not an option; options are written key=value, such as learning_rate=1e-4")
    key, value = match[1], match[2]
    option = LemaConfig.options().get(key)
    quoted = re.fullmatch(r"(['\"]).*\1", value, re.DOTALL)
    if option is None or (option.literal and value != "null" and not quoted):
        return key, value
    if option.mapping and not re.fullmatch(r"\{.*\}|null|none", value.strip(), re.DOTALL | re.IGNORECASE):
        value = f"{{{value}}}"

    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(f"{key}={value}")
        if parsed.is_sweep_override():
            raise ConfigError(f"{key}: {value!r} is several values; a run takes one")
        return key, parsed.value()
    except HydraException as error:
        raise ConfigError(f"{key}: cannot read {value!r}: {_first_line(error)}; put quotes around text") from error


def load_yaml(path: Path, option: str) -> dict[str, Any]:
    """The mapping that a YAML file holds. ``option`` is who named the file. Raises ConfigError naming file and line."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror or error}") from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not YAML: {error.problem}") from error
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected key: value lines, found a {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


def _compose_groups(groups: Mapping[str, str]) -> Any:
    """What Hydra composes from lema's and the plugins' files; only keys that some file sets."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    search_path = ",".join(f"pkg://{package}" for package in _config_packages()[1:])
    overrides = [f"hydra.searchpath=[{search_path}]"]
    in_defaults = _defaults_list()
    overrides += [f"{'' if group in in_defaults else '+'}{group}={name}" for group, name in groups.items()]
    try:
        with initialize_config_module(PRIMARY, job_name="lema", version_base="1.3"):
            composed = hydra_compose("config", overrides, return_hydra_config=True)
            chosen = OmegaConf.to_container(composed.hydra.runtime.choices)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"cannot compose {', '.join(overrides[1:])}: {_first_line(error)}") from error
    OmegaConf.set_struct(composed, False)
    del composed["hydra"]
    for key in composed:
        if key not in LemaConfig.options():
            near = did_you_mean(str(key), LemaConfig.options())
            raise ConfigError(f"{_file_that_sets(str(key), chosen)}: unknown option {key!r}{near}")
    return composed


def _defaults_list() -> set[str]:
    """The groups that Hydra has without a plus."""
    from omegaconf import OmegaConf

    config = OmegaConf.create((resources.files(PRIMARY) / "config.yaml").read_text(encoding="utf-8"))
    return {str(group) for entry in config.defaults if not isinstance(entry, str) for group in entry}


def _file_that_sets(key: str, chosen: Any) -> str:
    for group, choices in group_choices().items():
        choice = choices.get(str(chosen.get(group)))
        if choice is not None and re.search(
            rf"^{re.escape(key)}\s*:", choice.file.read_text(encoding="utf-8"), re.MULTILINE
        ):
            return f"{choice.group}/{choice.name}.yaml of {choice.package}"
    return "the composed YAML files"


def _first_line(error: BaseException) -> str:
    lines: Sequence[str] = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
