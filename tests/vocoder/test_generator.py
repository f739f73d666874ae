"""Compares the generator with stored waves of the same weights, and tests its tensor names, shapes and properties."""

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks

from gputrain.audio.config import Mel
from gputrain.audio.weight_norm import WeightNormed, cached_weights
from gputrain.vocoder.config import NsfHifiganArchitecture
from gputrain.vocoder.generator import Generator, HarmonicSource, Noise, SineSource, draw_noise
from tests.tables import each_row

DATA = Path(__file__).parent.parent / "data" / "vocoder"
TINY = {name: NsfHifiganArchitecture(upsample_initial_channel=32, mini_nsf=name == "mini") for name in ("full", "mini")}
variants = pytest.mark.parametrize("name", TINY)


def stored(architecture: NsfHifiganArchitecture) -> dict[str, Tensor]:
    """Returns an oracle: weights, inputs and the resulting wave."""
    arrays = unpacked("mini" if architecture.mini_nsf else "full")
    return {key: torch.from_numpy(array).clone() for key, array in arrays.items()}


@functools.cache
def unpacked(name: str) -> dict[str, Any]:
    with np.load(DATA / f"nsf_hifigan_{name}_tiny.npz") as file:
        return {key: file[key] for key in file.files}


def build(architecture: NsfHifiganArchitecture, **options: bool) -> Generator:
    """Returns a generator with the oracle's weights."""
    generator = Generator(architecture, **options)
    weights = {key[7:]: tensor for key, tensor in stored(architecture).items() if key.startswith("weight.")}
    generator.load_state_dict(weights)
    return generator


def inputs(items: int = 2, frames: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns mels, and pitches with an unvoiced end."""
    random = torch.Generator().manual_seed(seed)
    f0_BF = 100 + 300 * torch.rand(items, frames, generator=random)
    f0_BF[:, -2:] = 0
    return torch.randn(items, 128, frames, generator=random), f0_BF


def noise_for(architecture: NsfHifiganArchitecture, items: int = 2, frames: int = 6) -> Noise:
    return draw_noise(architecture, items, frames, torch.Generator().manual_seed(3))


def gradients(generator: Generator, wave_B1T: Tensor) -> list[Tensor]:
    """Returns the gradients of every parameter for a loss that depends on all samples."""
    weights = torch.linspace(-1, 1, wave_B1T.shape[-1])
    return list(torch.autograd.grad((wave_B1T * weights + wave_B1T**2).sum(), list(generator.parameters())))


def difference(ours: list[Tensor], reference: list[Tensor]) -> float:
    """Returns the largest difference relative to the largest value of each tensor."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, reference, strict=True))


def largest(difference: Tensor) -> float:
    return difference.abs().max().item()


@variants
def test_the_wave_equals_the_oracle(name: str) -> None:
    oracle = stored(TINY[name])
    with torch.no_grad():
        wave_B1T = build(TINY[name])(oracle["mel"], oracle["f0"])
    assert wave_B1T.shape == oracle["wav"].shape
    assert largest(wave_B1T - oracle["wav"]) < 1e-5


@variants
def test_names_and_shapes_are_those_that_others_load(name: str) -> None:
    contract = json.loads((DATA / "nsf_hifigan_512_tensors.json").read_text(encoding="utf-8"))[name]
    with torch.device("meta"):
        generator = Generator(NsfHifiganArchitecture(mini_nsf=name == "mini"))
    assert {key: list(tensor.shape) for key, tensor in generator.state_dict().items()} == contract
    assert len(contract) == {"full": 303, "mini": 293}[name]


@each_row((512, False, 14_178_956), (512, True, 14_143_234), (1024, False, 55_685_388))
def test_parameters(channels: int, mini_nsf: bool, parameters: int) -> None:
    with torch.device("meta"):
        generator = Generator(NsfHifiganArchitecture(upsample_initial_channel=channels, mini_nsf=mini_nsf))
    assert sum(parameter.numel() for parameter in generator.parameters()) == parameters


@variants
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "mel": Mel(16000, 128, 256, 1024, 1024, 40, 8000), "upsample_rates": (8, 8, 2, 2),
            "upsample_kernel_sizes": (16, 11, 7, 2),
        },
    ],
    ids=["usual", "other kernels"],
)  # fmt: skip
def test_before_any_step_the_wave_has_the_pitch_alone(name, changes):
    """A constant mel without a voice gives neither a tone at the frame rate nor an offset; with one, the pitch is heard
    and nothing at the frame rate. Away from the ends, where the convolutions see nothing beyond; the weights are made
    in fp32, whose rounding is left."""
    architecture = replace(TINY[name], **changes)
    hop, rate_hz = architecture.mel.hop_size, architecture.mel.sampling_rate
    for seed in range(3):
        torch.manual_seed(seed)
        generator = Generator(architecture).double()
        mel_1MF = torch.randn(1, 128, 1, dtype=torch.float64).expand(1, 128, 40) - 5
        hz = 3.3 * rate_hz / hop
        waves = []
        for f0_hz in (0.0, hz):
            with torch.no_grad():
                wave_11T = generator(mel_1MF, torch.full((1, 40), f0_hz, dtype=torch.float64))
            waves.append(wave_11T[0, 0, 10 * hop : 30 * hop])
        assert largest(waves[0]) < 1e-6
        spectrum = torch.fft.rfft(waves[1] * torch.hann_window(20 * hop, dtype=torch.float64)).abs()
        pitch = spectrum[[66 * k for k in (1, 2, 3)]].max()  # With 20 frames, harmonics of the pitch are 66 bins apart.
        assert pitch > 1e-3
        assert spectrum[[20 * k for k in (1, 2, 4, 5)]].max() < 0.1 * pitch  # The frame rate is bin 20.


