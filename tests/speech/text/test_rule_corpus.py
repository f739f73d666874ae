"""Normalisation compared with a corpus from published rules of the languages, of which a share is held out."""

from tests.speech.text.rule_corpus import HELD_OUT, LANGUAGES, UNSUPPORTED, cases, failures, is_held_out, right
from tests.tables import each_row

# Right cases of the held-out share, as measured; the share is not used while rules are developed.
HELD_OUT_RIGHT = {"uz": 141, "ru": 163, "en": 166}


@each_row(*LANGUAGES)
def test_the_corpus_has_300_cases_in_two_shares(language):
    rows = cases(language)
    assert len({case.written for case in rows}) == len(rows) >= 300
    assert len({case.category for case in rows}) >= 15
    assert all(case.source and case.spoken for case in rows)
    assert [case for case in rows if (case.share == HELD_OUT) != is_held_out(language, case.written)] == []
    assert {case.share for case in rows} <= {HELD_OUT, UNSUPPORTED, "development"}


@each_row(*LANGUAGES)
def test_every_supported_case_is_right(language):
    """A case that is marked as unsupported fails, so that its mark is removed when it is not true any more."""
    wrong = [(case, said) for case, said in failures(language) if case.share != HELD_OUT]
    assert [(case.written, said, case.spoken) for case, said in wrong if case.share != UNSUPPORTED] == []
    assert {case for case, _ in wrong} == {case for case in cases(language) if case.share == UNSUPPORTED}


@each_row(*LANGUAGES)
def test_held_out_accuracy_does_not_fall(language):
    good, total = right(language, held_out=True)
    assert total > 100
    assert good >= HELD_OUT_RIGHT[language]
