"""Text to ids and back as the model's directory says; streams never show part of a character."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from refusals import error_of
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from jaxpar.checkpoint import StreamDecoder, Tokenizer
from jaxpar.checkpoint.tokenizer import read_tokenizer
from jaxpar.errors import RequestError

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
CHATML = (
    "{% for message in messages %}\n"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}\n"
    "{% endfor %}\n"
    "    {% if add_generation_prompt %}\n"
    "<|assistant|>\n"
    "    {% endif %}"
)


def byte_level() -> tokenizers.Tokenizer:
    """One token a byte, with a begin token before each text: every character beyond ASCII takes several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return core


def sentence_piece() -> tokenizers.Tokenizer:
    """Words with their leading space, the first one's dropped; bytes for what is no word, as in Llama 2."""
    words = ["<unk>", "<s>", "\u2581the", "\u2581cat", "s", "\u2581", *(f"<0x{byte:02X}>" for byte in range(256))]
    core = tokenizers.Tokenizer(
        models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[], byte_fallback=True)
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens([AddedToken("<s>", special=True)])
    return core


def saved(directory: Path, core: tokenizers.Tokenizer, config: Any = None, template: str | None = None) -> Path:
    core.save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def opened(directory: Path) -> Tokenizer:
    tokenizer = read_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer


def stream(core: tokenizers.Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(core)
    return [*(decoder.push(token) for token in ids), decoder.finish()]


def test_text_is_encoded_with_the_special_tokens_that_the_directory_adds(tmp_path: Path):
    tokenizer = opened(saved(tmp_path, byte_level()))
    plain = tokenizer.encode("añ", add_special_tokens=False)
    assert len(plain) == 3
    assert tokenizer.encode("añ") == [256, *plain]
    assert tokenizer.encode("</s>", add_special_tokens=False) == [257]
    assert tokenizer.vocab_size == 258


@given(st.text())
def test_text_comes_back_from_its_ids(text: str):
    tokenizer = Tokenizer(byte_level(), None, Path("tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_left_out_of_text_unless_asked_for(tmp_path: Path):
    tokenizer = opened(saved(tmp_path, byte_level()))
    ids = [*tokenizer.encode("hi"), 257]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>hi</s>"


def test_a_prompt_is_neither_cut_nor_padded_where_the_saved_tokenizer_would(tmp_path: Path):
    core = byte_level()
    core.enable_truncation(max_length=4)
    core.enable_padding(length=20)
    assert len(opened(saved(tmp_path, core)).encode("a" * 10)) == 11


def test_a_character_comes_with_the_last_of_its_bytes():
    core = byte_level()
    pieces = stream(core, core.encode("é🙂x", add_special_tokens=False).ids)
    assert pieces == ["", "é", "", "", "", "🙂", "x", ""]


def test_a_character_that_is_cut_short_comes_at_the_end():
    core = byte_level()
    ids = core.encode("a🙂", add_special_tokens=False).ids[:-1]
    assert stream(core, ids) == ["a", "", "", "", "\ufffd"]


def test_leading_spaces_are_those_of_the_whole_text():
    core = sentence_piece()
    the, cat, s, begin = (core.token_to_id(token) for token in ["\u2581the", "\u2581cat", "s", "<s>"])
    assert stream(core, [the, cat, s, begin, the]) == ["the", " cat", "s", "", " the", ""]
    assert stream(core, [begin, the, cat]) == ["", "the", " cat", ""]


@given(st.lists(st.integers(0, 257), max_size=40))
def test_the_pieces_of_a_stream_of_bytes_are_its_text(ids: list[int]):
    core = byte_level()
    assert "".join(stream(core, ids)) == core.decode(ids)


@given(st.lists(st.sampled_from(["\u2581the", "\u2581cat", "s", "\u2581", "<s>", "é", "🙂"]), max_size=20))
def test_the_pieces_of_a_stream_of_words_are_its_text(words: list[str]):
    core = sentence_piece()
    ids = []
    for word in words:
        known = core.token_to_id(word)
        ids += [core.token_to_id(f"<0x{byte:02X}>") for byte in word.encode()] if known is None else [known]
    assert "".join(stream(core, ids)) == core.decode(ids)


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": CHATML, "eos_token": "</s>"},
        {"chat_template": CHATML, "eos_token": {"content": "</s>", "special": True}},
        {
            "chat_template": [{"name": "tools", "template": ""}, {"name": "default", "template": CHATML}],
            "eos_token": "</s>",
        },
    ],
)
def test_a_chat_is_rendered_by_the_template_of_the_configuration(tmp_path: Path, config: dict[str, Any]):
    tokenizer = opened(saved(tmp_path, byte_level(), config))
    said = "<|system|>Be brief.</s>\n<|user|>Hi</s>\n"
    assert tokenizer.apply_chat_template(CHAT) == said + "<|assistant|>\n"
    assert tokenizer.apply_chat_template(CHAT, add_generation_prompt=False) == said


def test_a_template_in_a_file_of_its_own_wins(tmp_path: Path):
    tokenizer = opened(saved(tmp_path, byte_level(), {"chat_template": "old"}, "new {{ messages[0].content }}"))
    assert tokenizer.apply_chat_template(CHAT) == "new Be brief."


def test_templates_have_the_helpers_that_hugging_face_gives(tmp_path: Path):
    template = (
        "{% for message in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ {'q': '<é>'} | tojson }}{% endgeneration %}{% endfor %} {{ strftime_now('%Y') | length }}"
    )
    tokenizer = opened(saved(tmp_path, byte_level(), template=template))
    assert tokenizer.apply_chat_template(CHAT) == '{"q": "<é>"} 4'


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content }}", "refuses the messages"),
        ("{{ messages.append(1) }}", "refuses the messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses the messages"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_what_a_template_refuses_is_the_request_s_error(tmp_path: Path, template: str, expected: str):
    tokenizer = opened(saved(tmp_path, byte_level(), template=template))
    assert expected in error_of(lambda: tokenizer.apply_chat_template(CHAT), RequestError)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "at least one message"),
        ([{"role": "user"}], "message 0"),
        ([CHAT[0], "hello"], "message 1 of the chat is 'hello'"),
    ],
)
def test_a_chat_that_is_none_is_refused(tmp_path: Path, messages: Any, expected: str):
    tokenizer = opened(saved(tmp_path, byte_level(), template=CHATML))
    assert expected in error_of(lambda: tokenizer.apply_chat_template(messages), RequestError)


def test_a_model_without_a_template_asks_for_plain_text(tmp_path: Path):
    tokenizer = opened(saved(tmp_path, byte_level(), {}))
    message = error_of(lambda: tokenizer.apply_chat_template(CHAT), RequestError)
    assert "has no chat template; give the prompt as plain text" in message


def test_a_directory_without_tokenizer_json_has_no_tokenizer(tmp_path: Path):
    assert read_tokenizer(tmp_path) is None


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("tokenizer.json", "{}", "; fetch it again"),
        ("tokenizer.json", "\x00", "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json holds a JSON list"),
        ("tokenizer_config.json", '{"chat_template": 1}', "chat_template is 1, expected a template"),
        ("tokenizer_config.json", '{"chat_template": ["x"]}', "chat_template is ['x'], expected a list of dict"),
        ("tokenizer_config.json", '{"eos_token": 2}', "eos_token is 2, expected a token's text"),
        ("chat_template.jinja", "{% if %}", "chat_template.jinja: the chat template is not valid Jinja"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, file: str, content: str, expected: str):
    saved(tmp_path, byte_level())
    (tmp_path / file).write_text(content)
    assert expected in error_of(lambda: read_tokenizer(tmp_path))
