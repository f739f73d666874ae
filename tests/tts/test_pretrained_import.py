"""Import of voices from Piper and Coqui. Piper's own network is the reference for its weights; Coqui's is not available
as a package, so this file has the names and shapes of its source (https://github.com/idiap/coqui-ai-TTS).

Shape suffixes: B items, S symbols, T samples, N frequencies, F frames, R rows of a table, 1 channel.
"""

import json
import logging
import pathlib
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from gputrain.audio.discriminators import vits_discriminators
from gputrain.audio.mel import magnitudes
from gputrain.errors import UserError
from gputrain.speech.text.frontend import BOS, EOS, PAD, frontend
from gputrain.tts.architecture import VoicePreset, voice_architecture
from gputrain.tts.model import Voice
from gputrain.tts.pretrained_import import PATHS, coqui_labels, file_at
from gputrain.weights import read_foreign
from tests.tables import each_row
from tests.tts.voices import begun_from, small

UZBEK = frontend("uz")
PIPERS_ROWS = 256


def our_discriminators() -> nn.ModuleDict:
    return nn.ModuleDict({"waves": vits_discriminators(32)})


# Piper ----------------------------------------------------------------------------------------------------------------


class Pipers(NamedTuple):
    """A voice in the form in which Piper's trainer saves it."""

    file: Path
    network: Any
    discriminators: dict[str, nn.Module]  # by Piper's names
    ids: dict[str, int]


