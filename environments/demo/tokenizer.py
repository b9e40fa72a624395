"""A small tokenizer with the ChatML format, made in a local folder without network: for demonstrations and tests.

`transformers.AutoTokenizer.from_pretrained(folder)` loads the folder, and `TextTokenizer.load(folder)` loads it without the import of transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # type: ignore[import-untyped]  # a compiled module without types

END_OF_TURN = "<|im_end|>"
START_OF_TURN = "<|im_start|>"
_END_OF_TEXT = "<|endoftext|>"
_VOCABULARY_SIZE = 1024
#: The texts whose frequent parts become tokens. Every other text is encoded as well, because every byte is a token.
_TRAINING_TEXTS = (
    "system user assistant tool",
    'You are given tools. {"type": "function", "function": {"name": "terminal", "description": "Run a shell command in the workspace.", "parameters": '
    '{"type": "object", "properties": {"command": {"type": "string", "description": "The command."}}, "required": ["command"]}}}',
    '<tool_call>\n{"name": "terminal", "arguments": {"command": "ls -la && cat README.md"}}\n</tool_call>',
    '<tool_response>\n{"success": true, "output": "a file and a folder of the project\\n", "exit_code": 0}\n</tool_response>',
    "def add(first, second):\n    return first + second\n\n\nimport pytest\n\n\nclass TestAdd:\n    def test_add(self):\n        assert add(1, 2) == 3\n",
    "The test of the function failed with an error, so the bug is in the file that I read. I change the line and run the tests again.",
)
#: Each message is rendered alone, so that the prompt of the next turn starts with the prompt and the answer of this one.
_CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\nThese functions can be called:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nA call is written as:\\n<tool_call>\\n{"name": <name>, "arguments": <arguments as JSON>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first and tools %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>tool\\n<tool_response>\\n' + (message.content or '') + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": ' }}{{- call.function.name | tojson }}{{- ', "arguments": ' }}
            {%- if call.function.arguments is string %}{{- call.function.arguments }}{%- else %}{{- call.function.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def make_tokenizer(folder: Path) -> Path:
    """Make the tokenizer in a folder. The same files come out every time.

    Args:
        folder: the folder, which is created if it does not exist. Files of the same names are replaced.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _train().save(str(folder / "tokenizer.json"))
    specials = {"eos_token": END_OF_TURN, "pad_token": _END_OF_TEXT}
    config: dict[str, Any] = {
        **specials,
        "tokenizer_class": "PreTrainedTokenizerFast",  # the name that both transformers 4 and 5 know
        "clean_up_tokenization_spaces": False,  # decoding returns the encoded text
        "model_max_length": 1_000_000,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (folder / "special_tokens_map.json").write_text(json.dumps(specials, indent=2))
    return folder


def _train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY_SIZE,
        special_tokens=[_END_OF_TEXT, START_OF_TURN, END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXTS, trainer)
    return tokenizer


@dataclass(frozen=True)
class TextTokenizer:
    """Encodes and decodes text with the tokenizer of a folder.

    Args:
        tokenizer: the loaded tokenizer.
        end_of_turn: the text of the token that ends a turn of the model.
    """

    tokenizer: Tokenizer
    end_of_turn: str

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load a tokenizer that `make_tokenizer` or transformers saved.

        Args:
            folder: the folder, with `tokenizer.json` and `tokenizer_config.json`.

        Raises:
            FileNotFoundError: one of the files does not exist.
            ValueError: the tokenizer names no token that ends a turn.
        """
        names = ("tokenizer.json", "tokenizer_config.json")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(f"The folder {folder} has no {' and no '.join(missing)}. Give the folder of a fast tokenizer.")
        end = json.loads((folder / names[1]).read_text()).get("eos_token")
        end = end.get("content") if isinstance(end, dict) else end  # older versions of transformers save the token with its properties
        tokenizer = Tokenizer.from_file(str(folder / names[0]))
        if not isinstance(end, str) or tokenizer.token_to_id(end) is None:
            raise ValueError(f"The tokenizer in {folder} names no eos_token of its vocabulary.")
        return cls(tokenizer, end)

    @cached_property
    def end_of_turn_id(self) -> int:
        """The token that ends a turn of the model."""
        return int(self.tokenizer.token_to_id(self.end_of_turn))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without tokens that the text does not have."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, with that of special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))
