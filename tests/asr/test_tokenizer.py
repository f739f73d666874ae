"""Vocabularies of stock tokenizers; transformers' own decoding is the reference."""

import json
import logging

import numpy as np
import pytest
import torch

from gputrain.asr.load import greedy_text, load_recogniser
from gputrain.asr.pretrained import format_languages, read_tokenizer
from gputrain.errors import UserError
from tests.asr.models import change_json, tiny_model, transformers_folder, written_by_transformers
from tests.tables import each_row

WAVE = (np.random.default_rng(0).normal(size=9000) * 0.1).astype(np.float32)
LETTERS = {symbol: number for number, symbol in enumerate(["|", *"abcdefgh", "[UNK]", "[PAD]"])}


def write_tokenizer(folder, symbols, **config):
    (folder / "vocab.json").write_text(json.dumps(symbols))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def vocabulary_of(folder, rows, language=None):
    return read_tokenizer(folder).vocabulary(language, rows, None)


def test_a_stock_vocabulary_in_capitals(tmp_path):
    """These are the ids of facebook/wav2vec2-base-960h, shortened."""
    symbols = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "|": 4, "E": 5, "T": 6, "'": 8, "A": 7}
    vocabulary = vocabulary_of(write_tokenizer(tmp_path, symbols, pad_token="<pad>"), 9)
    assert (vocabulary.upper, vocabulary.blank, vocabulary.unknown_id, vocabulary.delimiter) == (True, 0, 3, 4)
    assert vocabulary.ids("tea't at") == [6, 5, 7, 8, 6, 4, 7, 6]
    assert vocabulary.text_of([6, 5, 7, 4, 7]) == "tea a"
    assert vocabulary.unknown("tea z") == ["z"]


def test_a_vocabulary_of_a_tokenizer_with_other_names_and_holes(tmp_path):
    symbols = {"а": 0, "б": 3, "[UNK]": 4, "[PAD]": 5, "|": 1}
    (tmp_path / "added_tokens.json").write_text('{"<s>": 6, "</s>": 7}')
    token = {"content": "[PAD]", "lstrip": False}
    vocabulary = vocabulary_of(write_tokenizer(tmp_path, symbols, pad_token=token), 8)
    assert vocabulary.symbols == ("а", "|", "<unused 2>", "б", "[UNK]", "[PAD]", "<s>", "</s>")
    assert (vocabulary.blank, vocabulary.delimiter, vocabulary.unknown_id, vocabulary.upper) == (5, 1, 4, False)
    assert vocabulary.normalize("А-б 'а'") == "а б а"  # It has no hyphen.


def test_a_vocabulary_of_many_languages(tmp_path):
    symbols = {"eng": {"<pad>": 0, "a": 1}, "uzb-script_latin": {"<pad>": 0, "<unk>": 1, "|": 2, "o": 3, "'": 4}}
    tokenizer = read_tokenizer(write_tokenizer(tmp_path, symbols, target_lang="uzb-script_latin"))
    vocabulary = tokenizer.vocabulary(tokenizer.target_language, 5, None)
    assert vocabulary.normalize("O‘z") == "o'z"  # The normal okina has no symbol there.
    assert vocabulary.ids("o'") == [3, 4]
    assert (tokenizer.rows_of("eng"), tokenizer.fits("eng", 4), tokenizer.fits("eng", 1)) == (2, True, False)
    tokenizer = read_tokenizer(write_tokenizer(tmp_path, symbols))
    assert tokenizer.target_language is None
    with pytest.raises(UserError, match="vocabularies of 2 languages"):
        tokenizer.rows_of(None)
    with pytest.raises(UserError, match="no vocabulary of uz"):
        tokenizer.rows_of("uz")


def test_languages_that_resemble_one_come_first():
    known = [f"{first}{second}x" for first in "abc" for second in "abcde"] + ["uzb-script_latin", "uzb-script_cyrillic"]
    assert format_languages(known, like="uzb").startswith("uzb-script_cyrillic, uzb-script_latin, aax, ")
    assert format_languages(known).endswith(" and 9 more")


@each_row(
    ("{", "not valid JSON"), ("[]", "expected a mapping"), ('{"a": 0, "b": 0, "<pad>": 1}', "its ids"),
    ('{"a": "0", "<pad>": 1}', "its ids"), ('{"a": 0}', "no symbol of the blank"), ("{}", "names no symbol"),
    ('{"a": true, "<pad>": 0}', "its ids"), ('{"a": 999999999, "<pad>": 0}', "its ids"),
)  # fmt: skip
def test_malformed_vocabularies(tmp_path, content, fault):
    (tmp_path / "vocab.json").write_text(content)
    with pytest.raises(UserError, match=fault):
        vocabulary_of(tmp_path, 2)
    assert read_tokenizer(tmp_path / "nowhere") is None