def pipers(folder: Path, preset: VoicePreset, speakers: int) -> Pipers:
    """Writes a checkpoint with random weights, and symbols in another order."""
    models = pytest.importorskip("piper.train.vits.models")
    sizes = voice_architecture(preset, num_symbols=PIPERS_ROWS, num_speakers=speakers)
    torch.manual_seed(5)
    network = models.SynthesizerTrn(
        n_vocab=PIPERS_ROWS, spec_channels=513, segment_size=32, inter_channels=192, hidden_channels=192,
        filter_channels=768, n_heads=2, n_layers=6, kernel_size=3, p_dropout=0.1, resblock=sizes.resblock,
        resblock_kernel_sizes=sizes.resblock_kernel_sizes, resblock_dilation_sizes=sizes.resblock_dilation_sizes,
        upsample_rates=sizes.upsample_rates, upsample_initial_channel=sizes.upsample_initial_channel,
        upsample_kernel_sizes=sizes.upsample_kernel_sizes, n_speakers=speakers,
        gin_channels=sizes.conditioned_channels, use_sdp=True,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in network.parameters():
            if not parameter.any() or (parameter == 1).all():
                parameter += 0.1 * torch.randn_like(parameter)
        network.dp.flows[0].m -= 1.5  # about five frames per symbol
    discriminators = {"d": models.MultiPeriodDiscriminator(), "mrd": models.MultiResolutionDiscriminator()}
    names = [*("'" if symbol == "ʻ" else symbol for symbol in UZBEK.symbols), "ɯ", "ʁ"]
    ids = dict(zip(names, random.Random(2).sample(range(PIPERS_ROWS), len(names)), strict=True))
    settings = {
        "sample_rate": 22050, "hop_length": 256, "num_symbols": PIPERS_ROWS, "num_speakers": speakers,
        "dataset": [Path("/data/dataset.jsonl")], "dataset_dir": Path("/data"), "betas": (0.8, 0.99),
    }  # fmt: skip
    state = {f"model_g.{name}": tensor for name, tensor in network.state_dict().items()}
    for kind, network_of_kind in discriminators.items():
        state |= {f"model_{kind}.{name}": tensor for name, tensor in network_of_kind.state_dict().items()}
    content = {
        "epoch": 2164, "global_step": 1355540, "pytorch-lightning_version": "1.7.7", "state_dict": state,
        "optimizer_states": [{"state": {}, "param_groups": []}], "hparams_name": "kwargs", "hyper_parameters": settings,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(content, folder / "epoch=2164-step=1355540.ckpt")
    config = {
        "audio": {"sample_rate": 22050}, "num_symbols": PIPERS_ROWS, "num_speakers": speakers,
        "phoneme_id_map": {name: [row] for name, row in ids.items()},
        "speaker_id_map": {f"speaker {number}": number for number in range(speakers)} if speakers > 1 else {},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    return Pipers(folder / "epoch=2164-step=1355540.ckpt", network.eval(), discriminators, ids)


@torch.no_grad()
def assert_ours_speaks_as_theirs(theirs: Pipers, preset: VoicePreset, speakers: int) -> None:
    torch.manual_seed(6)
    voice = Voice(voice_architecture(preset, num_symbols=len(UZBEK.symbols), num_speakers=speakers)).eval()
    discriminators = our_discriminators()
    names = [f"speaker {number}" for number in range(speakers)][::-1]  # in reverse order
    assert begun_from(theirs.file.parent, voice, discriminators, UZBEK, names) == []
    symbols = UZBEK.symbols[2:22]
    ids_BS = torch.tensor([[UZBEK.symbols.index(symbol) for symbol in symbols]])
    their_ids_BS = torch.tensor([[theirs.ids["'" if symbol == "ʻ" else symbol] for symbol in symbols]])
    lengths_B = torch.tensor([len(symbols)])
    their_wave_B1T, *_ = theirs.network.infer(
        their_ids_BS, lengths_B, sid=torch.tensor([speakers - 1]), noise_scale=0.0, noise_scale_w=0.0
    )
    wave_B1T, durations_BS = voice.infer(ids_BS, lengths_B, torch.tensor([0]), noise_scale=0.0, noise_w=0.0)
    assert durations_BS.sum() > len(symbols)  # more than one frame per symbol
    assert their_wave_B1T.std() > 1e-3
    assert wave_B1T.shape == their_wave_B1T.shape
    assert (wave_B1T - their_wave_B1T).abs().max() < 1e-5
    for name, tensor in theirs.discriminators["d"].state_dict().items():
        assert torch.equal(discriminators["waves"].state_dict()[name], tensor), name
    for part in ("posterior_encoder.pre.weight", "duration_predictor.posterior_pre.weight"):  # modules of training only
        there = {"posterior_encoder.pre.weight": "enc_q.pre.weight"}.get(part, "dp.post_pre.weight")
        assert torch.equal(voice.state_dict()[part], theirs.network.state_dict()[there])


def test_a_voice_of_piper_speaks_with_our_code(tmp_path: Path) -> None:
    assert_ours_speaks_as_theirs(pipers(tmp_path, "medium", 2), "medium", 2)


@pytest.mark.slow
def test_a_high_voice_of_piper_speaks_with_our_code(tmp_path: Path) -> None:
    assert_ours_speaks_as_theirs(pipers(tmp_path, "high", 1), "high", 1)


def test_pipers_spectrogram_is_ours() -> None:
    """Compares except for the 1e-6 that Piper and Coqui add to the squares."""
    mel_processing = pytest.importorskip("piper.train.vits.mel_processing")
    sizes = voice_architecture("medium", num_symbols=8)
    wave_BT = torch.rand(2, 5000, generator=torch.Generator().manual_seed(1)) - 0.5
    theirs_BNF = mel_processing.spectrogram_torch(wave_BT, 1024, 22050, 256, 1024)
    ours_BNF = magnitudes(wave_BT, sizes.mel)
    assert ours_BNF.shape == theirs_BNF.shape == (2, 513, 5000 // 256)
    assert ((ours_BNF**2 + 1e-6).sqrt() - theirs_BNF).abs().max() < 1e-4


class System:
    """Is pickled as a path of another system, which cannot be created here, or as a function call."""

    def __init__(self, called: Callable[..., object], *given: str) -> None:
        self.called, self.given = called, given

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        return self.called, self.given


def test_paths_of_every_system_are_read_and_nothing_else_is_called(tmp_path: Path) -> None:
    windows, posix = System(pathlib.WindowsPath, "C:\\", "voice"), System(pathlib.PosixPath, "/", "voice")
    settings = {"windows": windows, "posix": posix}
    torch.save(settings, tmp_path / "settings.ckpt")
    read = read_foreign(tmp_path / "settings.ckpt", instead="", plain=PATHS)
    assert read == {"windows": pathlib.PureWindowsPath("C:\\voice"), "posix": pathlib.PurePosixPath("/voice")}
    assert not any(isinstance(path, Path) for path in read.values())
    torch.save({"state_dict": {}, "run": System(pathlib.Path.home)}, tmp_path / "other.ckpt")
    with pytest.raises(UserError, match="contains more than tensors"):
        read_foreign(tmp_path / "other.ckpt", instead="", plain=PATHS)


# Coqui ----------------------------------------------------------------------------------------------------------------

Shapes = dict[str, tuple[int, ...]]
NORMED = {"g": "weight_g", "v": "weight_v"}
PARAMETRIZED = {"g": "parametrizations.weight.original0", "v": "parametrizations.weight.original1"}


def plain(name: str, *shape: int) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def normed(name: str, spelling: dict[str, str], *shape: int, out: int = 0) -> Shapes:
    """`out` is the number of output channels of a transposed convolution."""
    return {
        f"{name}.{spelling['g']}": (shape[0], *(1 for _ in shape[1:])),
        f"{name}.{spelling['v']}": shape,
        f"{name}.bias": (out or shape[0],),
    }


def wavenet(name: str, layers: int, spelling: dict[str, str]) -> Shapes:
    made = normed(f"{name}.cond_layer", spelling, 2 * 192 * layers, 256, 1)
    for layer in range(layers):
        made |= normed(f"{name}.in_layers.{layer}", spelling, 384, 192, 5)
        made |= normed(f"{name}.res_skip_layers.{layer}", spelling, 384 if layer < layers - 1 else 192, 192, 1)
    return made


def separable(name: str) -> Shapes:
    made: Shapes = {}
    for layer in range(3):
        made |= plain(f"{name}.convs_sep.{layer}", 192, 1, 3) | plain(f"{name}.convs_1x1.{layer}", 192, 192, 1)
        for norm in ("norms_1", "norms_2"):
            made |= {f"{name}.{norm}.{layer}.gamma": (192,), f"{name}.{norm}.{layer}.beta": (192,)}
    return made


def text_encoder(rows: int) -> Shapes:
    made: Shapes = {"text_encoder.emb.weight": (rows, 192)} | plain("text_encoder.proj", 384, 192, 1)
    for layer in range(6):
        attention, feed = (f"text_encoder.encoder.{part}_layers.{layer}" for part in ("attn", "ffn"))
        made |= {f"{attention}.emb_rel_k": (1, 9, 96), f"{attention}.emb_rel_v": (1, 9, 96)}
        for part in "qkvo":
            made |= plain(f"{attention}.conv_{part}", 192, 192, 1)
        made |= plain(f"{feed}.conv_1", 768, 192, 3) | plain(f"{feed}.conv_2", 192, 768, 3)
        for norm in ("norm_layers_1", "norm_layers_2"):
            made |= {f"text_encoder.encoder.{norm}.{layer}.{one}": (192,) for one in ("gamma", "beta")}
    return made


def duration_predictor() -> Shapes:
    made = plain("duration_predictor.cond", 192, 256, 1)
    for prefix, width in (("", 192), ("post_", 1)):
        there = f"duration_predictor.{prefix}"
        made |= plain(f"{there}pre", 192, width, 1) | plain(f"{there}proj", 192, 192, 1) | separable(f"{there}convs")
        made |= {f"{there}flows.0.translation": (2, 1), f"{there}flows.0.log_scale": (2, 1)}
        for number in range(1, 5):
            flow = f"{there}flows.{number}"
            made |= plain(f"{flow}.pre", 192, 1, 1) | separable(f"{flow}.convs") | plain(f"{flow}.proj", 29, 192, 1)
    return made


def decoder(spelling: dict[str, str]) -> Shapes:
    made = plain("waveform_decoder.conv_pre", 512, 192, 7) | plain("waveform_decoder.cond_layer", 512, 256, 1)
    made |= {"waveform_decoder.conv_post.weight": (1, 32, 7)}
    for up, kernel in enumerate((16, 16, 4, 4)):
        width = 512 >> up
        made |= normed(f"waveform_decoder.ups.{up}", spelling, width, width // 2, kernel, out=width // 2)
        for block, size in enumerate((3, 7, 11)):
            for convs in ("convs1", "convs2"):
                for number in range(3):
                    name = f"waveform_decoder.resblocks.{3 * up + block}.{convs}.{number}"
                    made |= normed(name, spelling, width // 2, width // 2, size)
    return made


def coqui_discriminators(spelling: dict[str, str]) -> Shapes:
    scale = [(16, 1, 15), (64, 4, 41), (256, 4, 41), (1024, 4, 41), (1024, 4, 41), (1024, 1024, 5)]
    period = [(32, 1, 5, 1), (128, 32, 5, 1), (512, 128, 5, 1), (1024, 512, 5, 1), (1024, 1024, 5, 1)]
    made: Shapes = {}
    for net in range(6):
        for layer, shape in enumerate(period if net else scale):
            made |= normed(f"disc.nets.{net}.convs.{layer}", spelling, *shape)
        made |= normed(f"disc.nets.{net}.conv_post", spelling, *((1, 1024, 3, 1) if net else (1, 1024, 3)))
    return made


def coqui_shapes(rows: int, speakers: int, spelling: dict[str, str]) -> Shapes:
    """Returns tensors of a VITS in Coqui's own sizes, with several speakers."""
    made = text_encoder(rows) | duration_predictor() | decoder(spelling) | coqui_discriminators(spelling)
    made |= plain("posterior_encoder.pre", 192, 513, 1) | plain("posterior_encoder.proj", 384, 192, 1)
    made |= wavenet("posterior_encoder.enc", 16, spelling) | {"emb_g.weight": (speakers, 256)}
    for number in range(4):
        flow = f"flow.flows.{number}"
        made |= plain(f"{flow}.pre", 192, 96, 1) | plain(f"{flow}.post", 96, 192, 1)
        made |= wavenet(f"{flow}.enc", 4, spelling)
    return made


CHARACTERS = {
    "characters_class": "TTS.tts.models.vits.VitsCharacters", "pad": "<PAD>", "eos": None, "bos": None,
    "blank": "<BLNK>", "characters": "abcdefghijklmnopqrstuvxyz", "phonemes": None, "punctuations": "!'(),-.:;? ",
    "is_unique": False, "is_sorted": True, "vocab_dict": None,
}  # fmt: skip
COQUI = {"add_blank": True, "audio": {"sample_rate": 22050, "hop_length": 256}, "characters": CHARACTERS}
COQUIS_ROWS = 1 + 11 + 25 + 1  # the padding, signs, letters, and the blank


@pytest.fixture(scope="module")
def high() -> tuple[Voice, nn.Module]:
    sizes = voice_architecture("high", num_symbols=len(UZBEK.symbols), num_speakers=3)
    return Voice(sizes), our_discriminators()


@torch.no_grad()
@pytest.mark.parametrize("spelling", [NORMED, PARAMETRIZED], ids=["older", "newer"])
def test_every_tensor_of_coquis_voice_is_taken(
    spelling: dict[str, str], high: tuple[Voice, nn.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    voice, discriminators = high
    for parameter in (*voice.parameters(), *discriminators.parameters()):
        parameter.zero_()
    shapes = coqui_shapes(COQUIS_ROWS, 2, spelling)
    marks = {name: float(number) for number, name in enumerate(shapes, 1)}
    state = {name: torch.full((1,), marks[name]).expand(shape) for name, shape in shapes.items()}
    for table in ("text_encoder.emb.weight", "emb_g.weight"):  # Their numbers of rows matter.
        state[table] = torch.arange(float(shapes[table][0]))[:, None].expand(shapes[table])
    torch.save({"model": state, "optimizer": [{}, {}], "config": COQUI, "step": 130000}, tmp_path / "best_model.pth")
    torch.save({"bob": 1, "ann": 0}, tmp_path / "speakers.pth")
    reinitialised = begun_from(tmp_path, voice, discriminators, UZBEK, ("bob", "cem", "ann"))
    assert reinitialised == ["symbols: ^ $", "speakers: cem"]
    assert caplog.text == ""
    taken = {**voice.state_dict(), **discriminators.state_dict()}
    for table in ("text_encoder.embedding.weight", "speakers.weight"):
        taken.pop(table)
    used: list[float] = []
    for name, tensor in taken.items():
        for piece in tensor.chunk(3 if "query_key_value" in name else 1):
            low, highest = piece.aminmax()
            assert low == highest, name
            used.append(low.item())
    assert sorted(used) == sorted(marks[name] for name in shapes.keys() - {"text_encoder.emb.weight", "emb_g.weight"})
    given = voice.state_dict()
    for ours, theirs in (
        ("text_encoder.layers.4.attention_norm.weight", "text_encoder.encoder.norm_layers_1.4.gamma"),
        ("text_encoder.layers.4.convolutions_norm.bias", "text_encoder.encoder.norm_layers_2.4.beta"),
        ("text_encoder.layers.1.attention.relative_values", "text_encoder.encoder.attn_layers.1.emb_rel_v"),
        ("text_encoder.layers.1.attention.out.weight", "text_encoder.encoder.attn_layers.1.conv_o.weight"),
        ("posterior_encoder.wavenet.condition.weight_v", f"posterior_encoder.enc.cond_layer.{spelling['v']}"),
        ("posterior_encoder.wavenet.layers.14.out.weight_g",
         f"posterior_encoder.enc.res_skip_layers.14.{spelling['g']}"),
        ("flow.couplings.3.post.weight", "flow.flows.3.post.weight"),
        ("flow.couplings.1.wavenet.layers.2.conv.bias", "flow.flows.1.enc.in_layers.2.bias"),
        ("duration_predictor.flow.shift", "duration_predictor.flows.0.translation"),
        ("duration_predictor.posterior_flow.log_scale", "duration_predictor.post_flows.0.log_scale"),
        ("duration_predictor.flow.couplings.0.project.bias", "duration_predictor.flows.1.proj.bias"),
        ("duration_predictor.posterior_flow.couplings.3.stack.layers.1.pointwise_norm.weight",
         "duration_predictor.post_flows.4.convs.norms_2.1.gamma"),
        ("duration_predictor.text_stack.layers.2.depthwise_norm.bias", "duration_predictor.convs.norms_1.2.beta"),
        ("duration_predictor.text_post.weight", "duration_predictor.proj.weight"),
        ("duration_predictor.posterior_post.weight", "duration_predictor.post_proj.weight"),
        ("decoder.condition.bias", "waveform_decoder.cond_layer.bias"),
        ("decoder.resblocks.7.convs2.1.bias", "waveform_decoder.resblocks.7.convs2.1.bias"),
    ):  # fmt: skip
        assert (given[ours] == marks[theirs]).all(), ours
    attention = given["text_encoder.layers.5.attention.query_key_value.bias"].reshape(3, 192)
    expected = [marks[f"text_encoder.encoder.attn_layers.5.conv_{part}.bias"] for part in "qkv"]
    assert attention.unique(dim=1).flatten().tolist() == expected
    assert (
        discriminators.state_dict()["waves.discriminators.5.convs.2.bias"] == marks["disc.nets.5.convs.2.bias"]
    ).all()
    rows = {PAD: 37, " ": 11, "!": 1, "a": 12, "z": 36, "ʻ": 2}  # the blank is the last
    column_R = given["text_encoder.embedding.weight"][:, 191]
    assert {name: int(column_R[UZBEK.symbols.index(name)]) for name in rows} == rows
    assert given["speakers.weight"][::2, 255].tolist() == [1.0, 0.0]


VITS_CHARACTERS = {"characters_class": "TTS.tts.models.vits.VitsCharacters", "punctuations": "! ", "characters": "ba"}


@each_row(
    (VITS_CHARACTERS | {"pad": "_", "phonemes": "ɯ", "eos": "", "bos": ""}, {}, 7,
     {"!": 1, " ": 2, "b": 3, "a": 4, "ɯ": 5, PAD: 6, "<BLNK>": 6}),
    (VITS_CHARACTERS | {"pad": "<PAD>"}, {"add_blank": False}, 6,
     {PAD: 0, "<PAD>": 0, "!": 1, " ": 2, "b": 3, "a": 4, "<BLNK>": 5}),
    ({"characters_class": "TTS.tts.utils.text.characters.Graphemes", "pad": "<PAD>", "eos": "<EOS>",
      "bos": "<BOS>", "blank": "<BLNK>", "characters": "cab", "punctuations": "? "}, {}, 9,
     {"<PAD>": 0, EOS: 1, "<EOS>": 1, BOS: 2, "<BOS>": 2, PAD: 3, "<BLNK>": 3, "a": 4, "b": 5, "c": 6, "?": 7,
      " ": 8}),
    ({"pad": "_", "eos": "", "bos": None, "characters": "caca", "punctuations": "? ", "is_unique": True}, {}, 5,
     {PAD: 0, "a": 1, "c": 2, "?": 3, " ": 4}),
    ({"pad": "_", "characters": "ca^", "punctuations": "’", "is_sorted": False}, {}, 5,
     {PAD: 0, "c": 1, "a": 2, **dict.fromkeys("'ʻʼ‘’`", 4)}),
    ({"pad": "_", "characters": "ca", "phonemes": "ʃə", "punctuations": "?"}, {"use_phonemes": True}, 4,
     {PAD: 0, "ə": 1, "ʃ": 2, "?": 3}),
    ({"pad": "_", "characters": "ca", "phonemes": "ʃə", "punctuations": "?"}, {}, 4,
     {PAD: 0, "a": 1, "c": 2, "?": 3}),
    ({"characters_class": "TTS.tts.utils.text.characters.BaseVocabulary", "pad": "b", "vocab_dict": ["a", "b"]}, {},
     2, {"a": 0, "b": 1, PAD: 1}),
)  # fmt: skip
def test_coquis_characters_in_their_order(
    tmp_path: Path, section: dict[str, Any], more: dict[str, Any], rows: int, expected: dict[str, int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"characters": section, **more}), encoding="utf-8")
    assert coqui_labels({}, tmp_path / "best_model.pth", rows).symbols == expected


@each_row({"characters_class": "mine.Letters"}, {"is_unique": True, "is_sorted": False})
def test_characters_in_an_unknown_order_are_reinitialised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, section: dict[str, Any]
) -> None:
    caplog.clear()
    config = {"characters": {"pad": "_", "characters": "abc", "punctuations": "?", **section}}
    assert coqui_labels({"config": config}, tmp_path / "best_model.pth", 5).symbols == {}
    assert "the order of its characters is not known" in caplog.text


# Other files in the folder ------------------------------------------------------------------------------------------


def tiny_piper(**more: Tensor) -> dict[str, Any]:
    """Returns the minimum of a Piper checkpoint, in the sizes of `small`."""
    state = {"model_g.enc_p.emb.weight": torch.rand(8, 16), "model_g.dec.conv_pre.weight": torch.rand(32, 8, 7)}
    state["model_g.dec.conv_pre.bias"] = torch.rand(32)
    settings = {"sample_rate": 16000, "hop_length": 256}
    return {"state_dict": {**state, **more}, "hyper_parameters": settings}


def tiny_coqui() -> dict[str, Any]:
    state = {"text_encoder.emb.weight": torch.rand(8, 16), "waveform_decoder.conv_pre.weight": torch.rand(32, 8, 7)}
    return {"model": state, "config": COQUI}


def small_voice(speakers: int = 1) -> Voice:
    torch.manual_seed(0)
    sizes = replace(small("medium", speakers), num_symbols=len(UZBEK.symbols))
    return Voice(sizes)


def start_small(path: Path, voice: Voice) -> list[str]:
    return begun_from(path, voice, nn.ModuleDict(), UZBEK, ("anna", "bob")[: voice.architecture.num_speakers])


def test_without_its_configuration_a_voice_is_taken_but_for_symbols(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content, voice = tiny_piper(), small_voice()
    torch.save(content, tmp_path / "voice.ckpt")
    before = voice.text_encoder.embedding.weight.clone()
    reinitialised = start_small(tmp_path / "voice.ckpt", voice)
    assert f"{tmp_path / 'voice.ckpt'}: its symbols are unknown without the config.json" in caplog.text
    assert reinitialised[-1] == f"symbols: {' '.join(UZBEK.symbols)}"
    assert torch.equal(voice.text_encoder.embedding.weight, before)
    assert torch.equal(voice.decoder.pre.weight, content["state_dict"]["model_g.dec.conv_pre.weight"])


def test_sounds_of_another_rate_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save(tiny_piper(), tmp_path / "voice.ckpt")
    start_small(tmp_path / "voice.ckpt", small_voice())
    assert "trained with 16000 Hz, but the data have 22050 Hz" in caplog.text
    assert "frames of" not in caplog.text


def test_a_compiled_voice_is_the_same(tmp_path: Path) -> None:
    content, voice = tiny_piper(), small_voice()
    given = content["state_dict"]
    content["state_dict"] = {name.replace("model_g.", "model_g._orig_mod."): given[name] for name in given}
    torch.save(content, tmp_path / "voice.ckpt")
    start_small(tmp_path / "voice.ckpt", voice)
    assert torch.equal(voice.decoder.pre.weight, given["model_g.dec.conv_pre.weight"])


def test_what_does_not_fit_is_reinitialised(tmp_path: Path) -> None:
    """Speaker ids outside of their table, and queries, keys and values with different shapes."""
    there = "model_g.enc_p.encoder.attn_layers.0.conv_"
    more = {f"{there}{part}.bias": torch.rand(size) for part, size in zip("qkv", (16, 16, 4), strict=True)}
    more |= {f"{there}{part}.weight": torch.rand(16, 16, size) for part, size in zip("qkv", (1, 1, 2), strict=True)}
    torch.save(tiny_piper(**more, **{"model_g.emb_g.weight": torch.rand(2, 6)}), tmp_path / "voice.ckpt")
    config = {"phoneme_id_map": {"_": [7]}, "speaker_id_map": {"anna": -1, "bob": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    voice = small_voice(2)
    before = {name: tensor.clone() for name, tensor in voice.state_dict().items()}
    reinitialised = start_small(tmp_path / "voice.ckpt", voice)
    assert reinitialised[-2:] == [f"symbols: {' '.join(UZBEK.symbols[1:])}", "speakers: anna bob"]
    for name in ("speakers.weight", "text_encoder.layers.0.attention.query_key_value.weight"):
        assert torch.equal(voice.state_dict()[name], before[name])


def test_a_predictor_of_another_kind_is_not_taken(tmp_path: Path) -> None:
    """VITS without a stochastic predictor has a layer with the same name and shape, but another meaning."""
    more = {"model_g.dp.cond.weight": torch.rand(16, 6, 1), "model_g.dp.cond.bias": torch.rand(16)}
    torch.save(tiny_piper(**more), tmp_path / "voice.ckpt")
    voice = small_voice(2)
    before = voice.duration_predictor.condition.weight.clone()
    reinitialised = start_small(tmp_path / "voice.ckpt", voice)
    assert torch.equal(voice.duration_predictor.condition.weight, before)
    layers = {name.rpartition(".")[0] for name in voice.duration_predictor.state_dict()}
    assert f"duration_predictor: {len(layers)} of {len(layers)} layers" in reinitialised


def test_a_file_in_a_folder(tmp_path: Path) -> None:
    assert file_at(tmp_path) is None
    assert file_at(tmp_path / "gone") is None  # The error is that of our own checkpoints.
    for name in ("speakers.pth", "checkpoint_1000.pth"):
        (tmp_path / name).touch()
    assert file_at(tmp_path) == tmp_path / "checkpoint_1000.pth"
    (tmp_path / "checkpoint_2000.pth").touch()
    with pytest.raises(UserError, match=r"holds checkpoint_1000\.pth, checkpoint_2000\.pth"):
        file_at(tmp_path)
    (tmp_path / "best_model.pth").touch()
    assert file_at(tmp_path) == tmp_path / "best_model.pth"
    (tmp_path / "checkpoint_last.pt").touch()
    assert file_at(tmp_path) is None


GLOW = {"model": {"encoder.emb.weight": torch.rand(3, 4), "decoder.flows.0.logs": torch.rand(1)}}
OF_NO_VOICE = "holds no voice of Piper or of Coqui's VITS"


@each_row(
    (GLOW, None, OF_NO_VOICE),
    ({"generator": {"conv_pre.weight": torch.rand(3)}}, None, OF_NO_VOICE),
    ({"state_dict": [1], "model": "VITS"}, None, OF_NO_VOICE),
    ([torch.rand(2)], None, "does not contain named tensors"),
    ({**tiny_piper(), "more": System(pathlib.Path.home)}, None, "reading it could run code"),
    (tiny_piper(), "{", r"config\.json: damaged"),
    (tiny_piper(), "[1]", r"config\.json: holds no JSON object"),
    (tiny_piper(), json.dumps(COQUI), r"config\.json: holds no phoneme_id_map"),
    (tiny_piper(), '{"phoneme_id_map": {"a": [8]}}', r"'a' is symbol 8, and the voice has 8"),
    (tiny_piper(), '{"phoneme_id_map": {"a": ["b"]}}', r"'a' is symbol 'b'"),
    (tiny_coqui(), None, f"best_model.ckpt: {COQUIS_ROWS} characters, and the voice has 8"),
    (tiny_coqui(), '{"phoneme_id_map": {"a": [1]}}', r"config\.json: holds no characters"),
    (tiny_piper(**{"model_g.dec.conv_pre.bias": torch.full((32,), torch.inf)}), '{"phoneme_id_map": {}}',
     r"decoder\.pre\.bias: not all weights are finite"),
)  # fmt: skip
def test_what_is_no_voice_is_refused_and_nothing_is_lost(
    tmp_path: Path, content: Any, config: str | None, said: str
) -> None:
    torch.save(content, tmp_path / "best_model.ckpt")
    (tmp_path / "config.json").unlink(missing_ok=True)
    if config is not None:
        (tmp_path / "config.json").write_text(config, encoding="utf-8")
    voice = small_voice()
    before = {name: tensor.clone() for name, tensor in voice.state_dict().items()}
    with pytest.raises(UserError, match=said) as raised:
        start_small(tmp_path / "best_model.ckpt", voice)
    assert raised.value.hint
    assert str(tmp_path) in raised.value.message
    assert all(torch.equal(tensor, before[name]) for name, tensor in voice.state_dict().items())


def test_what_no_part_of_a_voice_takes_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {"model_g.style.weight": torch.ones(2), "model_g.dec.conv_pre.weight_v": torch.ones(2)}
    torch.save(tiny_piper(**extra), tmp_path / "voice.ckpt")
    with caplog.at_level(logging.INFO):
        start_small(tmp_path / "voice.ckpt", small_voice())
    assert "voice.ckpt: not used: model_g.style (1), model_g.dec (1)" in caplog.text


def test_damaged_and_missing_files_are_refused(tmp_path: Path) -> None:
    torch.save(tiny_piper(), tmp_path / "voice.ckpt")
    whole = (tmp_path / "voice.ckpt").read_bytes()
    for size in (0, 5, len(whole) // 2, len(whole) - 100):
        (tmp_path / "voice.ckpt").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"voice\.ckpt: (truncated or damaged|contains more|an empty file)"):
            start_small(tmp_path / "voice.ckpt", small_voice())
    with pytest.raises(UserError, match=r"gone\.pth: no such file or folder"):
        start_small(tmp_path / "gone.pth", small_voice())
