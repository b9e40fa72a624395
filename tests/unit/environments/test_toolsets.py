"""Tests of the named tool sets and of the distributions of them."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from env_client.tools import BASE_TOOLS, OPTIONAL_TOOLS, tool_schemas
from environments.toolsets import TOOLSETS, Distribution, ToolsetError, ToolsetSettings, list_distributions, sample_toolsets
from tests.support.users import ROOT

ALL_TOOLS = BASE_TOOLS + OPTIONAL_TOOLS


def test_every_tool_of_a_set_is_a_slot_tool_and_every_slot_tool_is_in_one_set() -> None:
    tools = [tool for tools in TOOLSETS.values() for tool in tools]

    assert sorted(tools) == sorted(ALL_TOOLS)
    assert len(tool_schemas(tools)) == len(tools)


def test_by_default_a_group_has_all_that_the_pool_offers() -> None:
    assert ToolsetSettings().select_tools("g", BASE_TOOLS).tools == BASE_TOOLS
    assert ToolsetSettings().select_tools("g", ALL_TOOLS).toolsets == tuple(TOOLSETS)
    assert ToolsetSettings().select_tools("g", ["terminal", "process", "read_file"]).toolsets == ("terminal",)


def test_enabled_and_disabled_tool_sets() -> None:
    assert ToolsetSettings(enabled_toolsets=["file"]).select_tools("g", BASE_TOOLS).tools == TOOLSETS["file"]
    assert ToolsetSettings(enabled_toolsets=["file", "terminal", "file"]).select_tools("g", BASE_TOOLS).toolsets == ("file", "terminal")
    assert ToolsetSettings(disabled_toolsets=["file", "tmux"]).select_tools("g", BASE_TOOLS).toolsets == ("terminal",)
    assert ToolsetSettings(enabled_toolsets=["file", "terminal"], disabled_toolsets=["file"]).select_tools("g", BASE_TOOLS).toolsets == ("terminal",)
    assert ToolsetSettings(distribution="default", disabled_toolsets=["file"]).select_tools("g", BASE_TOOLS).toolsets == ("terminal",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enabled_toolsets": ["file"], "distribution": "default"}, "enabled_toolsets and distribution exclude each other"),
        ({"enabled_toolsets": ["files"]}, "enabled_toolsets: there is no tool set 'files'; there are terminal, file, terminal_stateful, tmux"),
        ({"disabled_toolsets": ["bash"]}, "disabled_toolsets: there is no tool set 'bash'; there are terminal, file"),
        ({"enabled_toolsets": ["terminal", "web"]}, "enabled_toolsets: the tool set 'web' needs a tool server, which is not built yet; there are terminal"),
        ({"disabled_toolsets": ["browser"]}, "disabled_toolsets: the tool set 'browser' needs a tool server"),
        ({"enabled_toolsets": []}, "enabled_toolsets: names no tool set; there are terminal"),
        ({"enabled_toolsets": "terminal"}, "enabled_toolsets: must be a list of tool sets"),
        ({"distribution": "normal"}, "distribution: there is no 'normal'; there are default, terminal_only"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_what_may_be_chosen(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolsetError, match=message):
        ToolsetSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enabled_toolsets": ["tmux", "file"]}, "enabled_toolsets: the pool does not offer the tool set tmux; it offers terminal, file"),
        ({"distribution": "interactive"}, "distribution interactive: the pool does not offer the tool set terminal_stateful, tmux; it offers terminal, file"),
        ({"disabled_toolsets": ["terminal", "file"]}, "no tool set is left for group 'g': disabled_toolsets takes terminal, file away"),
        ({"distribution": "file_only", "disabled_toolsets": ["file"]}, "no tool set is left for group 'g'"),
    ],
)
def test_what_a_pool_does_not_offer_is_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolsetError, match=message):
        ToolsetSettings(**settings).select_tools("g", BASE_TOOLS)


@pytest.mark.parametrize("distribution", [distribution.name for distribution in list_distributions()])
def test_a_group_has_the_same_tools_for_the_same_seed(distribution: str) -> None:
    settings = ToolsetSettings(distribution=distribution, seed=7)
    groups = [f"g-{number}" for number in range(50)]

    first = [settings.select_tools(group, ALL_TOOLS) for group in groups]

    assert [ToolsetSettings(distribution=distribution, seed=7).select_tools(group, ALL_TOOLS) for group in reversed(groups)] == first[::-1]
    assert all(selection.tools for selection in first)


def test_another_seed_gives_other_tools_and_another_process_the_same() -> None:
    def drawn(seed: int) -> list[tuple[str, ...]]:
        settings = ToolsetSettings(distribution="balanced", seed=seed)
        return [settings.select_tools(f"g-{number}", BASE_TOOLS).toolsets for number in range(40)]

    program = (
        "from env_client.tools import BASE_TOOLS; from environments.toolsets import ToolsetSettings; s = ToolsetSettings(distribution='balanced', seed=1);"
        "print([s.select_tools(f'g-{number}', BASE_TOOLS).toolsets for number in range(40)])"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT).stdout

    assert drawn(1) != drawn(2)
    assert printed.strip() == str(drawn(1))


def test_groups_follow_the_probabilities() -> None:
    settings = ToolsetSettings(distribution="mostly_terminal")
    count = Counter(settings.select_tools(f"g-{number}", BASE_TOOLS).toolsets for number in range(4000))

    assert count.keys() == {("terminal",), ("terminal", "file")}
    assert 850 < count["terminal", "file"] < 1150


def test_a_group_always_has_a_tool_set() -> None:
    rare = Distribution("rare", "", {"terminal": 0.01, "file": 0.04})
    count = Counter(tuple(sample_toolsets(rare, str(number))) for number in range(2000))

    assert () not in count
    assert count["file",] > count["terminal",] > 0


def test_every_distribution_is_described_and_names_known_tool_sets() -> None:
    distributions = list_distributions()

    assert len({distribution.name for distribution in distributions}) == len(distributions)
    for distribution in distributions:
        assert distribution.description.endswith(".")
        assert distribution.probabilities.keys() <= TOOLSETS.keys()
        assert all(0 < probability <= 1 for probability in distribution.probabilities.values())
