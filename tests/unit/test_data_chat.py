"""Rendering of prompts: the template once, no extra special tokens, one length."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from zbgrpo.data.chat import PromptRenderer
from zbgrpo.data.rows import Row, load_rows
from zbgrpo.errors import ModelError

transformers = pytest.importorskip("transformers")

TEMPLATE = (
    "<s>{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_tokenizer(chat_template: str | None = TEMPLATE) -> Any:
    """Byte-level; writes `<s>` before every text that is encoded with special tokens, as Llama's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<s>", "</s>"])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", chat_template=chat_template
    )


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def rows_of_lengths(lengths: list[int]) -> list[Row]:
    """Rows whose content makes prompts of these lengths with TEMPLATE: 1 + 6 + content + 1 + 11 tokens."""
    return [Row([user("x" * (length - 19))], "1", None, {}, line) for line, length in enumerate(lengths, start=1)]


def test_template_is_rendered_once_with_one_beginning_token() -> None:
    tokenizer = make_tokenizer()
    assert tokenizer("a")["input_ids"][0] == 256  # the trap is set: plain encoding adds a second one
    ids = PromptRenderer(tokenizer, None, 512).render([user("Hi")])
    assert tokenizer.decode(ids) == "<s>[user]Hi\n[assistant]"
    assert ids.count(256) == 1
    assert all(type(token) is int for token in ids)


@pytest.mark.parametrize("system_prompt", [None, ""])
def test_no_system_prompt_adds_no_message(system_prompt: str | None) -> None:
    tokenizer = make_tokenizer()
    ids = PromptRenderer(tokenizer, system_prompt, 512).render([user("Hi")])
    assert "system" not in tokenizer.decode(ids)


def test_system_prompt_comes_first_unless_the_row_has_one() -> None:
    tokenizer = make_tokenizer()
    renderer = PromptRenderer(tokenizer, "Think.", 512)
    messages = [user("Hi")]
    assert tokenizer.decode(renderer.render(messages)) == "<s>[system]Think.\n[user]Hi\n[assistant]"
    assert messages == [user("Hi")]  # the row itself stays as it was
    own = [{"role": "system", "content": "Own."}, user("Hi")]
    assert tokenizer.decode(renderer.render(own)) == "<s>[system]Own.\n[user]Hi\n[assistant]"


def test_tokenizer_without_template_names_the_flag() -> None:
    with pytest.raises(ModelError, match="--tokenizer-path"):
        PromptRenderer(make_tokenizer(chat_template=None), None, 512)


def test_template_that_refuses_is_a_model_error() -> None:
    renderer = PromptRenderer(make_tokenizer(), "Think.", 512)
    with pytest.raises(ModelError, match="roles system, tool: no tools here"):
        renderer.render([{"role": "tool", "content": "1"}])


def test_limit_is_on_templated_ids_and_inclusive() -> None:
    renderer = PromptRenderer(make_tokenizer(), None, 40)
    rows = rows_of_lengths([39, 40, 41, 30, 400])
    assert [len(renderer.render(row.messages)) for row in rows] == [39, 40, 41, 30, 400]
    assert renderer.usable_rows(rows) == ([0, 1, 3], 2)


def test_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbgrpo.data.chat._BATCH_ROWS", 3)
    renderer = PromptRenderer(make_tokenizer(), None, 40)
    lengths = [20 + (7 * index) % 41 for index in range(50)]
    rows = rows_of_lengths(lengths)
    expected = [index for index, length in enumerate(lengths) if length <= 40]
    assert renderer.usable_rows(rows) == (expected, 50 - len(expected))
    assert renderer.render_batch([row.messages for row in rows]) == [renderer.render(row.messages) for row in rows]
    assert renderer.usable_rows([]) == ([], 0)
    assert renderer.render_batch([]) == []


def test_real_rows_are_split_by_the_same_length() -> None:
    folder = os.environ.get("ZBGRPO_TEST_DATA")
    if not folder:
        pytest.skip("ZBGRPO_TEST_DATA is not set")
    rows = load_rows(str(Path(folder) / "gsm8k_train.jsonl"), skip_bad_rows=False).rows
    renderer = PromptRenderer(make_tokenizer(), "Think.", 300)
    usable = renderer.usable_rows(rows)
    assert len(usable.indices) + usable.num_too_long == len(rows) == 7473
    assert 0 < usable.num_too_long < len(rows)
    kept = set(usable.indices)
    for index in range(0, len(rows), 97):
        assert (len(renderer.render(rows[index].messages)) <= 300) == (index in kept)