@pytest.mark.parametrize("mini_nsf", [False, True])
def test_odd_rates_make_a_hop_as_well(mini_nsf: bool) -> None:
    """24 kHz has hops of 300 samples; kernel and rate may differ by an odd number."""
    architecture = NsfHifiganArchitecture(
        mel=Mel(sampling_rate=24000, hop_size=300), upsample_rates=(5, 5, 4, 3), upsample_kernel_sizes=(10, 11, 8, 6),
        upsample_initial_channel=32, mini_nsf=mini_nsf,
    )  # fmt: skip
    with torch.no_grad():
        assert Generator(architecture)(*inputs(frames=5), noise_for(architecture, frames=5)).shape == (2, 1, 1500)


@variants
def test_no_pitch_is_no_sine(name: str) -> None:
    architecture = TINY[name]
    generator = build(architecture)
    mel_BMF, f0_BF = inputs()
    with torch.no_grad():
        wave_B1T = generator(mel_BMF, torch.zeros_like(f0_BF))
        assert wave_B1T.isfinite().all()
        assert largest(wave_B1T - generator(mel_BMF, f0_BF)) > 1e-4
        if name == "full":  # The source is noise of the given standard deviation.
            source = HarmonicSource(architecture)
            silent_BTH = source._sines(torch.zeros(2, 6), noise_for(architecture), None)
            assert torch.allclose(silent_BTH, 0.1 / 3 * noise_for(architecture).source_BTH)
        else:
            assert torch.equal(SineSource(architecture)(torch.zeros(2, 6), None, None), torch.zeros(2, 1, 384))


def test_the_full_source_has_nine_harmonics() -> None:
    """For a second of 210 Hz, the energy is equal at 210, 420, ... 1890 Hz, with much weaker noise."""
    architecture = NsfHifiganArchitecture(mel=Mel(sampling_rate=44032))  # It has 86 hops per second.
    f0_BF, noise = torch.full((1, 86), 210.0), noise_for(architecture, items=1, frames=86)
    sines_BTH = HarmonicSource(architecture)._sines(f0_BF, noise, None)
    amplitude_HN = torch.fft.rfft(sines_BTH[0].T).abs() * 2 / 44032
    for harmonic in range(1, 10):
        assert amplitude_HN[harmonic - 1].argmax() == 210 * harmonic
        assert amplitude_HN[harmonic - 1, 210 * harmonic].item() == pytest.approx(0.1, rel=0.01)
    clean_BTH = HarmonicSource(architecture)._sines(f0_BF, noise._replace(source_BTH=0 * noise.source_BTH), None)
    assert (sines_BTH - clean_BTH).std().item() == pytest.approx(0.003, rel=0.01)
    assert torch.allclose(clean_BTH[0, -1], 0.1 * torch.sin(2 * math.pi * noise.phase_BH[0]), atol=1e-3)


