"""The tenants, from the settings file and from the environment."""

from __future__ import annotations

from pathlib import Path

from sandbox_server.api.tenants import Tenant
from sandbox_server.settings.file import MIN_TOKEN_CHARS, SettingsFile
from sandbox_server.settings.values import SettingsError


def configured_tenants(tokens: str | None, file: SettingsFile, path: Path | None) -> tuple[Tenant, ...]:
    """The tenants of `SANDBOX_TOKENS` and of the settings file.

    Args:
        tokens: the value of `SANDBOX_TOKENS`.
        file: the settings file.
        path: its path, for errors.

    Raises:
        SettingsError: `SANDBOX_TOKENS` is not valid, a tenant of the file has no token, or two tenants have one name or one token.
    """
    tenants = [*_environment_tenants(tokens), *_file_tenants(file, path)]
    for kind in ("name", "token"):
        seen: set[str] = set()
        for tenant in tenants:
            value = getattr(tenant, kind)
            if value in seen:
                raise SettingsError(f"tenants: two tenants with one {kind}" + (f", {value}" if kind == "name" else f" ({tenant.name} is one of them)"))
            seen.add(value)
    return tuple(tenants)


def _environment_tenants(tokens: str | None) -> list[Tenant]:
    tenants = []
    for pair in (tokens or "").split(","):
        if not pair.strip():
            continue
        name, colon, token = pair.strip().partition(":")
        if not colon or not name or not token:
            raise SettingsError("environment: SANDBOX_TOKENS: must be name:token, more of them separated by commas")
        if len(token) < MIN_TOKEN_CHARS:
            raise SettingsError(f"environment: SANDBOX_TOKENS: the token of {name} has fewer than {MIN_TOKEN_CHARS} characters")
        tenants.append(Tenant(name=name, token=token, admin=True))
    return tenants


def _file_tenants(file: SettingsFile, path: Path | None) -> list[Tenant]:
    """The tenants of the settings file, with the tokens of their token files.

    Raises:
        SettingsError: a tenant has neither `token` nor `token_file`, or both, or its token file cannot be read.
    """
    tenants = []
    for index, one in enumerate(file.tenants):
        where = f"settings file {path}: tenants.{index}"
        if (one.token is None) == (one.token_file is None):
            raise SettingsError(f"{where}: {one.name} needs token or token_file, one of them")
        token = one.token
        if one.token_file is not None:
            try:
                token = Path(one.token_file).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise SettingsError(f"{where}.token_file: {one.token_file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
            if len(token) < MIN_TOKEN_CHARS:
                raise SettingsError(f"{where}.token_file: {one.token_file} holds fewer than {MIN_TOKEN_CHARS} characters")
        tenants.append(Tenant(**{**one.model_dump(exclude={"token_file"}), "token": token, "backends": tuple(one.backends)}))
    return tenants
