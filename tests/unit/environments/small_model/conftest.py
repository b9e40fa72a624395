"""Fixtures for the tests of the small model."""

from __future__ import annotations

import pytest

from environments.demo.tokenizer import TextTokenizer, make_tokenizer


@pytest.fixture(scope="package")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer.load(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))