def test_the_mini_source_glides() -> None:
    """The pitch rises linearly from 100 to 200 Hz in a frame, then is constant: the phase is its integral, in fp64."""
    source = SineSource(NsfHifiganArchitecture())
    made_T = source(torch.tensor([[100.0, 200.0, 200.0]]), None, None)[0, 0].double()
    place_T = torch.arange(64, dtype=torch.float64) / 64
    pitch_T = torch.cat([100 + 100 * place_T, torch.full((128,), 200.0, dtype=torch.float64)])
    assert torch.allclose(made_T, torch.sin(2 * math.pi * (pitch_T / (44100 / 8)).cumsum(0)), atol=1e-5)


@variants
def test_an_hour_stays_in_tune(name: str) -> None:
    """Compares phases of a steady tone with exact arithmetic after 100 000 frames."""
    source = build(TINY[name]).m_source
    frames, hz = 100_000, 441.0 + 1 / 64
    start_BF = source.frame_starts(torch.full((1, frames), hz)).double()
    expected = (hz * 512 * (frames - 1) / 44100) % 1
    off = (start_BF[0, -1] - expected).item()
    assert abs(off - round(off)) < 0.03
    assert start_BF.abs().max() <= 1


@variants
def test_chunks_of_a_sound_fit_together(name: str) -> None:
    generator = build(TINY[name])
    mel_BMF, f0_BF = inputs(items=1, frames=60)
    chunk, margin = slice(20, 60), 14  # Frames in the receptive field to either side.
    with torch.no_grad():
        whole_B1T = generator(mel_BMF, f0_BF)
        start_BF = generator.frame_starts(f0_BF)
        part_B1T = generator(mel_BMF[..., chunk], f0_BF[:, chunk], None, start_BF[:, chunk])
        unaware_B1T = generator(mel_BMF[..., chunk], f0_BF[:, chunk])
    expected = whole_B1T[..., (20 + margin) * 512 :]
    assert largest(part_B1T[..., margin * 512 :] - expected) < 1e-5
    assert largest(unaware_B1T[..., margin * 512 :] - expected) > 1e-4


@variants
def test_any_split_of_a_batch_sounds_the_same(name: str) -> None:
    architecture = replace(TINY[name], noise_sigma=0.1)
    generator = build(architecture)
    mel_BMF, f0_BF = inputs(items=3)
    noise = noise_for(architecture, items=3)
    with torch.no_grad():
        whole = generator(mel_BMF, f0_BF, noise)
        parts = [
            generator(mel_BMF[part], f0_BF[part], Noise(*(tensor[part] for tensor in noise)))
            for part in (slice(0, 1), slice(1, 3))
        ]
    assert largest(torch.cat(parts) - whole) < 1e-5


@variants
def test_noise(name: str) -> None:
    architecture = replace(TINY[name], noise_sigma=0.1)
    noise, again = noise_for(architecture), noise_for(architecture)
    assert all(map(torch.equal, noise, again))
    harmonics = {"full": 9, "mini": 0}[name]
    assert [tuple(tensor.shape) for tensor in noise] == [(2, harmonics), (2, 3072, harmonics), (2, 32, 6)]
    assert noise_for(TINY[name]).features_BCF.numel() == 0
    assert torch.equal(noise.phase_BH[:, :1], torch.zeros(2, min(1, harmonics)))
    generator = build(architecture)
    with torch.no_grad():
        plain, noisy = generator(*inputs()), generator(*inputs(), noise)
        without_features = generator(*inputs(), noise._replace(features_BCF=0 * noise.features_BCF))
    assert largest(noisy - without_features) > 1e-4
    assert (largest(without_features - plain) > 1e-4) == (name == "full")


