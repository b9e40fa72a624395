"""Named sets of tools, and distributions from which a set of tools is sampled for each group of rollouts."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

#: The tools of each set that runs in a slot.
TOOLSETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "terminal": ("terminal", "process"),
        "file": ("read_file", "write_file", "edit_file", "list_files", "search_files"),
        "terminal_stateful": ("terminal_stateful",),
        "tmux": ("tmux",),
    }
)
#: The tools of each set that needs a tool server.
TOOL_SERVER_TOOLSETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "web": ("web_search", "web_extract"),
        "browser": tuple(f"browser_{action}" for action in ("navigate", "snapshot", "click", "type", "scroll", "back", "press", "close")),
    }
)
TOOL_SERVER_TOOLS = frozenset(tool for tools in TOOL_SERVER_TOOLSETS.values() for tool in tools)


class ToolsetError(ValueError):
    """The settings name tools that cannot be given to a model."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """How likely each tool set is for a group of rollouts.

    Args:
        name: the name, as the setting `distribution` has it.
        description: one sentence for people who choose one.
        probabilities: for each tool set, how likely a group has it, from 0 to 1. The tool sets are drawn independently of each other.
    """

    name: str
    description: str
    probabilities: Mapping[str, float] = field(default_factory=dict)


_DISTRIBUTIONS = (
    Distribution("default", "Every group has the terminal and the file tools.", {"terminal": 1.0, "file": 1.0}),
    Distribution("terminal_only", "Every group has the terminal alone.", {"terminal": 1.0}),
    Distribution("file_only", "Every group has the file tools alone.", {"file": 1.0}),
    Distribution("mostly_terminal", "Every group has the terminal, and one group of four the file tools, too.", {"terminal": 1.0, "file": 0.25}),
    Distribution("balanced", "A group has the terminal, the file tools, or both.", {"terminal": 0.5, "file": 0.5}),
    Distribution("interactive", "Every group has the terminal, and some a stateful shell or tmux.", {"terminal": 1.0, "terminal_stateful": 0.5, "tmux": 0.5}),
)


@dataclass(frozen=True, slots=True)
class ToolSelection:
    """The tool sets of one group, and their tools."""

    toolsets: tuple[str, ...]
    tools: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolsetSettings:
    """Which tool sets the groups of an environment have.

    Args:
        enabled_toolsets: the tool sets; None for all that the pool offers.
        disabled_toolsets: tool sets that are taken away from the others.
        distribution: the name of the distribution from which the tool sets of each group are sampled. It excludes `enabled_toolsets`.
        seed: the same seed gives each group the same tool sets again.

    Raises:
        ToolsetError: a name is not known, needs what is not built yet, or `enabled_toolsets` and `distribution` are both set.
    """

    enabled_toolsets: Sequence[str] | None = None
    disabled_toolsets: Sequence[str] | None = None
    distribution: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.enabled_toolsets is not None and self.distribution is not None:
            raise ToolsetError("enabled_toolsets and distribution exclude each other: set one of them")
        for setting, names in (("enabled_toolsets", self.enabled_toolsets), ("disabled_toolsets", self.disabled_toolsets)):
            _check_names(setting, names)
        if self.enabled_toolsets is not None and not self.enabled_toolsets:
            raise ToolsetError(f"enabled_toolsets: names no tool set; there are {', '.join(TOOLSETS)}; leave it out for all of them")
        if self.distribution is not None:
            find_distribution(self.distribution)

    def select_tools(self, group: str, available_tools: Collection[str]) -> ToolSelection:
        """Return the tools of a group of rollouts. All of its rollouts get the same ones.

        Args:
            group: the id of the group. With a distribution, the tool sets depend on it and on the seed alone.
            available_tools: the slot tools that the pool offers.

        Raises:
            ToolsetError: the pool does not offer a tool set that is named, or no tool set is left.
        """
        offered = [name for name, tools in TOOLSETS.items() if set(tools) <= set(available_tools)]
        chosen = self._choose_toolsets(group, offered)
        kept = [name for name in chosen if name not in (self.disabled_toolsets or ())]
        if not kept:
            has, offers = ", ".join(chosen) or "none", ", ".join(offered) or "none"
            raise ToolsetError(f"no tool set is left for group {group!r}: disabled_toolsets takes {has} away; the pool offers {offers}")
        return ToolSelection(tuple(kept), tuple(tool for name in kept for tool in TOOLSETS[name]))

    def _choose_toolsets(self, group: str, offered: Sequence[str]) -> list[str]:
        if self.distribution is not None:
            distribution = find_distribution(self.distribution)
            _check_offered(f"distribution {self.distribution}", distribution.probabilities, offered)
            return sample_toolsets(distribution, f"{self.seed}/{group}")
        if self.enabled_toolsets is None:
            return list(offered)
        _check_offered("enabled_toolsets", self.enabled_toolsets, offered)
        return list(dict.fromkeys(self.enabled_toolsets))


def list_distributions() -> tuple[Distribution, ...]:
    """Return all distributions."""
    return _DISTRIBUTIONS


def find_distribution(name: str) -> Distribution:
    """Return the distribution of this name.

    Raises:
        ToolsetError: there is none.
    """
    for distribution in _DISTRIBUTIONS:
        if distribution.name == name:
            return distribution
    raise ToolsetError(f"distribution: there is no {name!r}; there are {', '.join(distribution.name for distribution in _DISTRIBUTIONS)}")


def sample_toolsets(distribution: Distribution, seed: str) -> list[str]:
    """Sample tool sets from a distribution: at least one, so that a group is never without tools.

    Args:
        distribution: the distribution.
        seed: the same text gives the same tool sets, in every process.
    """
    numbers = random.Random(seed)
    drawn = {name: numbers.random() for name in distribution.probabilities}
    chosen = [name for name, probability in distribution.probabilities.items() if drawn[name] < probability]
    # Nothing was drawn: take the tool set that came closest, which keeps the proportions of the probabilities.
    return chosen or [max(distribution.probabilities, key=lambda name: distribution.probabilities[name] / drawn[name])]


def _check_names(setting: str, names: Sequence[str] | None) -> None:
    if isinstance(names, str):
        raise ToolsetError(f"{setting}: must be a list of tool sets, such as ['terminal'], not the text {names!r}")
    for name in names or ():
        if name in TOOL_SERVER_TOOLSETS:
            raise ToolsetError(f"{setting}: the tool set {name!r} needs a tool server, which is not built yet; there are {', '.join(TOOLSETS)}")
        if name not in TOOLSETS:
            raise ToolsetError(f"{setting}: there is no tool set {name!r}; there are {', '.join(TOOLSETS)}")


def _check_offered(setting: str, names: Collection[str], offered: Sequence[str]) -> None:
    missing = [name for name in names if name not in offered]
    if missing:
        raise ToolsetError(f"{setting}: the pool does not offer the tool set {', '.join(missing)}; it offers {', '.join(offered) or 'none'}")
