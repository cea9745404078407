"""From messages to prompt ids. The one place where a prompt is rendered, and so the one length of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from zbgrpo.data.rows import Row
from zbgrpo.errors import ModelError

_BATCH_ROWS = 1024


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    chat_template: Any

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any: ...

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Any: ...


class UsableRows(NamedTuple):
    """Which rows fit the prompt limit."""

    indices: list[int]  # into the rows given, ascending
    num_too_long: int


class PromptRenderer:
    """Renders prompts with the chat template of one tokenizer.

    The template is applied once to all messages of a row and asks for an answer (add_generation_prompt). Its text is
    encoded without extra special tokens: a beginning-of-sequence token is there once if the template writes one, never
    twice.
    """

    def __init__(self, tokenizer: ChatTokenizer, system_prompt: str | None, max_prompt_tokens: int) -> None:
        """`system_prompt` is put before messages that have no system message; None or empty puts none.

        Raises `ModelError` when the tokenizer has no chat template.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                "the tokenizer has no chat template (base models often lack one): give one that has, for instance that "
                "of the instruct model of the same family, with --tokenizer-path"
            )
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._max_prompt_tokens = max_prompt_tokens

    def render(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Prompt ids of one conversation, whatever its length. Raises `ModelError` when the template refuses it."""
        return self.render_batch([messages])[0]

    def render_batch(self, conversations: Sequence[Sequence[dict[str, Any]]]) -> list[list[int]]:
        """The same for many conversations, in order; an id list per conversation, unpadded."""
        if not conversations:
            return []
        texts = [self._text(messages) for messages in conversations]
        encoded = self._tokenizer(texts, add_special_tokens=False)
        return [list(ids) for ids in encoded["input_ids"]]

    def usable_rows(self, rows: Sequence[Row]) -> UsableRows:
        """Rows whose templated prompt has at most `max_prompt_tokens` ids; the others are counted."""
        indices: list[int] = []
        for start in range(0, len(rows), _BATCH_ROWS):
            batch = self.render_batch([row.messages for row in rows[start : start + _BATCH_ROWS]])
            indices.extend(start + place for place, ids in enumerate(batch) if len(ids) <= self._max_prompt_tokens)
        return UsableRows(indices, len(rows) - len(indices))

    def _text(self, messages: Sequence[dict[str, Any]]) -> str:
        import jinja2

        conversation = list(messages)
        if self._system_prompt and not any(message["role"] == "system" for message in conversation):
            conversation.insert(0, {"role": "system", "content": self._system_prompt})
        try:
            return str(self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
        except jinja2.TemplateError as error:
            roles = ", ".join(message["role"] for message in conversation)
            raise ModelError(
                f"the chat template refuses messages with the roles {roles}: {error} "
                "(-s '' leaves the system message out; --tokenizer-path takes another tokenizer)"
            ) from error
