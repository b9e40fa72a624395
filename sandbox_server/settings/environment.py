"""The environment variables of the service."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sandbox_server.api.contract.requests import first_problem
from sandbox_server.settings.values import SettingsError

PREFIX = "SANDBOX_"
CLIENTS_OWN = frozenset({"SANDBOX_URL", "SANDBOX_TOKEN"})
"""The variables with the prefix that only the client reads."""


class EnvironmentModel(BaseModel):
    """The environment variables of the service, by their names without the prefix."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    CONFIG: str | None = None
    STATE_DIR: str | None = None
    TOKENS: str | None = None
    AUTH: Literal["none", "token"] = "token"
    ADVERTISE_URL: str | None = Field(default=None, pattern=r"^https?://[^/\s]+/?$")
    LOG_FORMAT: Literal["json", "text"] = "json"
    LOG_LEVEL: Literal["debug", "info", "warning", "error"] = "info"
    LOCAL_TRANSPORT: Literal["unix", "tls", "stdio"] = "unix"


SETTING_OF: Mapping[str, str] = {
    "CONFIG": "config_path",
    "STATE_DIR": "state_dir",
    "AUTH": "authentication_disabled",
    "ADVERTISE_URL": "advertise_url",
    "LOG_FORMAT": "log_format",
    "LOG_LEVEL": "log_level",
    "LOCAL_TRANSPORT": "local_transport",
}
"""The setting that each environment variable sets. `TOKENS` is not here: it adds tenants to those of the settings file."""


def default_state_dir(environ: Mapping[str, str], uid: int) -> Path:
    """The default state folder of a user."""
    if uid == 0:
        return Path("/var/lib/sandbox-pool")
    base = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".local" / "state")
    return Path(base) / "sandbox-pool"


def read_environment(environ: Mapping[str, str]) -> EnvironmentModel:
    """Read the environment variables of the service.

    Args:
        environ: all environment variables of the process.

    Raises:
        SettingsError: a variable with the prefix is unknown, or its value is not allowed.
    """
    allowed = [PREFIX + name for name in EnvironmentModel.model_fields]
    ours = {name: value for name, value in environ.items() if name.startswith(PREFIX) and name not in CLIENTS_OWN}
    for name in ours:
        if name not in allowed:
            raise SettingsError(f"environment: {name}: unknown; allowed are {', '.join(allowed)}")
    try:
        return EnvironmentModel.model_validate({name.removeprefix(PREFIX): value for name, value in ours.items() if value != ""})
    except ValidationError as error:
        raise SettingsError(f"environment: {PREFIX}{first_problem(error, EnvironmentModel.model_fields)[1]}") from None
