"""Settings that a model file decides: biases by text, sampling defaults stored in the file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from models import tiny

from specdec_cli.errors import UsageError
from specdec_cli.llama import Model
from specdec_cli.settings import resolve_biases, split_bias, with_model_defaults
from specdec_cli.tiny import Vocabulary, byte_level_vocabulary
from specdec_cli.types import SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model(tiny(tmp_path_factory.mktemp("models")), vocab_only=True) as model:
        yield model


def with_settings(folder: Path, settings: dict[str, float | int], name: str = "set") -> Path:
    """A tiny model whose file has sampling settings."""
    plain = byte_level_vocabulary()
    metadata = dict(plain.metadata) | {f"general.sampling.{key}": value for key, value in settings.items()}
    return tiny(folder, name, vocabulary=Vocabulary(plain.tokens, plain.types, metadata, plain.favored))


class TestBias:
    @pytest.mark.parametrize(
        ("text", "parts"),
        [
            ("15043=-2.5", ("15043", -2.5)),
            ("==1", ("=", 1.0)),
            ("a=b=c=2e1", ("a=b=c", 20.0)),
            (" the=-inf", (" the", -math.inf)),
            ("x=inf", ("x", math.inf)),
            ("\n=0", ("\n", 0.0)),
        ],
    )
    def test_last_equals_sign_parts(self, text: str, parts: tuple[str, float]) -> None:
        assert split_bias(text) == parts

    @pytest.mark.parametrize("text", ["", "=", "=1", "a", "a=", "a=b", "5=1,5", "=="])
    def test_other_forms(self, text: str) -> None:
        with pytest.raises(UsageError, match="TOKEN=BIAS"):
            split_bias(text)

    def test_by_id_and_by_text(self, model: Model) -> None:
        texts = ["65=1.5", "B=-1", " the=-inf", "==2", "<|im_end|>=-3"]
        found = resolve_biases(texts, model)
        assert found[0] == (65, 1.5)
        assert [model.piece(token, special=True) for token, _ in found] == [b"A", b"B", b" the", b"=", b"<|im_end|>"]
        assert [bias for _, bias in found] == [1.5, -1, -math.inf, 2, -3]

    def test_digits_are_an_id(self, model: Model) -> None:
        assert resolve_biases(["007=1", "319=1"], model) == ((7, 1.0), (319, 1.0))
        with pytest.raises(UsageError, match="there is no token 320; the model has 320"):
            resolve_biases(["320=1"], model)

    @pytest.mark.parametrize("text", [" house", "é", "-1", "²"])
    def test_text_of_several_tokens_names_them(self, model: Model, text: str) -> None:
        with pytest.raises(UsageError, match="no single token but") as caught:
            resolve_biases([f"{text}=1"], model)
        for token in model.tokenize(text, add_special=False, parse_special=True):
            assert f"= {token}" in caught.value.message

    def test_infinite(self) -> None:
        assert SamplingParams(logit_bias=((1, -math.inf),)).logit_bias == ((1, -math.inf),)
        for bias in (math.inf, math.nan):
            with pytest.raises(UsageError, match="logit-bias of token 1 must be a number"):
                SamplingParams(logit_bias=((1, bias),))


ALL = {
    "temp": 0.25, "top_k": 7, "top_p": 0.5, "min_p": 0.125, "xtc_probability": 0.5, "xtc_threshold": 0.25,
    "penalty_last_n": 9, "penalty_repeat": 1.5, "mirostat": 2, "mirostat_tau": 4.5, "mirostat_eta": 0.25,
}  # fmt: skip


class TestModelDefaults:
    def test_every_key(self, tmp_path: Path) -> None:
        with Model(with_settings(tmp_path, ALL), vocab_only=True) as model:
            params, found = with_model_defaults(SamplingParams(), model, ())
        expected = SamplingParams(
            temperature=0.25, top_k=7, top_p=0.5, min_p=0.125, xtc_probability=0.5, xtc_threshold=0.25,
            repeat_last_n=9, repeat_penalty=1.5, mirostat=2, mirostat_tau=4.5, mirostat_eta=0.25,
        )  # fmt: skip
        assert params == expected
        assert list(found.values()) == list(ALL.values())
        assert all(type(getattr(params, name)) is type(getattr(SamplingParams(), name)) for name in found)

    def test_what_the_user_gave_wins(self, tmp_path: Path) -> None:
        with Model(with_settings(tmp_path, ALL), vocab_only=True) as model:
            mine = SamplingParams(temperature=0.8, top_k=3)
            params, found = with_model_defaults(mine, model, {"temperature", "top_k"})
        assert (params.temperature, params.top_k, params.top_p) == (0.8, 3, 0.5)
        assert not {"temperature", "top_k"} & set(found)

    def test_nothing_in_the_file(self, model: Model) -> None:
        params = SamplingParams(seed=1)
        assert with_model_defaults(params, model, ()) == (params, {})

    @pytest.mark.parametrize(
        ("settings", "problem"),
        [
            ({"temp": -1.0}, "temperature must be"),
            ({"top_p": 1.5}, "top-p must be"),
            ({"temp": math.nan}, "temperature must be"),
            ({"top_k": 2**31}, "top-k must be"),
        ],
    )
    def test_bad_values(self, tmp_path: Path, settings: dict[str, float], problem: str) -> None:
        with (
            Model(with_settings(tmp_path, settings), vocab_only=True) as model,
            pytest.raises(UsageError, match=problem),
        ):
            with_model_defaults(SamplingParams(), model, ())

    @pytest.mark.parametrize("text", ["warm", "nan", "inf", ""])
    def test_values_that_are_no_numbers(self, text: str) -> None:
        class File:
            def metadata(self, key: str) -> str | None:
                return text if key.endswith(".top_k") else None

        with pytest.raises(UsageError, match=r"general\.sampling\.top_k"):
            with_model_defaults(SamplingParams(), File(), ())