@variants
def test_16_bits_come_close_to_fp32(name: str) -> None:
    """The phases and the last convolution stay in fp32: in bf16, a wave would have steps of an eighth of a percent."""
    generator = build(TINY[name])
    mel_BMF, f0_BF = inputs()
    noise = noise_for(TINY[name])
    exact = generator(mel_BMF, f0_BF, noise)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        coarse = generator(mel_BMF, f0_BF, noise)
        source, coarse_source = (generator.m_source(pitch, noise, None) for pitch in (f0_BF, f0_BF.clone()))
    assert coarse.dtype == source.dtype == torch.float32
    assert torch.equal(coarse_source, generator.m_source(f0_BF, noise, None))
    assert largest(coarse - coarse.bfloat16()) > 0
    assert (coarse - exact).std() / exact.std() < 0.02
    slopes, coarse_slopes = (torch.cat([g.flatten() for g in gradients(generator, y)]) for y in (exact, coarse))
    assert F.cosine_similarity(slopes, coarse_slopes, dim=0) > 0.99


@variants
def test_gradients_reach_every_parameter(name: str) -> None:
    """They also agree with a finite difference along a random direction, in fp64."""
    architecture = replace(TINY[name], noise_sigma=0.1)
    generator = build(architecture).double()
    mel_BMF, f0_BF = (x.double() for x in inputs(items=1, frames=3))
    noise = Noise(*(tensor.double() for tensor in noise_for(architecture, items=1, frames=3)))
    weights_T = torch.linspace(-1, 1, 1536, dtype=torch.float64)

    def loss() -> Tensor:
        return (generator(mel_BMF, f0_BF, noise) * weights_T).sum()

    loss().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in generator.parameters())
    random = torch.Generator().manual_seed(1)
    directions = [torch.randn(p.shape, generator=random, dtype=p.dtype) for p in generator.parameters()]
    slope = sum((p.grad * direction).sum() for p, direction in zip(generator.parameters(), directions, strict=True))
    values = []
    with torch.no_grad():
        for step in (1e-7, -2e-7):
            for parameter, direction in zip(generator.parameters(), directions, strict=True):
                parameter.add_(step * direction)
            values.append(loss().item())
    assert slope.item() == pytest.approx((values[0] - values[1]) / 2e-7, rel=1e-3)


@variants
def test_checkpointing_gives_the_same_gradients(name: str) -> None:
    noise = noise_for(TINY[name])
    plain, repeated = build(TINY[name]), build(TINY[name], checkpointing=True)
    with cached_weights(repeated):
        repeated(*inputs(), noise).square().sum().backward()
    plain(*inputs(), noise).square().sum().backward()
    assert difference([p.grad for p in repeated.parameters()], [p.grad for p in plain.parameters()]) < 1e-5


@variants
def test_weights_made_once_give_the_same_gradients(name: str) -> None:
    generator = build(TINY[name])
    parts = [(inputs(seed=seed), noise_for(TINY[name])) for seed in (0, 1)]
    made: list[WeightNormed] = []
    waves = []
    for (mel_BMF, f0_BF), noise in parts:
        waves.append(generator(mel_BMF, f0_BF, noise))
        waves[-1].square().sum().backward()
    expected = [parameter.grad for parameter in generator.parameters()]
    generator.zero_grad(set_to_none=True)
    for layer in generator.modules():
        if isinstance(layer, WeightNormed):
            layer.compute_weight = lambda layer=layer, plain=layer.compute_weight: made.append(layer) or plain()
    with cached_weights(generator):
        for ((mel_BMF, f0_BF), noise), wave in zip(parts, waves, strict=True):
            again = generator(mel_BMF, f0_BF, noise)
            assert torch.equal(again, wave)
            again.square().sum().backward()
    layers = len([layer for layer in generator.modules() if isinstance(layer, WeightNormed)])
    assert len(made) == layers == 97
    assert difference([parameter.grad for parameter in generator.parameters()], expected) < 1e-5
    with torch.no_grad():
        generator.conv_pre.weight_g.mul_(2)
        assert not torch.equal(generator(*inputs(), parts[0][1]), waves[0])


