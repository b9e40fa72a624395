"""Finds out whether a tokenizer can be had before transformers loads it, which repeats requests to the Hugging Face Hub for about a minute."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx

#: How long the Hugging Face Hub may take to answer, in seconds.
HUB_TIMEOUT_S = 5.0
#: A tokenizer has at least one of these files.
_FILES = ("tokenizer_config.json", "tokenizer.json", "config.json")
_WHAT_TO_DO = "name a local folder with the files of the tokenizer, or a repository of the Hub that was downloaded before, with HF_HUB_OFFLINE=1"


class TokenizerUnavailable(Exception):
    """There is no such tokenizer, or the Hub cannot be asked for it. The message says why, and what to do."""


def check_tokenizer(name: str, label: str) -> None:
    """Check that a tokenizer is in a local folder, in the cache of the Hub, or on the Hub. What is not in a local folder is announced on standard error.

    Args:
        name: the folder, or the id of a repository.
        label: begins what is written, such as the name of the environment.

    Raises:
        TokenizerUnavailable: it is in none of them, or not in the cache and the Hub does not answer within `HUB_TIMEOUT_S`.
    """
    if Path(name).is_dir():
        return
    from huggingface_hub import HfApi, constants, try_to_load_from_cache  # heavy, and only needed for names of the Hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    sys.stderr.write(f"{label}: loading the tokenizer {name!r} (tokenizer_name) from the Hugging Face Hub or its cache, because there is no such folder\n")
    try:
        is_cached = any(isinstance(try_to_load_from_cache(name, file), str) for file in _FILES)
        if not constants.HF_HUB_OFFLINE:
            HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
            return
        problem = "it was not downloaded before, and HF_HUB_OFFLINE forbids the download"
    except HFValidationError as error:
        raise TokenizerUnavailable(f"there is no such folder, and no repository can have that name; {_WHAT_TO_DO}") from error
    except RepositoryNotFoundError:  # also of a repository that needs a token
        problem = f"there is no such folder, and the Hub at {constants.ENDPOINT} has no such repository, or shows it only with a token (HF_TOKEN)"
    except HfHubHTTPError:
        return  # the Hub answers; transformers says what it refuses
    except (OSError, httpx.HTTPError):  # of requests or of httpx, whichever this version of huggingface_hub uses
        problem = f"it is neither a folder nor in the cache, and the Hub at {constants.ENDPOINT} does not answer"
        if is_cached:
            sys.stderr.write(f"{label}: the Hub does not answer; the tokenizer comes from the cache after a while, and at once with HF_HUB_OFFLINE=1\n")
    if not is_cached:
        raise TokenizerUnavailable(f"{problem}; {_WHAT_TO_DO}")
