"""The trainer's side of atroposlib's rollout API (`run-api`): it registers, and takes batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

log = logging.getLogger(__name__)

#: The time between two requests for a batch that is not there yet, in seconds.
POLL_INTERVAL_S = 0.1
_TIMEOUT_S = 30.0


class RolloutApi:
    """A trainer at a rollout API.

    Args:
        url: the address of the API.
    """

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self._http.aclose()

    async def wait_until_ready(self) -> None:
        """Wait until the API answers."""
        said = False
        while True:
            try:
                await self._http.get("/")
            except httpx.TransportError:
                if not said:
                    log.warning("waiting for run-api at %s", self._http.base_url)
                said = True
                await asyncio.sleep(POLL_INTERVAL_S)
            else:
                return

    async def register(self, *, batch_size: int, max_token_len: int, num_steps: int) -> None:
        """Register as the trainer. Environments wait until the trainer has asked for its first batch.

        Args:
            batch_size: how many rollouts a batch has; a multiple of the group size of every environment.
            max_token_len: rollouts with so many tokens, or more, are left out.
            num_steps: how many steps the trainer makes.

        Raises:
            httpx.HTTPError: the API does not answer, or refuses the registration.
        """
        registration = {
            "wandb_group": "demo", "wandb_project": "demo", "batch_size": batch_size, "max_token_len": max_token_len,
            "checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": num_steps,
        }  # fmt: skip
        (await self._http.post("/register", json=registration)).raise_for_status()

    async def next_batch(self) -> Sequence[Mapping[str, Any]]:
        """Wait for a batch, and return its groups.

        Raises:
            httpx.HTTPError: the API does not answer.
        """
        while True:
            response = (await self._http.get("/batch")).raise_for_status()
            batch: Sequence[Mapping[str, Any]] | None = response.json()["batch"]
            if batch:
                return batch
            await asyncio.sleep(POLL_INTERVAL_S)