def folder_of(path, rows):
    """Writes a folder of transformers whose head has so many rows, with the letters as vocab.json."""
    folder = transformers_folder(path)
    tiny_model(vocab_size=rows, pad_token_id=10).save_pretrained(folder)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "<s>", "eos_token": "</s>"}
    settings = {"tokenizer_class": "Wav2Vec2CTCTokenizer", "word_delimiter_token": "|", **names}
    return write_tokenizer(folder, LETTERS, **settings)


def beyond_the_head(folder):
    (folder / "added_tokens.json").write_text('{"<s>": 11, "</s>": 12}')


def beyond_the_head_in_settings(folder):
    added = {str(number): {"content": token, "special": True} for token, number in (("<s>", 11), ("</s>", 12))}
    change_json(folder / "tokenizer_config.json", added_tokens_decoder=added)


def names_in_special_tokens_map(folder):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    names = {name: settings.pop(name) for name in ("pad_token", "unk_token", "bos_token", "eos_token")}
    (folder / "special_tokens_map.json").write_text(json.dumps({**names, "pad_token": {"content": "[PAD]"}}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def added_under_a_number_of_the_vocabulary(folder):
    added = {"3": {"content": "<s>", "special": True}}  # As a tokenizer leaves it that was set to another language.
    change_json(folder / "tokenizer_config.json", added_tokens_decoder=added)


def another_delimiter(folder):
    symbols = {"_" if symbol == "|" else symbol: number for symbol, number in LETTERS.items()}
    (folder / "vocab.json").write_text(json.dumps(symbols))
    change_json(folder / "tokenizer_config.json", word_delimiter_token="_")


def capitals_and_small_letters(folder):
    symbols = {symbol.upper() if symbol in "ace" else symbol: number for symbol, number in LETTERS.items()}
    (folder / "vocab.json").write_text(json.dumps(symbols))
    change_json(folder / "tokenizer_config.json", do_lower_case=True)


@each_row(
    (11, lambda folder: None), (11, beyond_the_head), (11, beyond_the_head_in_settings), (13, beyond_the_head),
    (13, beyond_the_head_in_settings), (11, names_in_special_tokens_map), (11, another_delimiter),
    (11, capitals_and_small_letters), (11, added_under_a_number_of_the_vocabulary),
)  # fmt: skip
def test_texts_are_those_of_transformers(tmp_path, rows, change):
    folder = folder_of(tmp_path / f"{rows}_{change.__name__}", rows)
    change(folder)
    recogniser = load_recogniser(folder, torch.device("cpu"))
    ours = greedy_text(recogniser.log_probs([WAVE])[0].numpy(), recogniser.vocabulary)
    # transformers 5 leaves a delimiter as it is that is not "|".
    assert ours == written_by_transformers(folder, WAVE).replace("_", " ")
    assert len(ours) > 4
    assert len(recogniser.vocabulary.symbols) == rows
    assert recogniser.vocabulary.blank == 10


def test_letters_beyond_the_head_and_rows_without_names_are_said(tmp_path, caplog):
    folder = write_tokenizer(tmp_path, {**LETTERS, "x": 11, "y": 12})
    with caplog.at_level(logging.WARNING):
        assert vocabulary_of(folder, 12).symbols[-1] == "x"
    assert "1 of its symbols, such as y, are beyond the 12 rows" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert vocabulary_of(write_tokenizer(tmp_path, LETTERS), 20).text_of([19]) == "<unused 19>"
    assert "names 11 of the 20 rows" in caplog.text


def test_a_vocabulary_of_another_model_is_refused(tmp_path):
    """Five letters beyond the head are no special tokens that were added to it."""
    symbols = {**LETTERS, **{letter: 11 + at for at, letter in enumerate("vwxyz")}}
    assert vocabulary_of(write_tokenizer(tmp_path, symbols), 12).symbols[-1] == "v"
    with pytest.raises(UserError, match=r"5 of its symbols, such as v, are beyond the 11 rows .* another model"):
        vocabulary_of(write_tokenizer(tmp_path, symbols), 11)
    with pytest.raises(UserError, match="names no symbol of the model's head"):
        vocabulary_of(write_tokenizer(tmp_path, {}), 11)


def test_the_blank_of_the_configuration_counts_if_the_tokenizer_names_none(tmp_path):
    symbols = {symbol: number for symbol, number in LETTERS.items() if number < 10}
    tokenizer = read_tokenizer(write_tokenizer(tmp_path, symbols))
    assert tokenizer.vocabulary(None, 11, 10).blank == 10
    with pytest.raises(UserError, match="no symbol of the blank"):
        tokenizer.vocabulary(None, 11, 11)


def test_a_sharp_s_among_capitals(tmp_path):
    symbols = {symbol: number for number, symbol in enumerate(["<pad>", "|", *"GROß"])}
    vocabulary = vocabulary_of(write_tokenizer(tmp_path, symbols), 6)
    assert vocabulary.text_of([2, 3, 4, 5]) == "groß"
    assert vocabulary.ids("groß") == [2, 3, 4, 5]
