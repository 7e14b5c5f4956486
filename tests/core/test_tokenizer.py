from __future__ import annotations

from headrace.core.tokenizer import Tokenizer
from headrace.engines.vocab import Vocabulary
from headrace.testing import ScriptedTokenizer


def test_the_port_is_what_the_tokenizers_offer() -> None:
    doubles: Tokenizer = ScriptedTokenizer()
    assert doubles.piece(doubles.encode("a", special=False)[0]) == b"a"
    real: type[Tokenizer] = Vocabulary
    assert callable(real.encode)
