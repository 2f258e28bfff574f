"""A model's tokenizer with the names and defaults that users of transformers know."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from enginecore.frontend.text.chat import ChatTemplate
from enginecore.frontend.text.prompts import without_arrays
from enginecore.frontend.text.tokenizer import Tokenizer

_ENCODING_OPTIONS = ("padding", "truncation", "max_length", "return_tensors", "tokenizer_kwargs")


class HFTokenizer:
    """The engine's own tokenizer behind the methods of transformers' tokenizers that scripts use most.

    It pads and truncates nothing, and makes no tensors.
    """

    def __init__(self, tokenizer: Tokenizer, template: Callable[[str | None], ChatTemplate]) -> None:
        """`template` returns the compiled form of a given chat template, or the model's own for None."""
        self._tokenizer = tokenizer
        self._template = template

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, list[Any]]:
        """Return input_ids and attention_mask of a text, or lists of them for several."""
        if isinstance(text, str):
            return _encoding(self.encode(text, add_special_tokens))
        ids = self._tokenizer.encode_batch(text, add_special_tokens)
        return {"input_ids": ids, "attention_mask": [[1] * len(each) for each in ids]}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of one id or several."""
        ids = without_arrays(token_ids)
        return self._tokenizer.decode([ids] if isinstance(ids, int) else ids, skip_special_tokens)

    def batch_decode(
        self, sequences: Iterable[Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        """Return the text of each sequence of ids."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Return a text's tokens as the vocabulary spells them."""
        return self.convert_ids_to_tokens(self.encode(text, add_special_tokens))

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return ids as the vocabulary spells them; "" for an unknown one."""
        return [self._tokenizer.spelling(token) or "" for token in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token of the vocabulary, None for an unknown one; or a list of them."""
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self._tokenizer.token_id(token) for token in tokens]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **template_kwargs: Any,
    ) -> Any:
        """Return a conversation's prompt as ids, text (`tokenize=False`) or an encoding (`return_dict`).

        Several conversations make a list. `template_kwargs` are variables for the template.

        Raises:
            RequestError: there is no template, or it refuses the messages.
            TypeError: an option asks for padding, truncation or tensors.
        """
        for name in _ENCODING_OPTIONS:
            if template_kwargs.pop(name, None):
                raise TypeError(f"apply_chat_template: {name} is not supported")
        rendering: dict[str, Any] = {
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **template_kwargs,
        }

        def prepare(messages: Any) -> Any:
            text = self._template(chat_template).render(messages, **rendering)
            if not tokenize:
                return text
            ids = self.encode(text, add_special_tokens=False)
            return _encoding(ids) if return_dict else ids

        if conversation and not isinstance(conversation[0], Mapping):
            return [prepare(messages) for messages in conversation]
        return prepare(conversation)

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        return self._tokenizer.chat_template

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    def get_vocab(self) -> dict[str, int]:
        """Return every token's id by its spelling."""
        return self._tokenizer.vocabulary()

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self._tokenizer.special_ids)

    @property
    def special_tokens_map(self) -> dict[str, str]:
        return dict(self._tokenizer.special_tokens)

    @property
    def bos_token(self) -> str | None:
        return self._tokenizer.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._tokenizer.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self._tokenizer.special_tokens.get("pad_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._tokenizer.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        return self._tokenizer.eos_token_id

    @property
    def pad_token_id(self) -> int | None:
        return None if self.pad_token is None else self._tokenizer.token_id(self.pad_token)


def _encoding(ids: list[int]) -> dict[str, list[Any]]:
    return {"input_ids": ids, "attention_mask": [1] * len(ids)}
