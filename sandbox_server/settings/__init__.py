"""The settings of the service. `load` reads them; the other modules have the values and the models of the file and of the environment."""

from sandbox_server.settings.load import load_settings
from sandbox_server.settings.values import LOCAL_TENANT, Settings, SettingsError

__all__ = ["LOCAL_TENANT", "Settings", "SettingsError", "load_settings"]
