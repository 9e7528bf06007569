"""Tiny checkpoints and their tokenizer: both readers agree on them; text survives streaming; the command."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from typer.testing import CliRunner

from headwater.cli import app
from headwater.core.errors import InvalidInput
from headwater.engine.loader import load_model, load_tokenizer
from headwater.engine.make_model import BOS, CHAT_TEMPLATE, END, EOS, FAMILIES, SPECIAL, make_model
from headwater.engine.tokenizer import Tokenizer

transformers.utils.logging.disable_progress_bar()  # it starts a thread

TEXTS = ("", "plain", "Grüße, 世界 🌍🏽!\n\ttabs", "a<|end|>b<|nothing|>", "\x00\x7f\u200d", "  two  spaces  ")
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hallo, wie geht's? 世界"},
    {"role": "assistant", "content": "Gut."},
    {"role": "user", "content": "<|end|> is a token"},
]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / "llama"
    make_model("llama", directory)
    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_every_tensor_of_it(family: str, tmp_path: Path) -> None:
    made = make_model(family, tmp_path / "model", num_shards=2)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model, report = load(tmp_path / "model", output_loading_info=True)
    assert not any(report.values()), report
    assert type(model).__name__ == FAMILIES[family]["architectures"][0]  # type: ignore[index]
    assert sum(parameter.numel() for parameter in model.state_dict().values()) >= made.num_parameters
    assert load_model(tmp_path / "model").vocab_size == model.config.vocab_size


def test_weights_follow_from_the_seed(tmp_path: Path) -> None:
    contents = []
    for name, seed in (("one", 5), ("two", 5), ("three", 6)):
        assert make_model("qwen3", tmp_path / name, seed=seed).seed == seed
        contents.append((tmp_path / name / "model.safetensors").read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_only_an_empty_directory_is_written_into(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    make_model("llama", tmp_path / "empty")
    with pytest.raises(InvalidInput, match="is there and not an empty directory"):
        make_model("llama", tmp_path / "empty")
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="is there and not an empty directory"):
        make_model("llama", tmp_path / "file")
    with pytest.raises(InvalidInput, match=r"family 'gpt' is not known; known are llama, .* deepseek_v32"):
        make_model("gpt", tmp_path / "new")


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def test_tokens_are_those_of_transformers(model_dir: Path) -> None:
    ours = load_tokenizer(model_dir)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(model_dir)
    assert ours.vocab_size == len(theirs) == 264
    assert ours.bos_id == BOS
    assert ours.eos_ids == frozenset((EOS,))
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.encode("aé", add_special_tokens=False) == list("aé".encode())
    assert ours.encode("x<|end|>") == [BOS, ord("x"), END]


@pytest.mark.parametrize("generation", [True, False])
def test_prompts_are_those_of_transformers(model_dir: Path, generation: bool) -> None:
    ours = load_tokenizer(model_dir)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(model_dir)
    text = ours.apply_chat_template(MESSAGES, add_generation_prompt=generation)
    assert text == theirs.apply_chat_template(MESSAGES, add_generation_prompt=generation, tokenize=False)
    wanted = theirs.apply_chat_template(MESSAGES, add_generation_prompt=generation, return_dict=False)
    assert ours.encode(text, add_special_tokens=False) == wanted
    assert text.startswith("<|bos|><|system|>Be brief.<|end|><|user|>Hallo")
    assert text.endswith("<|assistant|>") is generation


# Whitespace rules, filters, loop controls, a namespace, tools: what real templates do.
ELABORATE = """
{%- set seen = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- continue %}
    {%- endif %}
    {%- set seen.count = seen.count + 1 %}
    [{{ loop.index0 }}] {{ message['content'] | trim | upper }}
{%- endfor %}
{%- if tools %}
{{ tools | tojson(indent=2) }}{{ {'ä': 1} | tojson }}
{%- endif %}
{{ seen.count }} {{ eos_token }}{{ enable_thinking | default('unset') }} {{ strftime_now('%Y') | length }}
"""


def with_template(model_dir: Path, target: Path, template: object, *, file: str | None = None) -> Path:
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((model_dir / name).read_bytes())
    config = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    if file is not None:
        (target / "chat_template.jinja").write_text(file)
    return target


def test_elaborate_templates_render_as_in_transformers(model_dir: Path, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "größer <b>"}}]
    directory = with_template(model_dir, tmp_path / "one", ELABORATE)
    ours = load_tokenizer(directory)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(directory)
    for given in (None, tools):
        text = ours.apply_chat_template(MESSAGES, tools=given, variables={"enable_thinking": "no"})
        wanted = theirs.apply_chat_template(
            MESSAGES, tools=given, enable_thinking="no", tokenize=False, add_generation_prompt=True
        )
        assert text == wanted
    assert "GUT." in text


def test_where_templates_come_from(model_dir: Path, tmp_path: Path) -> None:
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B{{ bos_token }}"}]
    both = load_tokenizer(with_template(model_dir, tmp_path / "named", named))
    assert both.apply_chat_template([]) == "A"
    assert both.apply_chat_template([], template="tool_use") == "B<|bos|>"
    assert load_tokenizer(with_template(model_dir, tmp_path / "file", "A", file="C")).apply_chat_template([]) == "C"
    none = load_tokenizer(with_template(model_dir, tmp_path / "none", None))
    assert not none.has_chat_template
    with pytest.raises(InvalidInput, match="no chat template"):
        none.apply_chat_template([])
    with pytest.raises(InvalidInput, match="no chat template 'rag'"):
        both.apply_chat_template([], template="rag")


def test_templates_that_refuse_or_misbehave_are_an_error(model_dir: Path, tmp_path: Path) -> None:
    refuses = load_tokenizer(with_template(model_dir, tmp_path / "1", "{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(InvalidInput, match="refuses these messages: roles must alternate"):
        refuses.apply_chat_template(MESSAGES)
    escapes = load_tokenizer(with_template(model_dir, tmp_path / "2", "{{ messages.append(1) }}"))
    with pytest.raises(InvalidInput, match="refuses these messages"):
        escapes.apply_chat_template(MESSAGES)
    with pytest.raises(InvalidInput, match="is no template"):
        load_tokenizer(with_template(model_dir, tmp_path / "3", "{% for %}"))
    with pytest.raises(InvalidInput, match="neither text nor a list"):
        load_tokenizer(with_template(model_dir, tmp_path / "4", [{"name": "x"}]))


def test_wrong_tokenizer_files_are_named(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidInput, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    assert load_tokenizer(tmp_path).eos_ids == frozenset()
    for content in ("{", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(InvalidInput, match=r"tokenizer_config\.json (cannot be read|must hold an object)"):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_gives_whole_characters_and_nothing_twice(model_dir: Path, text: str) -> None:
    tokenizer = load_tokenizer(model_dir)
    stream = tokenizer.stream(skip_special_tokens=False)
    pieces = [stream.push(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert stream.finish() == ""


def test_a_stream_of_anything_joins_to_the_decoded_whole(model_dir: Path) -> None:
    tokenizer = load_tokenizer(model_dir)
    chance = random.Random(1)
    for case in range(60):
        letters = [0xE4, 0xB8, 0x96, 0x80, 0xF0, 0x9F, 0x41] if case % 2 else range(tokenizer.vocab_size)
        ids = [chance.choice(letters) for _ in range(chance.randrange(200))]
        stream = tokenizer.stream()
        text = "".join(stream.push(token) for token in ids)
        assert tokenizer.decode(ids).startswith(text)
        assert text + stream.finish() == tokenizer.decode(ids)
        assert stream.push(ord("a")) == "a", "it begins anew"


def test_a_stream_keeps_up_with_nonsense(model_dir: Path) -> None:
    stream = load_tokenizer(model_dir).stream()
    shown = "".join(stream.push(0x80) for _ in range(500))
    assert len(shown) > 450


def test_a_stream_keeps_the_spaces_of_word_tokenizers() -> None:
    """A decoder that drops the first space of whatever it is given must not drop those between pieces."""
    vocabulary = {"▁the": 0, "▁cat": 1, "s": 2, "<unk>": 3, **{f"<0x{byte:02X}>": 4 + byte for byte in range(256)}}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(backend, special={}, templates={})
    ids = [0, 1, 2, *(4 + byte for byte in "é".encode()), 0, *(4 + byte for byte in "世".encode()), 1]
    stream = tokenizer.stream()
    assert (
        "".join(stream.push(token) for token in ids) + stream.finish() == tokenizer.decode(ids) == "the catsé the世 cat"
    )


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_model_and_says_so(tmp_path: Path) -> None:
    runner = CliRunner()
    told = runner.invoke(app, ["make-model", "deepseek_v32", str(tmp_path / "a"), "--seed", "4", "--json"])
    assert told.exit_code == 0, told.output
    document = json.loads(told.stdout)
    assert document["command"] == "make-model"
    assert document["seed"] == 4
    assert document["num_bytes"] == 4 * document["num_parameters"]
    assert load_model(tmp_path / "a", kv="fp8").name == "a"
    assert runner.invoke(app, ["make-model", "llama", str(tmp_path / "b")]).stdout.startswith(
        f"{tmp_path / 'b'}: a ran"
    )
    again = runner.invoke(app, ["make-model", "llama", str(tmp_path / "b")])
    assert again.exit_code == 1
    assert "not an empty directory" in again.stderr


def test_special_tokens_are_where_the_config_says() -> None:
    assert [SPECIAL[i - 256] for i in (BOS, EOS, END)] == ["<|bos|>", "<|eos|>", "<|end|>"]
    assert "<|end|>" in CHAT_TEMPLATE


# --- templates of other people ----------------------------------------------------------------------------------------

TRACKED = """
{%- set outer = 'before' %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
<|{{ loop.index }}|>{% generation %}{% set outer = 'inside' %} {{ message.content | trim }}{{ eos_token }}
{% endgeneration %}{{ outer }}
{%- else %}
<|{{ message.role }}|>{{ message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% generation %}{% endgeneration %}{% endif %}
"""


@pytest.mark.fault("B9")
def test_generation_blocks_render_as_in_transformers(model_dir: Path, tmp_path: Path) -> None:
    directory = with_template(model_dir, tmp_path / "one", TRACKED)
    ours = load_tokenizer(directory)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(directory)
    for prompt in (True, False):
        text = ours.apply_chat_template(MESSAGES, add_generation_prompt=prompt)
        assert text == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=prompt)
    assert "<|eos|>" in text
    with pytest.raises(InvalidInput, match="is no template"):
        load_tokenizer(with_template(model_dir, tmp_path / "two", "{% generation %}"))


@pytest.mark.fault("B9")
@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 'abc'.index('x') }}", "substring not found"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'x'.encode('latin-1').decode('nonsense') }}", "unknown encoding: nonsense"),
        ("{{ range(10000000) | list }}", "Range too big"),
        ("{{ messages[99].content.x }}", "no element 99"),
        ("{{ '%d' % 'x' }}", "%d format"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('') }}", "TemplateError"),
        ("{{ raise_exception('no ' * 1000) }}", r"no no no .* \.\.\.$"),
    ],
)
def test_whatever_a_template_raises_is_its_word_against_the_messages(
    template: str, says: str, model_dir: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(with_template(model_dir, tmp_path / "one", template))
    with pytest.raises(InvalidInput, match=f"the chat template refuses these messages: .*{says}") as raised:
        tokenizer.apply_chat_template(MESSAGES)
    assert len(str(raised.value)) < 600


def test_variables_of_a_template_cannot_replace_what_it_is_given(model_dir: Path) -> None:
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(InvalidInput, match=f"{name} cannot be given as variables"):
            load_tokenizer(model_dir).apply_chat_template(MESSAGES, variables={name: []})
