"""Finds out whether a model server answers, before slots are spent on rollouts that it cannot have."""

from __future__ import annotations

import asyncio
import logging

import httpx

log = logging.getLogger(__name__)

#: The time between two attempts, in seconds.
_INTERVAL_S = 0.5
#: How often a wait is logged, in seconds.
_LOG_INTERVAL_S = 30.0
_TIMEOUT_S = 10.0


async def wait_for_model_server(base_url: str, max_wait_s: float) -> str | None:
    """Wait until something answers HTTP at an address. Whatever it answers is good enough: only an answer to a conversation shows more.

    Args:
        base_url: the address of the model server.
        max_wait_s: how long to wait, in seconds.

    Returns:
        None if the server answers, else one sentence on why it does not.
    """
    loop = asyncio.get_running_loop()
    began_s, logged_s = loop.time(), loop.time()
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, verify=False) as client:  # no token is sent, and the answer is not read
        while True:
            try:
                await client.get(base_url.rstrip("/") + "/models")
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem = str(error) or type(error).__name__
            else:
                return None
            if loop.time() - began_s >= max_wait_s:
                return f"no model server answers at {base_url}: {problem}; start it there, or set OPENAI_BASE_URL or --openai.base_url to its address"
            if loop.time() - logged_s >= _LOG_INTERVAL_S:
                logged_s = loop.time()
                log.warning("waiting for the model server at %s: %s", base_url, problem)
            await asyncio.sleep(_INTERVAL_S)


async def find_connection_problem(base_url: str) -> str | None:
    """Return why no connection can be made to the model server, in a few words, or None if one can be made.

    A server that accepts the connection and does not answer in time is busy, and counts as present.

    Args:
        base_url: the address of the model server.
    """
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, verify=False) as client:  # no token is sent, and the answer is not read
        try:
            await client.get(base_url.rstrip("/") + "/models")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return str(error) or type(error).__name__
        except httpx.HTTPError:
            return None
    return None
