"""Qwen 2.5 and Qwen 3: the Hermes format, which their chat templates write in the same way."""

from __future__ import annotations

from environments.tool_call_parsers.hermes import HermesParser


class QwenParser(HermesParser):
    """Parser of the format of Qwen 2.5 and Qwen 3. Qwen 3 Coder has a format of its own."""

    name = "qwen"
    end_of_turn = ("<|im_end|>", "<|endoftext|>")