def test_weights_made_once_and_an_error_leave_no_trace() -> None:
    generator = build(TINY["mini"])

    def fail() -> None:
        with cached_weights(generator):
            generator(*inputs()).sum().backward()
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert all(p.grad is None for n, p in generator.named_parameters() if "weight_" in n)
    assert generator.conv_pre.made is None
    generator.requires_grad_(False)
    with cached_weights(generator):  # Frozen weights have no gradients to propagate.
        mel_BMF = inputs()[0].requires_grad_()
        generator(mel_BMF, inputs()[1]).sum().backward()
    assert mel_BMF.grad.abs().max() > 0


@pytest.mark.parametrize(("checkpointing", "tensors"), [(False, 45 * 2), (True, 5)])
def test_what_a_forward_pass_keeps(checkpointing: bool, tensors: int) -> None:
    """It keeps two tensors for each of the 45 pairs of convolutions in residual blocks; with checkpointing, one per
    stage."""
    generator = build(TINY["mini"], checkpointing=checkpointing)
    weights = {parameter.untyped_storage().data_ptr() for parameter in generator.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        wave = generator(*inputs(items=3, frames=4))
    large = [t for place, t in kept.items() if place not in weights and t.ndim == 3 and t.shape[0] == 3]
    outside = 10  # Inputs of the upsamplings and of conv_post, the mel, the sine, the wave, the features.
    assert wave.requires_grad
    assert tensors <= len(large) <= tensors + outside


def test_fp32_sums_keep_nothing_for_the_backward_pass_under_autocast() -> None:
    """Residual blocks and upsampling keep 16-bit tensors only, as many as in `test_what_a_forward_pass_keeps`; what is
    kept in fp32 is the mel, the sine, the input of the last convolution and the wave."""
    generator, kept = build(TINY["mini"]), dict[int, Tensor]()
    inside: dict[str, set[torch.dtype]] = {"sums": set(), "convolutions": set()}
    for block in generator.resblocks:
        block.register_forward_hook(lambda module, given, made: inside["sums"].update((given[0].dtype, made.dtype)))
        block.convs1[0].register_forward_hook(
            lambda module, given, made: inside["convolutions"].update((given[0].dtype, made.dtype))
        )

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", dtype=torch.bfloat16):
        generator(*inputs(items=3, frames=4))
    assert inside == {"sums": {torch.float32}, "convolutions": {torch.bfloat16}}
    large = [t for t in kept.values() if t.ndim == 3 and t.shape[0] == 3]
    assert 90 + 5 <= sum(t.dtype == torch.bfloat16 for t in large) <= 90 + 7
    assert sum(t.dtype == torch.float32 for t in large) <= 4


@pytest.mark.slow
@variants
def test_compiles_as_one_graph(name: str) -> None:
    """There is one trace without and one within `cached_weights`, and gradients are those of eager mode in fp64. In
    16 bits, where a compiled convolution is rounded before its bias is added, the wave is as near to that of fp32."""
    generator, noise = build(replace(TINY[name], noise_sigma=0.1)), noise_for(replace(TINY[name], noise_sigma=0.1))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(generator.forward, backend=counter, dynamic=False, fullgraph=True)
    exact = generator(*inputs(), noise)
    assert (compiled(*inputs(), noise) - exact).norm() < 1e-4 * exact.norm()
    for _ in range(3):
        with cached_weights(generator):
            compiled(*inputs(), noise)
    assert counter.frame_count == 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        errors = [(forward(*inputs(), noise) - exact).norm().item() for forward in (generator, compiled)]
    assert 0 < errors[1] < 2 * errors[0]

    generator.double()
    noise, given = Noise(*(one.double() for one in noise)), [one.double() for one in inputs()]
    expected = gradients(generator, generator(*given, noise))
    assert difference(gradients(generator, compiled(*given, noise)), expected) < 1e-10
